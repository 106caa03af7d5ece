"""``x @ weight^T`` with one accumulator per output that runs through K in order.

On Hopper the tile of such a Triton product does not change its bits
(``tests/gpu`` checks it against vLLM's ``matmul_persistent``), so the tile
follows the number of rows for speed and a row's bits depend on that row only.

With ``slices`` > 1, K is cut as tensor-parallel ranks cut it: every slice is
accumulated alone, rounded to bf16, and added to the others: in bf16, as two ranks of
the engine do it, or exactly (:mod:`patchkit.providers.cuda.sums`), as any number of
ranks can.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from patchkit.providers.cuda.sums import whole_sum


class Tile(NamedTuple):
    """Launch parameters of the product; none of them is visible in a bit."""

    m: int
    n: int
    k: int
    group: int
    warps: int
    stages: int


def tile_for(rows: int, outputs: int) -> Tile:
    """The fastest tile that was found on an H200 for this many rows and outputs."""
    wide = outputs >= 8192
    if rows <= 16:
        return Tile(16, 64 if wide else 32, 128, 1, 4, 4)
    if rows <= 32:
        return Tile(32, 64 if wide else 32, 128, 1, 4, 4)
    if rows <= 64:
        if wide:
            return Tile(64, 128, 64, 1, 4, 4)
        return Tile(64, 64, 64, 1, 4, 4) if outputs > 4096 else Tile(64, 32, 128, 1, 4, 4)
    if rows <= 256:
        return Tile(64, 128, 64, 8, 4, 4)
    return Tile(128, 256, 64, 8, 8, 3)


@triton.jit(do_not_specialize=["M"])
def _linear_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    M,
    N,
    stride_xm,
    stride_wn,
    stride_ym,
    stride_ys,
    K: tl.constexpr,
    SLICES: tl.constexpr,
    APART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    pid = tl.program_id(0)
    blocks_m = tl.cdiv(M, BLOCK_M)
    blocks_n = tl.cdiv(N, BLOCK_N)
    per_group = GROUP_M * blocks_n
    first_m = (pid // per_group) * GROUP_M
    group_m = min(blocks_m - first_m, GROUP_M)
    pid_m = first_m + (pid % per_group) % group_m
    pid_n = (pid % per_group) // group_m

    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows and outputs past the end read row 0 and are not stored.
    rows = tl.where(offs_m < M, offs_m, 0).to(tl.int64)
    outputs = tl.where(offs_n < N, offs_n, 0).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + rows[:, None] * stride_xm + offs_k[None, :]
    w_ptrs = w_ptr + outputs[None, :] * stride_wn + offs_k[:, None]
    if APART:  # one program per slice, which stores what it has
        own = tl.program_id(1)
        x_ptrs += own * (K // SLICES)
        w_ptrs += own * (K // SLICES)
        y_ptr += own.to(tl.int64) * stride_ys

    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for part in tl.static_range(1 if APART else SLICES):
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for _ in range(0, K // SLICES, BLOCK_K):
            acc = tl.dot(tl.load(x_ptrs), tl.load(w_ptrs), acc)
            x_ptrs += BLOCK_K
            w_ptrs += BLOCK_K
        if SLICES == 1 or APART:
            total = acc
        elif part == 0:
            total = acc.to(y_ptr.dtype.element_ty).to(tl.float32)
        else:
            total += acc.to(y_ptr.dtype.element_ty).to(tl.float32)
            total = total.to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(
        y_ptr + offs_m.to(tl.int64)[:, None] * stride_ym + offs_n[None, :],
        total.to(y_ptr.dtype.element_ty),
        mask=(offs_m[:, None] < M) & (offs_n[None, :] < N),
    )


def _launch(x_TK: Tensor, weight_NK: Tensor, slices: int, apart: bool, tile: Tile | None) -> Tensor:
    """``[T, N]``, or ``[slices, T, N]`` where the slices stay apart."""
    tokens, width = x_TK.shape
    outputs = weight_NK.shape[0]
    tile = tile or tile_for(tokens, outputs)
    if width % slices or (width // slices) % tile.k:
        # A shorter tile serves widths such as 768 / 2 = 384.
        tile = tile._replace(k=64)
    if width != weight_NK.shape[1] or width % slices or (width // slices) % tile.k:
        raise ValueError(
            f"linear: K = {width} in {slices} slices, weight {tuple(weight_NK.shape)}: every slice "
            f"of K must be a multiple of {tile.k}, and both operands must agree on K"
        )
    if x_TK.stride(1) != 1:
        x_TK = x_TK.contiguous()
    if weight_NK.stride(1) != 1:
        weight_NK = weight_NK.contiguous()
    shape = (slices, tokens, outputs) if apart else (tokens, outputs)
    y = torch.empty(shape, device=x_TK.device, dtype=x_TK.dtype)
    if tokens:
        blocks = triton.cdiv(tokens, tile.m) * triton.cdiv(outputs, tile.n)
        _linear_kernel[(blocks, slices if apart else 1)](
            x_TK, weight_NK, y, tokens, outputs,
            x_TK.stride(0), weight_NK.stride(0), y.stride(-2), tokens * outputs,
            width, slices, apart, tile.m, tile.n, tile.k, tile.group,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return y


def linear_forward(
    x_TK: Tensor, weight_NK: Tensor, *, slices: int = 1, tile: Tile | None = None
) -> Tensor:
    """The product without autograd: ``[T, K]`` and ``[N, K]`` to ``[T, N]`` bf16.

    Args:
        x_TK: bf16, rows contiguous.
        weight_NK: bf16, rows contiguous.
        slices: Tensor-parallel ranks that share K.
        tile: For tests; chosen by shape otherwise.

    Raises:
        ValueError: A slice of K is no multiple of the tile's (64 or 128).
    """
    return _launch(x_TK, weight_NK, slices, False, tile)


def slice_products(
    x_TK: Tensor, weight_NK: Tensor, *, slices: int, tile: Tile | None = None
) -> Tensor:
    """Each slice's product alone: ``[slices, T, 1, N]`` bf16, for an exact sum.

    Args and errors as in :func:`linear_forward`.
    """
    return _launch(x_TK, weight_NK, slices, True, tile)[:, :, None]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x_TK: Tensor, weight_NK: Tensor, slices: int, exact: bool
    ) -> Tensor:
        ctx.save_for_backward(x_TK, weight_NK)
        if exact:
            return whole_sum(slice_products(x_TK, weight_NK, slices=slices))
        return linear_forward(x_TK, weight_NK, slices=slices)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_TK, weight_NK = ctx.saved_tensors
        grad_x = grad_TN @ weight_NK if ctx.needs_input_grad[0] else None
        grad_w = grad_TN.t() @ x_TK if ctx.needs_input_grad[1] else None
        return grad_x, grad_w, None, None


def linear(x: Tensor, weight_NK: Tensor, *, slices: int = 1, exact: bool = False) -> Tensor:
    """``x @ weight^T``, rounded once to bf16 (once per slice, where K is sliced).

    Args:
        x: ``[..., K]`` bf16.
        weight_NK: ``[N, K]`` bf16.
        slices: Tensor-parallel ranks that share K; 1 for a column-parallel layer.
        exact: Add the slices exactly, and round once more, instead of in bf16.

    Returns:
        ``[..., N]`` bf16.
    """
    flat = x.reshape(-1, x.shape[-1])
    return _Linear.apply(flat, weight_NK, slices, exact).view(*x.shape[:-1], weight_NK.shape[0])
