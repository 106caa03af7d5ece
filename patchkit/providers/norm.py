"""RMSNorm and the residual add.

Agreed roundings: the residual sum is rounded to the stream's dtype before the
norm reads it; the mean of squares is exact, the reciprocal root is float32; the
normalised value is rounded to the stream's dtype, then multiplied by the weight
and rounded again (what ``transformers`` writes in ``Qwen3MoeRMSNorm.forward``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from patchkit.providers.exact_sum import check_terms, magnitude, preround

# x keeps 20 bits, its square 40: room for 2**13 terms.
_BITS = 20


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """``1 / sqrt(mean(x**2) + eps)`` over the last dimension, float32 ``[..., 1]``."""
    width = x.shape[-1]
    check_terms("rms_norm", width, 2 * _BITS)
    squares = preround(x, _BITS, magnitude(x)).square_().sum(-1, keepdim=True)
    return (1.0 / torch.sqrt(squares / width + eps)).float()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = _inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, inverse)
        return (x.float() * inverse).to(x.dtype) * weight.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        x, weight, inverse = ctx.saved_tensors
        normal = x.float() * inverse
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_normal = grad.float() * weight.float()
            mean = (grad_normal * normal).mean(-1, keepdim=True)
            grad_x = ((grad_normal - normal * mean) * inverse).to(x.dtype)
        if ctx.needs_input_grad[1]:
            product = grad.float() * normal.to(x.dtype).float()
            grad_weight = product.reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        return grad_x, grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension.

    Args:
        x: ``[..., K]``, bf16 or float32.
        weight: ``[K]``.
        eps: Added to the mean of squares.

    Returns:
        ``[..., K]`` in the dtype of ``x``.
    """
    return _RMSNorm.apply(x, weight, eps)


def add_residual(x: Tensor, residual: Tensor) -> Tensor:
    """``x + residual``, rounded once to the dtype of ``x``."""
    return (x.float() + residual.float()).to(x.dtype)
