"""Rollout side: replacements for vLLM's operators on CPU.

Each function stands in for the vLLM symbol that the declaration in
``patchkit_adapters.qwen3_moe`` names; signatures follow vLLM 0.32. A replaced
method serves every layer of its class in the process, so each one first checks
that the layer is of the kind that the claim covers and refuses it by name
otherwise.

Tensor-parallel partial sums are exchanged in float32 and combined in rank
order: the upper levels of the same pairwise tree that one rank computes alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from patchkit import providers
from patchkit_adapters.qwen3_moe.coverage import TREE_CHUNKS, UncoveredLayerError

# Elements of one padded batch of single-token queries; bounds memory only.
_DECODE_ELEMENTS = 1 << 22


def _refuse_unless(layer: object, /, **required: tuple[Any, Any]) -> None:
    """Raise when a layer has a feature outside the claim: ``name=(found, expected)``."""
    wrong = {name: pair for name, pair in required.items() if pair[0] != pair[1]}
    if wrong:
        raise UncoveredLayerError(type(layer).__name__, wrong)


def _plain(setting: Any) -> Any:
    """An enum member's value; vLLM uses enums and strings for the same settings."""
    return getattr(setting, "value", setting)


def _chunks_per_rank(layer: object, tp_size: int) -> int:
    if TREE_CHUNKS % tp_size:
        raise UncoveredLayerError(
            type(layer).__name__, {"tp_size": (tp_size, f"a divisor of {TREE_CHUNKS}")}
        )
    return TREE_CHUNKS // tp_size


def _tree_over_ranks(partial: Tensor) -> Tensor:
    """Combine float32 partial sums of all tensor-parallel ranks, in rank order."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return partial
    return providers.pairwise_tree(group.all_gather(partial.contiguous()[None], dim=0))


# --- linear layers ------------------------------------------------------------


def keep_linear_weight(self: Any, layer: torch.nn.Module) -> None:
    """``UnquantizedLinearMethod.process_weights_after_loading``: no packing.

    The packed copy replaces ``layer.weight``, which both the provider and the
    next weight update need.
    """


def linear_apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """``UnquantizedLinearMethod.apply``: exact product, rounded once to the stream's dtype."""
    _refuse_unless(layer, bias=(bias is None, True))
    return providers.linear(x, layer.weight).to(x.dtype)


def row_parallel_forward(self: Any, input_: Tensor) -> Any:
    """``RowParallelLinear.forward``: float32 partial sums, one tree over chunks and ranks."""
    _refuse_unless(
        self,
        input_is_parallel=(self.input_is_parallel, True),
        bias=(self.bias is None, True),
        quant_method=(type(self.quant_method).__name__, "UnquantizedLinearMethod"),
    )
    partial = providers.linear(input_, self.weight, chunks=_chunks_per_rank(self, self.tp_size))
    if self.reduce_results and self.tp_size > 1:
        partial = _tree_over_ranks(partial)
    output = partial.to(input_.dtype)
    return (output, None) if self.return_bias else output


def gate_forward(self: Any, x: Tensor) -> Any:
    """``GateLinear.forward``: float32 router logits."""
    _refuse_unless(self, bias=(self.bias is None, True))
    logits = providers.linear(x, self.weight)
    return (logits, None) if self.return_bias else logits


def replicated_gate_forward(self: Any, x: Tensor) -> Any:
    """``ReplicatedLinear.forward`` before vLLM 0.31, where the router's gate is one."""
    _refuse_unless(self, layer=(self.prefix.rsplit(".", 1)[-1], "gate"))
    return gate_forward(self, x)


def lm_head_apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """``UnquantizedEmbeddingMethod.apply``: float32 vocabulary logits."""
    _refuse_unless(layer, bias=(bias is None, True))
    return providers.linear(x, layer.weight)


# --- norm and position --------------------------------------------------------


