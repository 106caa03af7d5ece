"""Top-k softmax router: vLLM's ``topk_softmax`` on bf16 logits.

Torch's softmax and top-k order the sums, and break ties, otherwise; so both sides
call the one kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def route_forward(logits_TE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Weights ``[T, k]`` float32 and expert ids ``[T, k]`` int32, without autograd."""
    import vllm._custom_ops as ops

    tokens, device = logits_TE.shape[0], logits_TE.device
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=device)
    chosen = torch.empty((tokens, top_k), dtype=torch.int32, device=device)
    if tokens:
        ops.topk_softmax(weights, chosen, torch.empty_like(chosen), logits_TE, renormalize)
    return weights, chosen


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits_TE: Tensor, top_k: int, renormalize: bool
    ) -> tuple[Tensor, Tensor]:
        weights, chosen = route_forward(logits_TE.contiguous(), top_k, renormalize)
        ctx.save_for_backward(logits_TE, weights, chosen)
        ctx.renormalize = renormalize
        ctx.mark_non_differentiable(chosen)
        return weights, chosen

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None, None]:  # type: ignore[override]
        logits, weights, chosen = ctx.saved_tensors
        inner = (grad * weights).sum(-1, keepdim=True)
        index = chosen.long()
        if ctx.renormalize:
            # A softmax over the chosen logits alone: the others do not matter.
            grad_chosen = weights * (grad - inner)
            grad_logits = torch.zeros_like(logits)
            return grad_logits.scatter_(1, index, grad_chosen.to(logits.dtype)), None, None
        probability = torch.softmax(logits.float(), dim=-1)
        grad_logits = (-inner * probability).scatter_add_(1, index, grad * weights)
        return grad_logits.to(logits.dtype), None, None


def route(logits_TE: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Choose ``top_k`` experts for every token.

    Args:
        logits_TE: ``[T, E]`` bf16.
        top_k: Experts per token.
        renormalize: Divide the chosen weights by their sum.

    Returns:
        Weights ``[T, k]`` float32, descending, and expert ids ``[T, k]`` int32.
    """
    return _Route.apply(logits_TE, top_k, renormalize)
