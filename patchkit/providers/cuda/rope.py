"""Rotary position embedding, NeoX halves, with vLLM's table.

Agreed roundings: angles in float32 on the GPU, cosines and sines rounded to bf16,
the rotation in float32, one rounding. A product of two bf16 numbers is exact in
float32, so contracting a multiplication and an addition changes nothing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS = 8


@lru_cache(maxsize=8)
def cos_sin_table(size: int, base: float, length: int, device: torch.device) -> Tensor:
    """``[length, size]`` bf16: cosines of every position, then sines.

    The same expressions on the same device as vLLM's ``RotaryEmbedding``; its
    table of all positions, not only of those asked for.
    """
    # A tensor made under inference mode could not be saved for backward later.
    with torch.inference_mode(False), torch.no_grad(), torch.device(device):
        exponent = torch.arange(0, size, 2, dtype=torch.float) / size
        inverse_frequency = 1.0 / (base**exponent)
        position = torch.arange(length, dtype=torch.float)
        angle = torch.einsum("i,j -> ij", position, inverse_frequency)
        return torch.cat((angle.cos(), angle.sin()), dim=-1).to(torch.bfloat16)


@triton.jit
def _rotate_kernel(
    x_ptr,
    position_ptr,
    table_ptr,
    y_ptr,
    heads,
    stride_xt,
    stride_xh,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, HALF)
    mask = (head < heads)[:, None] & (lane >= 0)[None, :]
    position = tl.load(position_ptr + token).to(tl.int64)
    cos = tl.load(table_ptr + position * 2 * HALF + lane).to(tl.float32)[None, :]
    sin = tl.load(table_ptr + position * 2 * HALF + HALF + lane).to(tl.float32)[None, :]
    if BACKWARD:
        sin = -sin
    at = x_ptr + token * stride_xt + head[:, None] * stride_xh + lane[None, :]
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    to = y_ptr + (token * heads + head[:, None]) * 2 * HALF + lane[None, :]
    dtype = y_ptr.dtype.element_ty
    tl.store(to, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(to + HALF, (second * cos + first * sin).to(dtype), mask=mask)


def _launch(x_THD: Tensor, positions_T: Tensor, table: Tensor, backward: bool) -> Tensor:
    tokens, heads, size = x_THD.shape
    if x_THD.stride(2) != 1:
        x_THD = x_THD.contiguous()
    positions_T = positions_T.contiguous()
    y = torch.empty((tokens, heads, size), device=x_THD.device, dtype=x_THD.dtype)
    if tokens:
        _rotate_kernel[(tokens, triton.cdiv(heads, _HEADS))](
            x_THD, positions_T, table, y, heads, x_THD.stride(0), x_THD.stride(1),
            size // 2, _HEADS, backward, num_warps=4,
        )  # fmt: skip
    return y


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, positions_T: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(positions_T, table)
        return _launch(x_THD, positions_T, table, False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        positions_T, table = ctx.saved_tensors
        return _launch(grad, positions_T, table, True), None, None


def rotate(x_THD: Tensor, positions_T: Tensor, table: Tensor) -> Tensor:
    """Rotate every head by its token's absolute position.

    Args:
        x_THD: ``[T, H, D]`` bf16.
        positions_T: ``[T]`` integer positions, below the table's length.
        table: From :func:`cos_sin_table`.

    Returns:
        ``[T, H, D]`` bf16, contiguous.
    """
    return _Rotate.apply(x_THD, positions_T, table)
