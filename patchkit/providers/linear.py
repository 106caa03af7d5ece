"""Matrix products with exact accumulation.

The bits of a row of the result depend on that row of ``x`` and on the weight
alone. See :mod:`patchkit.providers.exact_sum` for why.

Shapes: T tokens, K inputs, N outputs, C chunks of K, B batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from patchkit.providers.exact_sum import check_terms, pairwise_tree, preround

# Each operand keeps 20 bits below its row's largest magnitude (bf16 has 8 bits),
# which leaves 2**13 terms for an exact float64 sum.
OPERAND_BITS = 20


def exact_matmul(a_BTK: Tensor, b_BNK: Tensor) -> Tensor:
    """``a @ b^T`` in float64 with exact accumulation: ``[B, T, N]``."""
    check_terms("exact_matmul", a_BTK.shape[-1], 2 * OPERAND_BITS)
    a = preround(a_BTK, OPERAND_BITS)
    b = preround(b_BNK, OPERAND_BITS)
    # + 0.0 turns the -0.0 that some blockings produce into 0.0.
    return torch.matmul(a, b.transpose(-1, -2)).add_(0.0)


class _ChunkedLinear(torch.autograd.Function):
    """``[T, K] x [N, K] -> [C, T, N]`` float32; the backward is the plain product's."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, w_NK: Tensor, chunks: int) -> Tensor:
        ctx.save_for_backward(x_TK, w_NK)
        ctx.chunks = chunks
        tokens, width = x_TK.shape
        part = width // chunks
        x_CTk = x_TK.view(tokens, chunks, part).transpose(0, 1)
        w_CNk = w_NK.view(w_NK.shape[0], chunks, part).transpose(0, 1)
        return exact_matmul(x_CTk, w_CNk).float()

    @staticmethod
    def backward(ctx: Any, grad_CTN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        x_TK, w_NK = ctx.saved_tensors
        tokens, width = x_TK.shape
        part = width // ctx.chunks
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            w_CNk = w_NK.float().view(w_NK.shape[0], ctx.chunks, part).transpose(0, 1)
            grad_x = torch.matmul(grad_CTN, w_CNk).transpose(0, 1).reshape(tokens, width)
            grad_x = grad_x.to(x_TK.dtype)
        if ctx.needs_input_grad[1]:
            x_CTk = x_TK.float().view(tokens, ctx.chunks, part).transpose(0, 1)
            grad_w = torch.matmul(grad_CTN.transpose(1, 2), x_CTk).transpose(0, 1)
            grad_w = grad_w.reshape(w_NK.shape[0], width).to(w_NK.dtype)
        return grad_x, grad_w, None


def linear_chunks(x: Tensor, weight_NK: Tensor, chunks: int) -> Tensor:
    """Partial products of ``chunks`` equal slices of K.

    Args:
        x: ``[T, K]``, bf16 or float32.
        weight_NK: ``[N, K]``.
        chunks: Number of slices; K must be divisible by it.

    Returns:
        ``[C, T, N]`` float32, each slice rounded once.

    Raises:
        ValueError: K is not divisible by ``chunks``.
        ReductionTooLongError: A slice has more than 8,192 terms.
    """
    if x.shape[-1] % chunks:
        raise ValueError(f"linear_chunks: K = {x.shape[-1]} is not divisible by {chunks} chunks")
    return _ChunkedLinear.apply(x.contiguous(), weight_NK.contiguous(), chunks)


def linear(x: Tensor, weight_NK: Tensor, *, chunks: int = 1) -> Tensor:
    """``x @ weight^T`` in float32: ``[..., K]`` to ``[..., N]``.

    ``chunks`` > 1 adds that many slices of K as a pairwise tree: what a
    row-parallel layer computes on any tensor-parallel size that divides it.
    """
    flat = x.reshape(-1, x.shape[-1])
    parts = linear_chunks(flat, weight_NK, chunks)
    return pairwise_tree(parts).view(*x.shape[:-1], weight_NK.shape[0])
