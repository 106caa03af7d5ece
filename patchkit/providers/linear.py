"""Matrix products with exact accumulation.

The bits of a row of the result depend on that row of ``x`` and on the weight
alone. See :mod:`patchkit.providers.exact_sum` for why.

Shapes: T tokens, K inputs, N outputs, C chunks of K, E products side by side.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from patchkit.providers.exact_sum import check_terms, pairwise_tree, preround

# Each operand keeps 20 bits below its row's largest magnitude (bf16 has 8 bits),
# which leaves 2**13 terms for an exact float64 sum.
OPERAND_BITS = 20


# Elements of the second operand that are pre-rounded at a time. As float64 they
# stay in the cache between rounding and product; every element of the result is
# one exact sum whatever the block, so this has no say in any bit.
_BLOCK_ELEMENTS = 1 << 19


def exact_matmul(a_TK: Tensor, b_NK: Tensor) -> Tensor:
    """``a @ b^T`` with exact accumulation, rounded once: ``[..., T, N]`` float32.

    Leading dimensions of both operands are equal and count as a batch.
    """
    check_terms("exact_matmul", a_TK.shape[-1], 2 * OPERAND_BITS)
    a = preround(a_TK, OPERAND_BITS)
    outputs = b_NK.shape[-2]
    step = max(16, _BLOCK_ELEMENTS * outputs // max(1, b_NK.numel()))
    # + 0.0 turns the -0.0 that some blockings produce into 0.0.
    if step >= outputs:
        b = preround(b_NK, OPERAND_BITS)
        return torch.matmul(a, b.transpose(-1, -2)).add_(0.0).float()
    out = torch.empty((*a.shape[:-1], outputs), dtype=torch.float32, device=a.device)
    for start in range(0, outputs, step):
        b = preround(b_NK[..., start : start + step, :], OPERAND_BITS)
        out[..., start : start + step] = torch.matmul(a, b.transpose(-1, -2)).add_(0.0)
    return out


def _slices(x: Tensor, chunks: int) -> Tensor:
    """``[..., T, K]`` to ``[C, ..., T, K/C]``, a view."""
    return x.unflatten(-1, (chunks, x.shape[-1] // chunks)).movedim(-2, 0)


class _ChunkedLinear(torch.autograd.Function):
    """``[..., T, K] x [..., N, K] -> [C, ..., T, N]``; the backward is the plain product's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, chunks: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.chunks = chunks
        if chunks == 1:
            return exact_matmul(x, weight)[None]
        return exact_matmul(_slices(x, chunks), _slices(weight, chunks))

    @staticmethod
    def backward(ctx: Any, grad_C: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            slices = torch.matmul(grad_C, _slices(weight.float(), ctx.chunks))
            grad_x = slices.movedim(0, -2).reshape(x.shape).to(x.dtype)
        if ctx.needs_input_grad[1]:
            slices = torch.matmul(grad_C.transpose(-1, -2), _slices(x.float(), ctx.chunks))
            grad_w = slices.movedim(0, -2).reshape(weight.shape).to(weight.dtype)
        return grad_x, grad_w, None


class _Linear(torch.autograd.Function):
    """``[..., K] x [N, K] -> [..., N]``; the backward is the plain product's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return exact_matmul(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.matmul(grad, weight.float()).to(x.dtype)
        if ctx.needs_input_grad[1]:
            flat = grad.reshape(-1, grad.shape[-1])
            grad_w = torch.matmul(flat.transpose(0, 1), x.reshape(-1, x.shape[-1]).float())
            grad_w = grad_w.to(weight.dtype)
        return grad_x, grad_w


def linear_chunks(x: Tensor, weight_NK: Tensor, chunks: int) -> Tensor:
    """Partial products of ``chunks`` equal slices of K.

    Args:
        x: ``[T, K]``, bf16 or float32; ``[E, T, K]`` for E products at once.
        weight_NK: ``[N, K]``, or ``[E, N, K]``.
        chunks: Number of slices; K must be divisible by it.

    Returns:
        ``[C, T, N]`` (or ``[C, E, T, N]``) float32, each slice rounded once.

    Raises:
        ValueError: K is not divisible by ``chunks``.
        ReductionTooLongError: A slice has more than 8,192 terms.
    """
    if x.shape[-1] % chunks:
        raise ValueError(
            f"linear_chunks: K = {x.shape[-1]} is not divisible by {chunks} chunks; "
            "choose a number of chunks that divides it"
        )
    return _ChunkedLinear.apply(x, weight_NK, chunks)


def linear(x: Tensor, weight_NK: Tensor, *, chunks: int = 1, bias: Tensor | None = None) -> Tensor:
    """``x @ weight^T + bias`` in float32: ``[..., K]`` to ``[..., N]``.

    ``chunks`` > 1 adds that many slices of K as a pairwise tree: what a
    row-parallel layer computes on any tensor-parallel size that divides it.
    A bias ``[N]`` is added in float32, before the caller rounds.
    """
    if chunks == 1:
        # No view: a trainer may change logits in place, which would take the hooks of
        # FSDP off a module whose output is one.
        product = _Linear.apply(x, weight_NK)
    else:
        flat = x.reshape(-1, x.shape[-1])
        parts = linear_chunks(flat, weight_NK, chunks)
        product = pairwise_tree(parts).view(*x.shape[:-1], weight_NK.shape[0])
    return product if bias is None else product + bias.float()
