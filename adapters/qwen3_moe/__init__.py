"""Qwen3-MoE: vLLM rollout and Hugging Face FSDP replay with equal bits.

Importing this package imports neither torch, vLLM nor transformers: the
declarations name their replacements by reference. What each operator agrees on
stands in the table of ``README.md`` beside this file.
"""

from __future__ import annotations

from pathlib import Path

from patchkit.engine import Adapter, Patch
from patchkit.parity.checkpointing import CHECKPOINT_PATCHES
from patchkit.runtime.patches import RUNTIME_PATCHES
from patchkit_adapters.qwen3_moe.cuda import CUDA_ROLLOUT, CUDA_TRAINER

_HERE = Path(__file__).parent
_ROLLOUT = "patchkit_adapters.qwen3_moe.rollout:"
_TRAINER = "patchkit_adapters.qwen3_moe.trainer:"
_LAYERS = "vllm.model_executor.layers."
_MOE = _LAYERS + "fused_moe."
_HF = "transformers.models.qwen3_moe.modeling_qwen3_moe:"

# vLLM versions whose operators these patches know. CPU experts were monolithic
# until 0.28 and went through CPURouter and a modular kernel from 0.30.
_CPU = ("cpu_tree",)
_SINCE = ">=0.26,<0.34"
_MODULAR = ">=0.30,<0.34"
_MONOLITHIC = ">=0.26,<0.30"

_UNTIL_UPSTREAM = (
    "vLLM's CPU kernels accumulate in an order that does not depend on batch shape and "
    "is documented, so that the trainer can call them"
)
_UNTIL_SHARED = "transformers lets the trainer name the operator instead of replacing the method"

