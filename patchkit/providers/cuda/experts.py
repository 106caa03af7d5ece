"""Mixture-of-experts layer: vLLM's grouped product forward, grouped backward.

Agreed roundings: gate and up projections in bf16, ``silu * up`` by vLLM's C++
kernel in bf16; each expert's output is multiplied by its router weight in
float32 and rounded to bf16; the outputs of a token are added in float32 in the
order of its expert slots, rounded once per rank and added over ranks in bf16. With
:class:`~patchkit.providers.cuda.topology.AnyTopology` each slice of each expert's
output is rounded, and all of them are added exactly.

Neither direction loops over experts or waits for the GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from patchkit.providers.cuda.grouped import Aligned, grouped_product, tile_for
from patchkit.providers.cuda.linear import Tile
from patchkit.providers.cuda.sums import whole_sum
from patchkit.providers.cuda.topology import AnyTopology, RolloutTopology


@triton.jit
def _combine_kernel(
    each_ptr,
    expert_ptr,
    index_ptr,
    out_ptr,
    width,
    stride_slice,
    stride_pair,
    block_size,
    TOP_K: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCKS: tl.constexpr,
    INDEXED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add a token's expert outputs per rank in slot order, then the ranks, rounding each."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    dtype = out_ptr.dtype.element_ty
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for part in tl.static_range(SLICES):
        for rank in tl.static_range(BLOCKS):
            acc = tl.zeros([BLOCK], dtype=tl.float32)
            for slot in tl.static_range(TOP_K):
                pair = token * TOP_K + slot
                row = tl.load(index_ptr + pair).to(tl.int64) if INDEXED else pair
                value = tl.load(
                    each_ptr + part * stride_slice + row * stride_pair + column,
                    mask=mask,
                    other=0.0,
                ).to(tl.float32)
                if BLOCKS > 1:
                    here = tl.load(expert_ptr + pair) // block_size == rank
                    value = tl.where(here, value, 0.0)
                acc += value
            rounded = acc.to(dtype).to(tl.float32)
            if part + rank == 0:  # noqa: SIM108 - decided when the kernel is compiled
                total = rounded
            else:
                total = (total + rounded).to(dtype).to(tl.float32)
    tl.store(out_ptr + token * width + column, total.to(dtype), mask=mask)


def _combine(
    each_CPH: Tensor, expert_Tk: Tensor, index_P: Tensor | None, blocks: int, block_size: int
) -> Tensor:
    slices, _, width = each_CPH.shape
    tokens, top_k = expert_Tk.shape
    out = torch.empty((tokens, width), device=each_CPH.device, dtype=each_CPH.dtype)
    if tokens:
        block = min(1024, triton.next_power_of_2(width))
        _combine_kernel[(tokens, triton.cdiv(width, block))](
            each_CPH, expert_Tk, expert_Tk if index_P is None else index_P, out, width,
            each_CPH.stride(0), each_CPH.stride(1), block_size, top_k, slices, blocks,
            index_P is not None, block, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _activation_backward_kernel(
    gate_up_ptr,
    pair_ptr,
    weight_ptr,
    grad_ptr,
    grad_gate_up_ptr,
    scaled_ptr,
    grad_weight_ptr,
    width,
    BLOCK: tl.constexpr,
):
    """Sorted row r is pair ``pair[r]``: gate and up lie at the pair, gradients at r."""
    row = tl.program_id(0).to(tl.int64)
    pair = tl.load(pair_ptr + row).to(tl.int64)
    weight = tl.load(weight_ptr + pair)
    inner = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < width
        gate_at = gate_up_ptr + pair * 2 * width + column
        gate = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_at + width, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        silu = gate * sigmoid
        inner += grad * silu * up
        grad = grad * weight
        dtype = scaled_ptr.dtype.element_ty
        tl.store(scaled_ptr + row * width + column, (weight * silu * up).to(dtype), mask=mask)
        grad_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        to = grad_gate_up_ptr + row * 2 * width + column
        tl.store(to, grad_gate.to(dtype), mask=mask)
        tl.store(to + width, (grad * silu).to(dtype), mask=mask)
    tl.store(grad_weight_ptr + pair, tl.sum(inner, axis=0))


def expert_outputs(
    x_TH: Tensor,
    expert_Tk: Tensor,
    weight_Tk: Tensor,
    w13_EFH: Tensor,
    w2_EHF: Tensor,
    *,
    slices: int,
    experts: int | None = None,
    expert_map: Tensor | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Every expert's weighted output, apart: ``[slices, T, k, H]`` bf16, and ``[P, 2F]``.

    Args:
        x_TH: As in :func:`experts`, like the next four.
        expert_Tk: Global expert ids.
        weight_Tk: Router weights.
        w13_EFH: Of the experts, or the slices of them, that this rank holds.
        w2_EHF: Likewise.
        slices: Equal parts of the held F that are rounded apart.
        experts: Experts over all ranks; those of ``w13_EFH`` if None.
        expert_map: Global to local expert id, -1 where another rank has it: that
            slot's output is zero.
        tile: For tests; chosen by shape otherwise.
    """
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

    tokens, hidden = x_TH.shape
    held, doubled, _ = w13_EFH.shape
    top_k, width, count = expert_Tk.shape[1], doubled // 2, experts or held
    pairs = tokens * top_k
    tile = tile or tile_for(pairs / count)
    aligned = Aligned(*moe_align_block_size(expert_Tk, tile.m, count, expert_map))
    gate_up = x_TH.new_empty((pairs, doubled))
    grouped_product(x_TH, w13_EFH, aligned, gate_up[None], tile)
    activated = x_TH.new_empty((pairs, width))
    torch.ops._C.silu_and_mul(activated, gate_up)
    each = x_TH.new_empty((slices, tokens, top_k, hidden))
    grouped_product(
        activated, w2_EHF, aligned, each.view(slices, pairs, hidden), tile,
        weight_P=weight_Tk.reshape(-1),
    )  # fmt: skip
    return each, gate_up