def rms_norm_forward(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    """``RMSNorm.forward_native``: the residual sum is rounded before the norm reads it."""
    _refuse_unless(
        self,
        has_weight=(self.has_weight, True),
        variance_size_override=(self.variance_size_override, None),
    )
    weight = self.weight.data
    if residual is None:
        return providers.rms_norm(x, weight, self.variance_epsilon)
    summed = providers.add_residual(x, residual)
    return providers.rms_norm(summed, weight, self.variance_epsilon), summed


def rotary_forward(
    self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """``RotaryEmbedding.forward_cpu``: float32 cosines and sines, one rounding."""
    _refuse_unless(
        self,
        type=(type(self).__name__, "RotaryEmbedding"),
        is_neox_style=(self.is_neox_style, True),
        rotary_dim=(self.rotary_dim, self.head_size),
    )
    flat_positions = positions.view(-1)

    def rotated(x: Tensor) -> Tensor:
        heads = x.view(flat_positions.numel(), -1, self.head_size)
        return providers.rotate(
            heads, flat_positions, base=self.base, max_position=self.max_position_embeddings
        ).view(x.shape)

    return rotated(query), None if key is None else rotated(key)


# --- attention over the paged cache -------------------------------------------
#
# The cache is [blocks, kv heads, block, 2 * head size]. vLLM's kernels store keys
# in a layout that depends on the processor; here the last dimension simply holds
# the key, then the value.


def kv_cache_update(
    self: Any,
    layer: torch.nn.Module,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """``CPUAttentionBackendImpl.do_kv_cache_update``: write keys and values to their slots."""
    count = slot_mapping.shape[0]
    used = slot_mapping >= 0
    slots = slot_mapping[used].long()
    block_size = kv_cache.shape[2]
    entry = torch.cat([key[:count], value[:count]], dim=-1)[used]
    kv_cache[slots // block_size, :, slots % block_size] = entry


def _pages(kv_cache: Tensor, block_table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values of some sequences: two ``[B, L, G, D]``, L a multiple of the block."""
    block_size = kv_cache.shape[2]
    # A shorter sequence's row ends in whatever the table held before; it is masked.
    blocks = block_table[:, : -(-length // block_size)].clamp_min(0)
    # index_select copies whole blocks: twice as fast as kv_cache[blocks].
    entries = kv_cache.index_select(0, blocks.flatten()).view(*blocks.shape, *kv_cache.shape[1:])
    key, value = entries.permute(0, 1, 3, 2, 4).flatten(1, 2).chunk(2, dim=-1)
    return key, value


def attention_forward(
    self: Any,
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    attn_metadata: Any,
    output: Tensor,
    output_scale: Tensor | None = None,
    output_block_scale: Tensor | None = None,
) -> Tensor:
    """``CPUAttentionBackendImpl.forward``: every query against its own cached context."""
    _refuse_unless(
        self,
        attn_type=(_plain(self.attn_type), "decoder"),
        sliding_window=(self.sliding_window, -1),
        logits_soft_cap=(self.logits_soft_cap, 0),
        alibi_slopes=(self.alibi_slopes is None, True),
        sinks=(self.sinks is None, True),
        is_fp8_kv_cache=(self.is_fp8_kv_cache, False),
        output_scale=(output_scale is None and output_block_scale is None, True),
    )
    if attn_metadata is None:  # profiling run: there is no cache yet
        return output
    _refuse_unless(self, causal=(bool(attn_metadata.causal), True))
    starts = attn_metadata.query_start_loc
    lengths = attn_metadata.seq_lens
    query_lengths = (starts[1:] - starts[:-1]).tolist()
    context_lengths = lengths.tolist()
    table = attn_metadata.block_table

    def attend(requests: list[int], rows: Tensor, tokens: int) -> None:
        longest = max(context_lengths[r] for r in requests)
        keys, values = _pages(kv_cache, table[requests], longest)
        context = lengths[requests][:, None, None]
        # Position of each query within its sequence: the last `tokens` of it.
        position = context - tokens + torch.arange(tokens)[None, :, None]
        allowed = torch.arange(keys.shape[1])[None, None, :] <= position
        found = providers.attention(
            query[rows].view(len(requests), tokens, *query.shape[1:]),
            keys,
            values,
            allowed,
            scale=self.scale,
        )
        output[rows] = found.view(-1, *query.shape[1:]).view(-1, *output.shape[1:])

    decodes = [r for r, tokens in enumerate(query_lengths) if tokens == 1]
    per_context = query.shape[1] * query.shape[2]
    while decodes:
        longest = max(context_lengths[r] for r in decodes)
        batch = max(1, _DECODE_ELEMENTS // (longest * per_context))
        attend(decodes[:batch], starts[decodes[:batch]].long(), 1)
        decodes = decodes[batch:]
    for request, tokens in enumerate(query_lengths):
        if tokens > 1:
            start = int(starts[request])
            attend([request], torch.arange(start, start + tokens), tokens)
    return output


# --- mixture of experts -------------------------------------------------------


def _routed(router: Any, router_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and ids by the settings of a vLLM router, or of a layer before 0.30."""
    _refuse_unless(
        router,
        scoring_func=(router.scoring_func, "softmax"),
        use_grouped_topk=(router.use_grouped_topk, False),
        custom_routing_function=(router.custom_routing_function is None, True),
        e_score_correction_bias=(router.e_score_correction_bias is None, True),
        routed_scaling_factor=(router.routed_scaling_factor, 1.0),
    )
    return providers.route(router_logits, router.top_k, renormalize=router.renormalize)


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
    _refuse_unless(
        layer,
        has_bias=(bool(method.moe.has_bias), False),
        expert_map=(layer.expert_map is None, True),
        apply_router_weight_on_input=(layer.apply_router_weight_on_input, False),
        dp_size=(parallel.dp_size, 1),
        use_ep=(parallel.use_ep, False),
        activation=(_plain(layer.activation), "silu"),
    )
    parts = providers.experts_chunks(
        x,
        ids,
        weights,
        layer.w13_weight,
        layer.w2_weight,
        chunks=_chunks_per_rank(layer, parallel.tp_size),
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
    """``UnquantizedFusedMoEMethod.forward_native``: this rank's float32 partial sum."""
    _refuse_unless(layer, shared_experts=(shared_experts is None, True))
    return _expert_partial_sum(self, layer, x, topk_weights, topk_ids)


def reduce_expert_output(
    self: Any, states: Tensor, trunc_size: int | None, output_is_reduced: bool | None = None
) -> Tensor:
    """``MoERunner._maybe_reduce_final_output``: ranks combined in order, then one rounding."""
    _refuse_unless(
        self,
        is_sequence_parallel=(self.moe_config.is_sequence_parallel, False),
        skip_final_all_reduce=(self.moe_config.skip_final_all_reduce, False),
        output_is_reduced=(bool(output_is_reduced or self._fused_output_is_reduced), False),
        dtype=(states.dtype, torch.float32),
    )
    states = _tree_over_ranks(states).to(self.moe_config.in_dtype)
    return states if trunc_size is None else states[..., :trunc_size]


def reduce_expert_output_0_26(self: Any, states: Tensor, trunc_size: int | None) -> Tensor:
    """``MoERunner._maybe_reduce_final_output`` of vLLM 0.26."""
    return reduce_expert_output(self, states, trunc_size)


# --- log-probabilities --------------------------------------------------------


def compute_logprobs(logits: Tensor) -> Tensor:
    """``Sampler.compute_logprobs``: the log-softmax that the trainer uses."""
    return providers.log_softmax(logits)