_rollout = (
    # Shared operators first: every model has them.
    Patch(
        symbol=_LAYERS + "linear:UnquantizedLinearMethod.process_weights_after_loading",
        action="replace",
        profiles=_CPU,
        replacement=_ROLLOUT + "keep_linear_weight",
        versions=_SINCE,
        reason="keep layer.weight: packing for oneDNN deletes it",
        consequence="the exact product has no weight to read, and a reload cannot load",
        until=_UNTIL_UPSTREAM,
    ),
    Patch(
        symbol=_LAYERS + "linear:UnquantizedLinearMethod.apply",
        action="replace",
        profiles=_CPU,
        replacement=_ROLLOUT + "linear_apply",
        versions=_SINCE,
        reason="exact product instead of a BLAS whose blocking depends on the number of rows",
        consequence="every token's log-probability differs from the replay",
        until=_UNTIL_UPSTREAM,
    ),
    Patch(
        symbol=_LAYERS + "linear:RowParallelLinear.forward",
        action="replace",
        profiles=_CPU,
        replacement=_ROLLOUT + "row_parallel_forward",
        versions=_SINCE,
        reason="partial sums stay float32 and are added as one tree over chunks and ranks",
        consequence="o_proj is rounded per rank: bits change with the tensor-parallel size",
        until=_UNTIL_UPSTREAM,
    ),
    Patch(
        symbol=_LAYERS + "vocab_parallel_embedding:UnquantizedEmbeddingMethod.apply",
        action="replace",
        profiles=_CPU,
        replacement=_ROLLOUT + "lm_head_apply",
        versions=_SINCE,
        reason="float32 logits from the exact product",
        consequence="bf16 logits: every log-probability differs, and equal logits tie",
        until=_UNTIL_UPSTREAM,
    ),
    Patch(
        symbol=_LAYERS + "layernorm:RMSNorm.forward_native",
        action="replace",
        profiles=_CPU,
        replacement=_ROLLOUT + "rms_norm_forward",
        versions=_SINCE,
        reason="the residual sum is rounded before the norm reads it, as the trainer does",
        consequence="vLLM's fused add-norm reads the unrounded float32 sum",
        until=_UNTIL_UPSTREAM,
    ),
    Patch(
        symbol=_LAYERS + "rotary_embedding.base:RotaryEmbedding.forward_cpu",
        action="replace",
        profiles=_CPU,
        replacement=_ROLLOUT + "rotary_forward",
        versions=_SINCE,
        reason="float32 cosines and sines instead of vLLM's bf16 cache",
        consequence="angles are wrong by up to 2e-3, on the rollout side only",
        until="vLLM keeps its cos/sin cache in float32",
    ),
    Patch(
        symbol="vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update",
        action="replace",
        profiles=_CPU,
        replacement=_ROLLOUT + "kv_cache_update",
        versions=_SINCE,
        reason="keys and values in a plain layout instead of one that depends on the processor",
        consequence="the exact attention reads keys in the kernel's private layout",
        until=_UNTIL_UPSTREAM,
    ),
    Patch(
        symbol="vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward",
        action="replace",
        profiles=_CPU,
        replacement=_ROLLOUT + "attention_forward",
        versions=_SINCE,
        reason="a query's bits depend on its own context, not on how the batch was cut",
        consequence="the split over keys follows the thread count and the batch",
        until=_UNTIL_UPSTREAM,
    ),
    Patch(
        symbol="vllm.v1.sample.sampler:Sampler.compute_logprobs",
        action="replace",
        profiles=_CPU,
        replacement=_ROLLOUT + "compute_logprobs",
        versions=_SINCE,
        reason="one log-softmax on both sides",
        consequence="the sum over the vocabulary is taken in another order: last-bit differences",
        until="vLLM and the trainer call one documented log-softmax",
    ),
    # The model's own.
    Patch(
        symbol=_LAYERS + "linear:ReplicatedLinear.forward",
        action="replace",
        profiles=_CPU,
        replacement=_ROLLOUT + "replicated_gate_forward",
        versions=">=0.26,<0.31",
        reason="float32 router logits (the gate is a ReplicatedLinear until 0.30)",
        consequence="bf16 router logits tie at the cut; another expert is chosen",
        until="vLLM 0.31, where the gate is a GateLinear",
    ),
    Patch(
        symbol=_MOE + "router.gate_linear:GateLinear.forward",
        action="replace",
        profiles=_CPU,
        replacement=_ROLLOUT + "gate_forward",
        versions=">=0.31,<0.34",
        reason="float32 router logits from the exact product",
        consequence="bf16 router logits tie at the cut; another expert is chosen",
        until=_UNTIL_UPSTREAM,
    ),
    Patch(
        symbol=_MOE + "router.cpu_router:CPURouter._compute_routing",
        action="replace",
        profiles=_CPU,
        replacement=_ROLLOUT + "compute_routing",
        versions=_MODULAR,
        reason="exact probabilities; of two equal ones the lower expert id",
        consequence="weights differ in the last bit, and ties go to whichever the sort saw first",
        until=_UNTIL_UPSTREAM,
    ),
    Patch(
        symbol=_MOE + "experts.cpu_moe:CPUUnquantizedExperts.process_weights_after_loading",
        action="replace",
        profiles=_CPU,
        replacement=_ROLLOUT + "keep_expert_weights",
        versions=">=0.28,<0.34",
        reason="keep the checkpoint's layout: prepacking reorders the weights in place",
        consequence="the exact experts read packed weights, and a reload corrupts them silently",
        until="vLLM's reload life cycle repacks expert weights on CPU",
    ),
    Patch(
        symbol=_MOE + "unquantized_fused_moe_method:UnquantizedFusedMoEMethod.forward_native",
        action="replace",
        profiles=_CPU,
        replacement=_ROLLOUT + "experts_forward",
        versions=_MODULAR,
        reason="exact experts, combined in ascending expert id",
        consequence="every token's log-probability differs from the replay",
        until=_UNTIL_UPSTREAM,
    ),
    Patch(
        symbol=_MOE
        + "unquantized_fused_moe_method:UnquantizedFusedMoEMethod.process_weights_after_loading",
        action="replace",
        profiles=_CPU,
        replacement=_ROLLOUT + "keep_moe_weights",
        versions=">=0.26,<0.28",
        reason="keep the checkpoint's layout (before 0.28 packing happens here)",
        consequence="the exact experts read packed weights, and a reload corrupts them silently",
        until="vLLM 0.28, where packing moved to CPUUnquantizedExperts",
    ),
    Patch(
        symbol=_MOE + "unquantized_fused_moe_method:UnquantizedFusedMoEMethod.apply_monolithic",
        action="replace",
        profiles=_CPU,
        replacement=_ROLLOUT + "monolithic_experts",
        versions=_MONOLITHIC,
        reason="exact routing and experts (until 0.28 one call did both on CPU)",
        consequence="every token's log-probability differs from the replay",
        until="vLLM 0.30, where CPU experts became modular",
    ),
    Patch(
        symbol=_MOE + "runner.moe_runner:MoERunner._maybe_reduce_final_output",
        action="replace",
        profiles=_CPU,
        replacement=_ROLLOUT + "reduce_expert_output_0_26",
        versions=">=0.26,<0.27",
        reason="ranks combined in order in float32, then one rounding",
        consequence="the experts' sum is added in another order for every tensor-parallel size",
        until="vLLM 0.27, where the method grew an argument",
    ),
    Patch(
        symbol=_MOE + "runner.moe_runner:MoERunner._maybe_reduce_final_output",
        action="replace",
        profiles=_CPU,
        replacement=_ROLLOUT + "reduce_expert_output",
        versions=">=0.27,<0.34",
        reason="ranks combined in order in float32, then one rounding",
        consequence="the experts' sum is added in another order for every tensor-parallel size",
        until=_UNTIL_UPSTREAM,
    ),
)