def experts_forward(
    x_TH: Tensor,
    expert_Tk: Tensor,
    weight_Tk: Tensor,
    w13_EFH: Tensor,
    w2_EHF: Tensor,
    topology: RolloutTopology | AnyTopology,
    *,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Output ``[T, H]`` and gate and up projections ``[P, 2F]``, without autograd."""
    slices, blocks = topology.expert_slices, topology.expert_blocks
    each, gate_up = expert_outputs(
        x_TH, expert_Tk, weight_Tk, w13_EFH, w2_EHF, slices=slices, tile=tile
    )
    if topology.exact:
        return whole_sum(each), gate_up
    flat = each.view(slices, -1, each.shape[-1])
    return _combine(flat, expert_Tk, None, blocks, w13_EFH.shape[0] // blocks), gate_up


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x_TH: Tensor,
        expert_Tk: Tensor,
        weight_Tk: Tensor,
        w13_EFH: Tensor,
        w2_EHF: Tensor,
        topology: RolloutTopology | AnyTopology,
    ) -> Tensor:
        out, gate_up = experts_forward(x_TH, expert_Tk, weight_Tk, w13_EFH, w2_EHF, topology)
        ctx.save_for_backward(x_TH, expert_Tk, weight_Tk, w13_EFH, w2_EHF, gate_up)
        return out

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_TH, expert_Tk, weight_Tk, w13_EFH, w2_EHF, gate_up = ctx.saved_tensors
        tokens, top_k = expert_Tk.shape
        count, width = w13_EFH.shape[0], w2_EHF.shape[2]
        flat = expert_Tk.reshape(-1)
        pair = flat.argsort(stable=True)
        # bincount would wait for the GPU to learn its length.
        load = torch.zeros(count, dtype=torch.int32, device=flat.device)
        load.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int32))
        ends = load.cumsum(0, dtype=torch.int32)
        token = pair // top_k
        grad_PH = grad_TH[token]
        # One product serves both: its inner product with the activation is the
        # router weight's gradient, its multiple by the weight the activation's.
        grad_PF = torch._grouped_mm(grad_PH, w2_EHF, offs=ends)
        grad_gate_up = torch.empty_like(gate_up)
        scaled = gate_up.new_empty((tokens * top_k, width))
        grad_weight = torch.empty_like(weight_Tk)
        if tokens:
            _activation_backward_kernel[(tokens * top_k,)](
                gate_up, pair, weight_Tk, grad_PF, grad_gate_up, scaled, grad_weight, width,
                min(1024, triton.next_power_of_2(width)), num_warps=4,
            )  # fmt: skip
        grad_w2 = grad_w13 = grad_x = None
        if ctx.needs_input_grad[4]:
            grad_w2 = torch._grouped_mm(grad_PH.t(), scaled, offs=ends)
        if ctx.needs_input_grad[3]:
            grad_w13 = torch._grouped_mm(grad_gate_up.t(), x_TH[token], offs=ends)
        if ctx.needs_input_grad[0]:
            grad_sorted = torch._grouped_mm(grad_gate_up, w13_EFH, offs=ends)
            back = torch.empty_like(pair)
            back[pair] = torch.arange(pair.numel(), device=pair.device)
            grad_x = _combine(grad_sorted[None], expert_Tk, back, 1, count)
        return grad_x, None, grad_weight, grad_w13, grad_w2, None


def experts(
    x_TH: Tensor,
    expert_Tk: Tensor,
    weight_Tk: Tensor,
    w13_EFH: Tensor,
    w2_EHF: Tensor,
    topology: RolloutTopology | AnyTopology,
) -> Tensor:
    """Weighted sum of the chosen experts' outputs.

    Args:
        x_TH: ``[T, H]`` bf16, contiguous.
        expert_Tk: ``[T, k]`` int32 expert ids.
        weight_Tk: ``[T, k]`` float32 router weights.
        w13_EFH: ``[E, 2F, H]`` bf16 gate and up projections, gate first.
        w2_EHF: ``[E, H, F]`` bf16 down projections.
        topology: How the rollout spreads experts.

    Returns:
        ``[T, H]`` bf16.
    """
    return _Experts.apply(x_TH, expert_Tk, weight_Tk, w13_EFH, w2_EHF, topology)
