"""Routers and experts of transformers models."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from patchkit import providers
from patchkit.bindings.claim import TREE_CHUNKS


def softmax_router_forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``TopKRouter.forward``: float32 logits and weights, stable ties."""
    flat = hidden_states.reshape(-1, self.hidden_dim)
    logits = providers.linear(flat, self.weight)
    weights, experts = providers.route(logits, self.top_k, renormalize=self.norm_topk_prob)
    return logits, weights, experts


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """``Experts.forward``: the rollout's chunks and tree, on one rank."""
    parts = providers.experts_chunks(
        hidden_states,
        top_k_index,
        top_k_weights,
        self.gate_up_proj,
        self.down_proj,
        chunks=TREE_CHUNKS,
    )
    return providers.pairwise_tree(parts).to(hidden_states.dtype)