_TRANSFORMERS = ">=5.17,<5.24"

_trainer = (
    Patch(
        symbol=_HF + "Qwen3MoeRMSNorm.forward",
        action="replace",
        profiles=_CPU,
        replacement=_TRAINER + "rms_norm_forward",
        versions=_TRANSFORMERS,
        reason="exact mean of squares",
        consequence="the mean's order depends on the width's vectorisation",
        until=_UNTIL_SHARED,
    ),
    Patch(
        symbol=_HF + "Qwen3MoeAttention.forward",
        action="replace",
        profiles=_CPU,
        replacement=_TRAINER + "attention_forward",
        versions=_TRANSFORMERS,
        reason="exact projections and attention; rotation in float32 from position ids",
        consequence="bits change with padding, packing and micro-batch size; FSDP2 casts "
        "cosines and sines to bf16",
        until=_UNTIL_SHARED,
    ),
    Patch(
        symbol=_HF + "Qwen3MoeTopKRouter.forward",
        action="replace",
        profiles=_CPU,
        replacement=_TRAINER + "router_forward",
        versions=_TRANSFORMERS,
        reason="float32 router logits, stable ties, weights kept in float32",
        consequence="near ties choose other experts than the rollout did",
        until=_UNTIL_SHARED,
    ),
    Patch(
        symbol=_HF + "Qwen3MoeExperts.forward",
        action="replace",
        profiles=_CPU,
        replacement=_TRAINER + "experts_forward",
        versions=_TRANSFORMERS,
        reason="the rollout's roundings and order of combination",
        consequence="every token's log-probability differs from the rollout",
        until=_UNTIL_SHARED,
    ),
    Patch(
        symbol=_HF + "Qwen3MoeForCausalLM.forward",
        action="replace",
        profiles=_CPU,
        replacement=_TRAINER + "causal_lm_forward",
        versions=_TRANSFORMERS,
        reason="float32 logits from the exact product",
        consequence="bf16 logits: every log-probability differs",
        until="transformers has a float32 output layer for this model",
    ),
)

adapter = Adapter(
    name="qwen3_moe",
    rollout=RUNTIME_PATCHES + _rollout + CUDA_ROLLOUT,
    trainer=CHECKPOINT_PATCHES + _trainer + CUDA_TRAINER,
    relies_on=(
        # Called unpatched on the forward path; a change here changes the claim.
        "vllm.model_executor.models.qwen3_moe:Qwen3MoeAttention.forward",
        "vllm.model_executor.models.qwen3_moe:Qwen3MoeDecoderLayer.forward",
        "vllm.model_executor.models.qwen3_moe:Qwen3MoeSparseMoeBlock.forward",
        "vllm.model_executor.models.qwen3_moe:Qwen3MoeModel.forward",
        "vllm.model_executor.models.qwen3_moe:Qwen3MoeForCausalLM.compute_logits",
        "vllm.v1.sample.sampler:Sampler.forward",
        "transformers.models.qwen3_moe.modeling_qwen3_moe:Qwen3MoeDecoderLayer.forward",
        "transformers.models.qwen3_moe.modeling_qwen3_moe:Qwen3MoeSparseMoeBlock.forward",
        "transformers.models.qwen3_moe.modeling_qwen3_moe:Qwen3MoeModel.forward",
    ),
    reviewed=_HERE / "reviewed.json",
    profiles=_HERE / "profiles",
    default_profile="cpu_tree",
    weight_map="patchkit_adapters.qwen3_moe.weights:weight_map",
    covers="patchkit_adapters.qwen3_moe.coverage:check_model",
    logprobs="patchkit.providers:selected_token_logprobs",
    tiny_model="patchkit_adapters.qwen3_moe.tiny:make_tiny_model",
)
