"""The declarations, by operator. Data only: replacements are named by reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from patchkit.engine import Patch

PROFILE = "cpu_tree"

_HERE = "patchkit.bindings.vllm_cpu."
_LAYERS = "vllm.model_executor.layers."
_MOE = _LAYERS + "fused_moe."
_METHOD = _MOE + "unquantized_fused_moe_method:UnquantizedFusedMoEMethod."
_CPU_ATTENTION = "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl."

# vLLM versions whose operators these patches know. CPU experts were monolithic
# until 0.28 and went through CPURouter and a modular kernel from 0.30.
_SINCE = ">=0.26,<0.34"
_MODULAR = ">=0.30,<0.34"
_MONOLITHIC = ">=0.26,<0.30"

_UNTIL_UPSTREAM = (
    "vLLM's CPU kernels accumulate in an order that does not depend on batch shape and "
    "is documented, so that the trainer can call them"
)


def _replace(symbol: str, replacement: str, **fields: Any) -> Patch:
    defaults = {"versions": _SINCE, "until": _UNTIL_UPSTREAM}
    return Patch(
        symbol=symbol,
        action="replace",
        replacement=_HERE + replacement,
        profiles=(PROFILE,),
        **{**defaults, **fields},
    )


LINEAR = (
    _replace(
        _LAYERS + "linear:UnquantizedLinearMethod.process_weights_after_loading",
        "linear:keep_linear_weight",
        reason="keep layer.weight: packing for oneDNN deletes it",
        consequence="the exact product has no weight to read, and a reload cannot load",
    ),
    _replace(
        _LAYERS + "linear:UnquantizedLinearMethod.apply",
        "linear:linear_apply",
        reason="exact product instead of a BLAS whose blocking depends on the number of rows",
        consequence="every token's log-probability differs from the replay",
    ),
    _replace(
        _LAYERS + "linear:RowParallelLinear.forward",
        "linear:row_parallel_forward",
        reason="partial sums stay float32 and are added as one tree over chunks and ranks",
        consequence="o_proj is rounded per rank: bits change with the tensor-parallel size",
        evidence="patchkit.bindings.evidence:row_parallel_is_rounded_per_rank",
    ),
)

LM_HEAD = (
    _replace(
        _LAYERS + "vocab_parallel_embedding:UnquantizedEmbeddingMethod.apply",
        "linear:lm_head_apply",
        reason="float32 logits from the exact product",
        consequence="bf16 logits: every log-probability differs, and equal logits tie",
    ),
)

NORM = (
    _replace(
        _LAYERS + "layernorm:RMSNorm.forward_native",
        "layernorm:rms_norm_forward",
        reason="the residual sum is rounded before the norm reads it, as the trainer does",
        consequence="vLLM's fused add-norm reads the unrounded float32 sum",
    ),
)

ROTARY = (
    _replace(
        _LAYERS + "rotary_embedding.base:RotaryEmbedding.forward_cpu",
        "rotary:rotary_forward",
        reason="float32 cosines and sines instead of vLLM's bf16 cache",
        consequence="angles are wrong by up to 2e-3, on the rollout side only",
        until="vLLM keeps its cos/sin cache in float32",
    ),
)

ATTENTION = (
    _replace(
        _CPU_ATTENTION + "do_kv_cache_update",
        "attention:kv_cache_update",
        reason="keys and values in a plain layout instead of one that depends on the processor",
        consequence="the exact attention reads keys in the kernel's private layout",
    ),
    _replace(
        _CPU_ATTENTION + "forward",
        "attention:attention_forward",
        reason="a query's bits depend on its own context, not on how the batch was cut",
        consequence="the split over keys follows the thread count and the batch",
    ),
)

LOGPROBS = (
    _replace(
        "vllm.v1.sample.sampler:Sampler.compute_logprobs",
        "sampling:compute_logprobs",
        reason="one log-softmax on both sides",
        consequence="the sum over the vocabulary is taken in another order: last-bit differences",
        until="vLLM and the trainer call one documented log-softmax",
    ),
)

ACTIVATION = (
    _replace(
        _LAYERS + "activation:SiluAndMul.forward_native",
        "activation:silu_and_mul_forward",
        reason="exp on contiguous float32 and one rounding, as the trainer does",
        consequence="vLLM rounds after the SiLU as well, and vector and scalar code round "
        "differently",
    ),
)

GATE = (
    _replace(
        _LAYERS + "linear:ReplicatedLinear.forward",
        "experts:replicated_gate_forward",
        versions=">=0.26,<0.31",
        reason="float32 router logits (the gate is a ReplicatedLinear until 0.30)",
        consequence="bf16 router logits tie at the cut; another expert is chosen",
        until="vLLM 0.31, where the gate is a GateLinear",
    ),
    _replace(
        _MOE + "router.gate_linear:GateLinear.forward",
        "experts:gate_forward",
        versions=">=0.31,<0.34",
        reason="float32 router logits from the exact product",
        consequence="bf16 router logits tie at the cut; another expert is chosen",
    ),
)

ROUTER = (
    _replace(
        _MOE + "router.cpu_router:CPURouter._compute_routing",
        "experts:compute_routing",
        versions=_MODULAR,
        reason="exact probabilities; of two equal ones the lower expert id",
        consequence="weights differ in the last bit, and ties go to whichever the sort saw first",
        evidence="patchkit.bindings.evidence:stock_router_differs",
    ),
)

GROUPED_ROUTER = tuple(
    replace(patch, evidence="patchkit.bindings.evidence:stock_grouped_router_differs")
    for patch in ROUTER
)

EXPERTS = (
    _replace(
        _MOE + "experts.cpu_moe:CPUUnquantizedExperts.process_weights_after_loading",
        "experts:keep_expert_weights",
        versions=">=0.28,<0.34",
        reason="keep the checkpoint's layout: prepacking reorders the weights in place",
        consequence="the exact experts read packed weights, and a reload corrupts them silently",
        until="vLLM's reload life cycle repacks expert weights on CPU",
    ),
    _replace(
        _METHOD + "forward_native",
        "experts:experts_forward",
        versions=_MODULAR,
        reason="exact experts, combined in ascending expert id",
        consequence="every token's log-probability differs from the replay",
    ),
    _replace(
        _METHOD + "process_weights_after_loading",
        "experts:keep_moe_weights",
        versions=">=0.26,<0.28",
        reason="keep the checkpoint's layout (before 0.28 packing happens here)",
        consequence="the exact experts read packed weights, and a reload corrupts them silently",
        until="vLLM 0.28, where packing moved to CPUUnquantizedExperts",
    ),
    _replace(
        _METHOD + "apply_monolithic",
        "experts:monolithic_experts",
        versions=_MONOLITHIC,
        reason="exact routing and experts (until 0.28 one call did both on CPU)",
        consequence="every token's log-probability differs from the replay",
        until="vLLM 0.30, where CPU experts became modular",
    ),
)

EXPERTS_OUTPUT = (
    _replace(
        _MOE + "runner.moe_runner:MoERunner._maybe_reduce_final_output",
        "experts:reduce_expert_output_0_26",
        versions=">=0.26,<0.27",
        reason="ranks combined in order in float32, then one rounding",
        consequence="the experts' sum is added in another order for every tensor-parallel size",
        until="vLLM 0.27, where the method grew an argument",
    ),
    _replace(
        _MOE + "runner.moe_runner:MoERunner._maybe_reduce_final_output",
        "experts:reduce_expert_output",
        versions=">=0.27,<0.34",
        reason="ranks combined in order in float32, then one rounding",
        consequence="the experts' sum is added in another order for every tensor-parallel size",
    ),
)

# Where shared experts run beside the routed ones.
SHARED_EXPERTS_OUTPUT = (
    _replace(
        _MOE + "runner.moe_runner:MoERunner._maybe_apply_routed_scale_to_output",
        "experts:reduce_shared_and_routed",
        evidence="patchkit.bindings.evidence:combined_per_rank_differs",
        versions=">=0.27,<0.34",
        reason="shared and routed experts are combined over the ranks one by one, in float32",
        consequence="their sum is rounded per rank: bits change with the tensor-parallel size",
    ),
    _replace(
        _MOE + "runner.moe_runner:MoERunner._maybe_reduce_final_output",
        "experts:round_combined_output",
        versions=">=0.27,<0.34",
        reason="one rounding of the combined output, which is reduced already",
        consequence="the ranks' outputs are added a second time",
    ),
)

# What every decoder has, with softmax attention, RMSNorm and one output layer.
DECODER = LINEAR + LM_HEAD + NORM + ROTARY + ATTENTION + LOGPROBS

# A decoder with gated SiLU feed-forward layers, and one of routed experts alone.
DENSE = DECODER + ACTIVATION
MOE = DECODER + GATE + ROUTER + EXPERTS + EXPERTS_OUTPUT
# Dense layers first, then experts of a sigmoid router in groups, with shared ones beside
# them. vLLM widens these gates to float32, so that LINEAR computes them.
SHARED_MOE = DECODER + ACTIVATION + GROUPED_ROUTER + EXPERTS + SHARED_EXPERTS_OUTPUT


def in_profiles(patches: tuple[Patch, ...], *profiles: str) -> tuple[Patch, ...]:
    """The same patches for other profiles of an adapter."""
    return tuple(replace(patch, profiles=profiles) for patch in patches)
