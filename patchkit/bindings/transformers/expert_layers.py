"""Routers and experts of transformers models."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from patchkit import providers
from patchkit.bindings.claim import TREE_CHUNKS, refuse_unless
from patchkit.bindings.transformers.mlp_layer import gated_mlp


def softmax_router_forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``TopKRouter.forward``: float32 logits and weights, stable ties."""
    flat = hidden_states.reshape(-1, self.hidden_dim)
    logits = providers.linear(flat, self.weight)
    weights, experts = providers.route(logits, self.top_k, renormalize=self.norm_topk_prob)
    return logits, weights, experts


def grouped_router_forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``TopkRouter.forward`` of sigmoid scores with a correction bias and groups.

    The weights come without ``routed_scaling_factor``, which the engine multiplies
    into the combined output: :func:`shared_moe_forward` does, too.
    """
    flat = hidden_states.reshape(-1, self.hidden_dim)
    logits = providers.linear(flat, self.weight)
    weights, experts = providers.route_grouped(
        logits,
        self.top_k,
        bias_E=self.e_score_correction_bias,
        groups=self.num_group,
        kept_groups=self.topk_group,
        renormalize=self.norm_topk_prob,
    )
    return logits, weights, experts


def _routed(experts: Any, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Weighted outputs of the chosen experts, ``[T, H]`` float32 and not rounded yet."""
    parts = providers.experts_chunks(
        x, top_k_index, top_k_weights, experts.gate_up_proj, experts.down_proj, chunks=TREE_CHUNKS
    )
    return providers.pairwise_tree(parts)


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """``Experts.forward``: the rollout's chunks and tree, on one rank."""
    return _routed(self, hidden_states, top_k_index, top_k_weights).to(hidden_states.dtype)


def shared_moe_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """``MoE.forward`` with shared experts beside the routed ones: one rounding of their sum."""
    _, weights, chosen = self.gate(hidden_states)
    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    activation = type(self.experts.act_fn).__name__
    refuse_unless(self.experts, act_fn=(activation, "SiLUActivation"))
    routed = _routed(self.experts, flat, chosen, weights) * self.gate.routed_scaling_factor
    combined = gated_mlp(self.shared_experts, flat) + routed
    return combined.to(hidden_states.dtype).view(hidden_states.shape)
