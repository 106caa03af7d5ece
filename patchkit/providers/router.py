"""Top-k routers with stable ties.

Agreed roundings: float32 logits, probabilities and scores; exact sums for all
normalisations; of two equal experts or groups, the one with the lower id is chosen.

Shapes: T tokens, E experts, G groups of experts, k experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from patchkit.providers.activation import shifted_exp, sigmoid
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


# What transformers adds to the sum of the chosen scores, so that all of them may be zero.
_TINY = 1e-20


def _best(score: Tensor, count: int) -> Tensor:
    """Indices of the largest entries of the last dimension, descending, ties to the lower."""
    return torch.sort(score, dim=-1, descending=True, stable=True).indices[..., :count]


def route_grouped(
    logits_TE: Tensor,
    top_k: int,
    *,
    bias_E: Tensor,
    groups: int,
    kept_groups: int,
    renormalize: bool,
) -> tuple[Tensor, Tensor]:
    """Choose ``top_k`` experts by sigmoid scores, from the best groups only.

    The correction bias takes part in choosing and not in the weights. A group's
    score is the sum of its two best corrected scores.

    Args:
        logits_TE: ``[T, E]`` router logits.
        top_k: Experts per token; the kept groups hold at least as many.
        bias_E: ``[E]`` float32 correction of the scores.
        groups: Groups of equally many experts, two at least.
        kept_groups: Groups that experts are chosen from.
        renormalize: Divide the chosen weights by their sum.

    Returns:
        Weights ``[T, k]`` float32 and expert ids ``[T, k]`` int64, by corrected score,
        descending.

    Raises:
        ValueError: The groups do not fit.

    Source: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2.
    """
    experts = logits_TE.shape[-1]
    if experts % groups or experts // groups < 2 or kept_groups * (experts // groups) < top_k:
        raise ValueError(
            f"route_grouped: {experts} experts in {groups} groups, {kept_groups} of them kept, "
            f"do not give {top_k} experts; choose groups of equal size, two experts at least"
        )
    score_TE = sigmoid(logits_TE)
    with torch.no_grad():
        choice_TE = score_TE + bias_E.float()
        if kept_groups < groups:
            choice_TGe = choice_TE.unflatten(-1, (groups, experts // groups))
            best_two = choice_TGe.gather(-1, _best(choice_TGe, 2))
            group_score_TG = best_two[..., 0] + best_two[..., 1]
            kept = torch.zeros_like(group_score_TG, dtype=torch.bool)
            kept.scatter_(-1, _best(group_score_TG, kept_groups), True)
            choice_TE = choice_TGe.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
        expert_Tk = _best(choice_TE, top_k)
    weight_Tk = score_TE.gather(-1, expert_Tk)
    if renormalize:
        weight_Tk = weight_Tk / (exact_sum(weight_Tk).float() + _TINY)
    return weight_Tk, expert_Tk
