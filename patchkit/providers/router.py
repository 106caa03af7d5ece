"""Top-k softmax router with stable ties.

Agreed roundings: float32 logits and probabilities; exact sums for both
normalisations; of two equal probabilities, the lower expert id is chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from patchkit.providers.activation import shifted_exp
from patchkit.providers.exact_sum import exact_sum


def route(logits_TE: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Choose ``top_k`` experts for every token.

    Args:
        logits_TE: ``[T, E]`` router logits.
        top_k: Experts per token.
        renormalize: Divide the chosen weights by their sum.

    Returns:
        Weights ``[T, k]`` float32, descending, and expert ids ``[T, k]`` int64.
    """
    weights, total = shifted_exp(logits_TE.float())
    probability = weights / total.float()
    chosen, expert = torch.sort(probability, dim=-1, descending=True, stable=True)
    chosen, expert = chosen[..., :top_k], expert[..., :top_k]
    if renormalize:
        chosen = chosen / exact_sum(chosen).float()
    return chosen, expert
