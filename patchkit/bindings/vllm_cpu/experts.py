"""Router, experts and their combination in vLLM.

Tensor-parallel partial sums are exchanged in float32 and combined in rank
order: the upper levels of the same pairwise tree that one rank computes alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from patchkit import providers
from patchkit.bindings.claim import chunks_per_rank, plain, refuse_unless
from patchkit.bindings.vllm_cpu.ranks import tree_over_ranks


def gate_forward(self: Any, x: Tensor) -> Any:
    """``GateLinear.forward``: float32 router logits, from a weight of either width."""
    refuse_unless(self, bias=(self.bias is None, True))
    logits = providers.linear(x, self.weight)
    return (logits, None) if self.return_bias else logits


def replicated_gate_forward(self: Any, x: Tensor) -> Any:
    """``ReplicatedLinear.forward`` before vLLM 0.31, where the router's gate is one."""
    refuse_unless(self, layer=(self.prefix.rsplit(".", 1)[-1], "gate"))
    return gate_forward(self, x)


def _routed(router: Any, router_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and ids by the settings of a vLLM router, or of a layer before 0.30."""
    grouped = bool(router.use_grouped_topk)
    refuse_unless(
        router,
        scoring_func=(router.scoring_func, "sigmoid" if grouped else "softmax"),
        custom_routing_function=(router.custom_routing_function is None, True),
        e_score_correction_bias=(router.e_score_correction_bias is not None, grouped),
        # The factor belongs to the combined output.
        routed_scaling_factor=(router.routed_scaling_factor, 1.0),
    )
    if not grouped:
        return providers.route(router_logits, router.top_k, renormalize=router.renormalize)
    return providers.route_grouped(
        router_logits,
        router.top_k,
        bias_E=router.e_score_correction_bias,
        groups=router.num_expert_group,
        kept_groups=router.topk_group,
        renormalize=router.renormalize,
    )


def compute_routing(
    self: Any,
    hidden_states: Tensor,
    router_logits: Tensor,
    indices_type: torch.dtype | None,
    *,
    input_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``CPURouter._compute_routing``: stable top-k of exact float32 probabilities."""
    weights, experts = _routed(self, router_logits)
    return weights.contiguous(), experts.to(torch.int32)


def keep_expert_weights(self: Any, layer: torch.nn.Module) -> None:
    """``CPUUnquantizedExperts.process_weights_after_loading``: no packing.

    Prepacking reorders ``w13_weight`` and ``w2_weight`` in place of the
    checkpoint's layout; a later reload then loads into the packed layout and
    corrupts it silently.
    """


def keep_moe_weights(self: Any, layer: torch.nn.Module) -> None:
    """``UnquantizedFusedMoEMethod.process_weights_after_loading`` before 0.28: no packing."""


def _expert_partial_sum(method: Any, layer: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """This rank's float32 sum over the experts, before ranks are combined."""
    parallel = method.moe.moe_parallel_config
    refuse_unless(
        layer,
        has_bias=(bool(method.moe.has_bias), False),
        expert_map=(layer.expert_map is None, True),
        apply_router_weight_on_input=(layer.apply_router_weight_on_input, False),
        dp_size=(parallel.dp_size, 1),
        use_ep=(parallel.use_ep, False),
        activation=(plain(layer.activation), "silu"),
    )
    parts = providers.experts_chunks(
        x,
        ids,
        weights,
        layer.w13_weight,
        layer.w2_weight,
        chunks=chunks_per_rank(layer, parallel.tp_size),
    )
    return providers.pairwise_tree(parts)


def monolithic_experts(
    self: Any, layer: Any, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None
) -> Tensor:
    """``UnquantizedFusedMoEMethod.apply_monolithic`` before 0.30: routing and experts in one."""
    weights, ids = _routed(layer, router_logits)
    return _expert_partial_sum(self, layer, x, weights, ids)


def experts_forward(
    self: Any,
    layer: Any,
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    shared_experts: Any,
    shared_experts_input: Tensor | None,
) -> Tensor:
    """``UnquantizedFusedMoEMethod.forward_native``: this rank's float32 partial sum.

    Shared experts run beside it, in the runner; who combines them says whether it may.
    """
    return _expert_partial_sum(self, layer, x, topk_weights, topk_ids)


def _refuse_unreduced(runner: Any, states: Tensor, output_is_reduced: bool | None) -> None:
    refuse_unless(
        runner,
        is_sequence_parallel=(runner.moe_config.is_sequence_parallel, False),
        skip_final_all_reduce=(runner.moe_config.skip_final_all_reduce, False),
        output_is_reduced=(bool(output_is_reduced or runner._fused_output_is_reduced), False),
        dtype=(states.dtype, torch.float32),
    )


def reduce_expert_output(
    self: Any, states: Tensor, trunc_size: int | None, output_is_reduced: bool | None = None
) -> Tensor:
    """``MoERunner._maybe_reduce_final_output``: ranks combined in order, then one rounding."""
    refuse_unless(self, shared_experts=(self.shared_experts is None, True))
    _refuse_unreduced(self, states, output_is_reduced)
    states = tree_over_ranks(states).to(self.moe_config.in_dtype)
    return states if trunc_size is None else states[..., :trunc_size]


def reduce_expert_output_0_26(self: Any, states: Tensor, trunc_size: int | None) -> Tensor:
    """``MoERunner._maybe_reduce_final_output`` of vLLM 0.26."""
    return reduce_expert_output(self, states, trunc_size)


def reduce_shared_and_routed(
    self: Any, shared_output: Tensor | None, fused_output: Tensor
) -> tuple[Tensor | None, Tensor]:
    """``MoERunner._maybe_apply_routed_scale_to_output``: ranks first, then the factor.

    Shared and routed experts are combined over the ranks one by one: the sum of the
    two, added per rank, would be another tree for every tensor-parallel size.
    """
    refuse_unless(
        self,
        shared_experts=(shared_output is not None, True),
        dtype=((getattr(shared_output, "dtype", None), fused_output.dtype), (torch.float32,) * 2),
    )
    assert shared_output is not None  # refused above
    return tree_over_ranks(shared_output), tree_over_ranks(
        fused_output
    ) * self.routed_scaling_factor


def round_combined_output(
    self: Any, states: Tensor, trunc_size: int | None, output_is_reduced: bool | None = None
) -> Tensor:
    """``MoERunner._maybe_reduce_final_output`` after :func:`reduce_shared_and_routed`."""
    refuse_unless(self, shared_experts=(self.shared_experts is not None, True))
    _refuse_unreduced(self, states, output_is_reduced)
    states = states.to(self.moe_config.in_dtype)
    return states if trunc_size is None else states[..., :trunc_size]
