"""Products of token-expert pairs with their experts' weights, as vLLM's ``fused_moe_kernel``.

The sum is the same: float32 in order of K, times the router weight, rounded once
(``tests/gpu`` compares the bits). Two things differ. K can be cut into slices, each
rounded and stored apart, in one launch. And a new number of tokens never compiles a new
kernel: vLLM ships some eighteen tiles per shape, and its kernel is compiled for each of
them twice, for even and odd batches, in the middle of serving.

The tile does not change the bits, so it follows the number of pairs per expert.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from patchkit.providers.cuda.linear import Tile


class Aligned(NamedTuple):
    """Pairs sorted by expert, in blocks of one expert each: vLLM's ``moe_align_block_size``.

    Attributes:
        pair: int32, pair ids; at least the number of pairs where a block is not full.
        expert: int32 ``[blocks]``, the local expert; negative where another rank has it.
        filled: int32 ``[1]``, how many entries of ``pair`` are in use.
    """

    pair: Tensor
    expert: Tensor
    filled: Tensor


def tile_for(pairs_per_expert: float) -> Tile:
    """The fastest tile that was found on an H200, of few: every one is compiled once."""
    if pairs_per_expert <= 8:
        return Tile(16, 128, 128, 1, 4, 3)
    if pairs_per_expert <= 64:
        return Tile(32, 128, 128, 1, 4, 3)
    return Tile(128, 256, 64, 1, 8, 3)


# Neither is a number to compile for: both change with every batch.
@triton.jit(do_not_specialize=["pairs", "blocks_m"])
def _grouped_kernel(
    x_ptr,
    w_ptr,
    weight_ptr,
    out_ptr,
    pair_ptr,
    expert_ptr,
    filled_ptr,
    N,
    pairs,
    blocks_m,
    stride_x,
    stride_we,
    stride_wn,
    stride_slice,
    K: tl.constexpr,
    SLICES: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    pid = tl.program_id(0)
    blocks_n = tl.cdiv(N, BLOCK_N)
    per_group = GROUP_M * blocks_n
    first_m = (pid // per_group) * GROUP_M
    group_m = min(blocks_m - first_m, GROUP_M)
    pid_m = first_m + (pid % per_group) % group_m
    pid_n = (pid % per_group) // group_m
    if pid_m * BLOCK_M >= tl.load(filled_ptr):
        return
    pair = tl.load(pair_ptr + pid_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    present = pair < pairs
    column = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    out_ptrs = out_ptr + pair[:, None] * N + column[None, :]
    stored = present[:, None] & (column[None, :] < N)
    dtype = out_ptr.dtype.element_ty
    expert = tl.load(expert_ptr + pid_m).to(tl.int64)
    if expert < 0:  # another rank's
        zeros = tl.zeros((BLOCK_M, BLOCK_N), dtype)
        for _ in tl.static_range(SLICES):
            tl.store(out_ptrs, zeros, mask=stored)
            out_ptrs += stride_slice
        return
    # Rows and outputs past the end read the first ones and are not stored.
    row = tl.where(present, pair // PAIRS_PER_ROW, 0)
    output = tl.where(column < N, column, 0).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + row[:, None] * stride_x + offs_k[None, :]
    w_ptrs = w_ptr + expert * stride_we + output[None, :] * stride_wn + offs_k[:, None]
    if WEIGHTED:
        weight = tl.load(weight_ptr + pair, mask=present, other=0.0)
    STEPS: tl.constexpr = K // SLICES // BLOCK_K
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # One loop over all slices, so that the next slice is loaded while this one ends.
    for step in range(SLICES * STEPS):
        acc = tl.dot(tl.load(x_ptrs), tl.load(w_ptrs), acc)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
        if step % STEPS == STEPS - 1:
            if WEIGHTED:
                acc *= weight[:, None]
            tl.store(out_ptrs, acc.to(dtype), mask=stored)
            out_ptrs += stride_slice
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)


def grouped_product(
    x_RK: Tensor,
    w_ENK: Tensor,
    aligned: Aligned,
    out_SPN: Tensor,
    tile: Tile,
    *,
    weight_P: Tensor | None = None,
) -> None:
    """Write each pair's product with its expert's weights, slice by slice of K.

    Args:
        x_RK: Rows contiguous; R is P, or the number of tokens, each of which is the
            operand of as many pairs in a row.
        w_ENK: Of the local experts, rows contiguous.
        aligned: For the tile's rows.
        out_SPN: Contiguous; S is the number of slices.
        tile: Launch parameters; a shorter K serves narrow slices.
        weight_P: float32, multiplied in float32 before the rounding.

    Raises:
        ValueError: The operands disagree, or a slice of K is no multiple of 16.
    """
    slices, pairs, outputs = out_SPN.shape
    rows, width = x_RK.shape
    if pairs == 0:
        return
    step = tile.k
    while step > 16 and (width // slices) % step:
        step //= 2
    if width != w_ENK.shape[2] or outputs != w_ENK.shape[1] or width % slices or pairs % rows:
        raise ValueError(
            f"experts: operand {tuple(x_RK.shape)}, weights {tuple(w_ENK.shape)} and output "
            f"{tuple(out_SPN.shape)} (slices, pairs, outputs) do not belong together"
        )
    if (width // slices) % step:
        raise ValueError(
            f"experts: K = {width} in {slices} slices: every slice must be a multiple of 16"
        )
    # No more blocks than pairs can have a row.
    blocks_m = min(aligned.expert.numel(), pairs)
    _grouped_kernel[(blocks_m * triton.cdiv(outputs, tile.n),)](
        x_RK, w_ENK, weight_P, out_SPN, *aligned, outputs, pairs, blocks_m,
        x_RK.stride(0), w_ENK.stride(0), w_ENK.stride(1), out_SPN.stride(0),
        width, slices, pairs // rows, weight_P is not None,
        tile.m, tile.n, step, tile.group, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
