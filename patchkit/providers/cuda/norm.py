"""RMSNorm, alone and with the residual add in front of it.

Agreed roundings: the residual sum is rounded to bf16 before the norm reads it;
squares are summed in float32 in blocks of 1,024 columns; ``1 / sqrt(mean + eps)``
with a float32 ``eps``; ``x * inverse * weight`` in float32, rounded once. That is
what vLLM's ``rms_norm_batch_invariant`` computes when it is launched eagerly, and
``tests/gpu`` compares the bits.

The order of a sum inside one block follows from Triton's layout, and the layout
from the alignment of pointers and strides: hence the check on both.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    sum_ptr,
    rows,
    heads,
    stride_xt,
    stride_xh,
    stride_rt,
    N,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Row r of the ``[T * heads, N]`` view is head ``r % heads`` of token ``r // heads``."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    x_row = x_ptr + (row // heads) * stride_xt + (row % heads) * stride_xh
    residual_row = residual_ptr + row * stride_rt
    squares = tl.zeros([ROWS], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = live[:, None] & (column < N)[None, :]
        value = tl.load(x_row[:, None] + column[None, :], mask=mask, other=0.0)
        if HAS_RESIDUAL:
            other = tl.load(residual_row[:, None] + column[None, :], mask=mask, other=0.0)
            value = (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)
            tl.store(sum_ptr + row[:, None] * N + column[None, :], value, mask=mask)
        value = value.to(tl.float32)
        squared = value * value
        squares += tl.sum(tl.where(mask, squared, 0.0), axis=1)
    inverse = 1.0 / tl.sqrt(squares / N + eps)
    for start in range(0, N, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = live[:, None] & (column < N)[None, :]
        value = tl.load(x_row[:, None] + column[None, :], mask=mask, other=0.0)
        if HAS_RESIDUAL:
            # Read again and added again: what other threads stored is not ours to read.
            other = tl.load(residual_row[:, None] + column[None, :], mask=mask, other=0.0)
            value = (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)
        weight = tl.load(weight_ptr + column, mask=column < N, other=1.0)
        scaled = value.to(tl.float32) * inverse[:, None]
        scaled = scaled * weight.to(tl.float32)[None, :]
        tl.store(y_ptr + row[:, None] * N + column[None, :], scaled.to(value.dtype), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    x_ptr,
    weight_ptr,
    grad_ptr,
    grad_x_ptr,
    grad_w_ptr,
    rows,
    eps,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program walks over row blocks and keeps its share of the weight's gradient."""
    column = tl.arange(0, BLOCK)
    inside = column < N
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    grad_w = tl.zeros([BLOCK], dtype=tl.float32)
    first = tl.program_id(0) * ROWS
    for start in range(first, rows, tl.num_programs(0) * ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & inside[None, :]
        at = row[:, None] * N + column[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
        inverse = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / N + eps)
        normal = x * inverse[:, None]
        grad_normal = grad * weight[None, :]
        mean = tl.sum(grad_normal * normal, axis=1) / N
        grad_x = (grad_normal - normal * mean[:, None]) * inverse[:, None]
        tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
        grad_w += tl.sum(grad * normal, axis=0)
    tl.store(grad_w_ptr + tl.program_id(0) * N + column, grad_w, mask=inside)


def _rows_per_program(width: int) -> int:
    """Narrow rows (one head) share a program; wide ones have one of their own."""
    return max(1, 2048 // triton.next_power_of_2(width)) if width <= 256 else 1


def _viewed(x: Tensor) -> tuple[Tensor, int, int, int]:
    """A view that the kernel can address: tensor, heads, stride of a token, of a head."""
    width = x.shape[-1]
    if x.dim() == 3 and x.stride(2) == 1:
        aligned = x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0 and x.stride(1) % 16 == 0
        if aligned:
            return x, x.shape[1], x.stride(0), x.stride(1)
    x = x.reshape(-1, width).contiguous()
    return x, 1, width, width


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    if width % 16:
        raise ValueError(f"rms_norm: rows of {width} elements; a multiple of 16 is needed")
    viewed, heads, stride_t, stride_h = _viewed(x)
    rows = x.numel() // width
    y = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    summed = torch.empty_like(y) if residual is not None else y
    block = min(_BLOCK, triton.next_power_of_2(width))
    per_program = _rows_per_program(width)
    flat = residual.reshape(-1, width).contiguous() if residual is not None else viewed
    if rows:
        _forward_kernel[(triton.cdiv(rows, per_program),)](
            viewed, flat, weight.contiguous(), y, summed, rows, heads, stride_t, stride_h, width,
            width, eps, per_program, block, residual is not None, num_warps=4,
        )  # fmt: skip
    return y, summed


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm without autograd, over the last dimension of ``[..., N]`` bf16."""
    return _launch(x, None, weight, eps)[0]


def add_rms_norm_forward(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """``r = x + residual`` rounded to bf16; the norm of ``r``, and ``r``."""
    return _launch(x, residual, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return rms_norm_forward(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        width = x.shape[-1]
        x, grad = x.contiguous(), grad.contiguous()
        rows = x.numel() // width
        per_program = _rows_per_program(width)
        programs = min(triton.cdiv(rows, per_program), 1024)
        grad_x = torch.empty_like(x)
        partial = torch.empty((programs, width), device=x.device, dtype=torch.float32)
        if rows:
            _backward_kernel[(programs,)](
                x, weight, grad, grad_x, partial, rows, ctx.eps, width, per_program,
                triton.next_power_of_2(width), num_warps=4 if width <= 256 else 8,
            )  # fmt: skip
        return grad_x, partial.sum(0).to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension.

    Args:
        x: ``[..., N]`` bf16.
        weight: ``[N]`` bf16.
        eps: Added to the mean of squares.

    Returns:
        ``[..., N]`` bf16, contiguous.
    """
    return _RMSNorm.apply(x, weight, eps)
