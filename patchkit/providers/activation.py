"""SiLU times gate, and softmax pieces that the other providers share.

``exp`` is evaluated on contiguous float32 only: on CPUs, vector and scalar code
paths may round differently, and strided views take the scalar one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from patchkit.providers.exact_sum import exact_sum


def exp32(x: Tensor) -> Tensor:
    """Float32 ``exp`` whose bits do not depend on strides."""
    return torch.exp(x.float().contiguous())


def _unit_sum(weights: Tensor) -> Tensor:
    """Exact sum of a last dimension whose largest element is exactly 1 (or NaN)."""
    # The quantum is known: no pass over the data to find it.
    scale = torch.ones((), dtype=torch.float64, device=weights.device)
    return exact_sum(weights, scale=scale)


def exp_sum(shifted: Tensor) -> Tensor:
    """Exact sum of ``exp`` over a last dimension whose largest element is 0: ``[..., 1]``."""
    return _unit_sum(exp32(shifted))


def shifted_exp(x: Tensor) -> tuple[Tensor, Tensor]:
    """``exp(x - max)`` over the last dimension and its exact sum.

    Returns:
        ``[..., K]`` float32 in [0, 1], and ``[..., 1]`` float64.
    """
    weights = exp32(x - x.detach().amax(-1, keepdim=True))
    return weights, _unit_sum(weights)


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = 1.0 / (1.0 + exp32(-x))
        ctx.save_for_backward(result)
        ctx.dtype = x.dtype
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        # From the result: exp(-x) is infinite where the sigmoid is zero.
        (result,) = ctx.saved_tensors
        return (grad * result * (1.0 - result)).to(ctx.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """Float32 logistic function whose bits do not depend on strides."""
    return _Sigmoid.apply(x)


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (gate / (1.0 + exp32(-gate)) * up).to(gate_up.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.float().chunk(2, dim=-1)
        grad = grad.float()
        sigmoid = torch.sigmoid(gate)
        grad_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        return torch.cat([grad_gate, grad * gate * sigmoid], dim=-1).to(gate_up.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[..., 2F]``, gate first: ``[..., F]``, rounded once from float32."""
    return _SiluMul.apply(gate_up)
