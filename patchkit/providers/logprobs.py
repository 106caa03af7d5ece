"""Log-softmax over the vocabulary, float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from patchkit.providers.activation import exp_sum


def _forward(logits: Tensor) -> Tensor:
    z = logits.float()
    z = z - z.amax(-1, keepdim=True)
    # log in float64, rounded once: one value a row, so its cost does not count.
    return z.sub_(torch.log(exp_sum(z)).float())


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        result = _forward(logits)
        ctx.save_for_backward(result)
        ctx.dtype = logits.dtype
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (result,) = ctx.saved_tensors
        return (grad - torch.exp(result) * grad.sum(-1, keepdim=True)).to(ctx.dtype)


def log_softmax(logits: Tensor) -> Tensor:
    """Natural-log probabilities over the last dimension.

    Args:
        logits: ``[..., V]``; ``-inf`` marks an excluded token.

    Returns:
        ``[..., V]`` float32.
    """
    return _LogSoftmax.apply(logits)


def selected_token_logprobs(logits_TV: Tensor, tokens_T: Tensor) -> Tensor:
    """Log-probability of each position's token: ``[T, V]`` and ``[T]`` to ``[T]`` float32."""
    return log_softmax(logits_TV).gather(-1, tokens_T[:, None])[:, 0]
