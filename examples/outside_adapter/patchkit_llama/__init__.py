"""LlamaForCausalLM: vLLM rollout and Hugging Face FSDP replay with equal bits.

Importing this package imports neither torch, vLLM nor transformers.
"""

from __future__ import annotations

from pathlib import Path

from patchkit.bindings import transformers as hf
from patchkit.bindings import vllm_cpu
from patchkit.engine import Adapter
from patchkit.parity.checkpointing import CHECKPOINT_PATCHES
from patchkit.runtime.patches import RUNTIME_PATCHES

_HERE = Path(__file__).parent
_HF = "transformers.models.llama.modeling_llama"

adapter = Adapter(
    name="llama",
    rollout=RUNTIME_PATCHES + vllm_cpu.DENSE,
    trainer=(
        *CHECKPOINT_PATCHES,
        *hf.rms_norm(_HF, "LlamaRMSNorm"),
        *hf.attention(
            _HF,
            "LlamaAttention",
            replacement="patchkit_llama.trainer:attention_forward_5_17",
            versions=">=5.17,<5.24",
        ),
        *hf.gated_mlp(_HF, "LlamaMLP"),
        *hf.causal_lm(_HF, "LlamaForCausalLM"),
    ),
    relies_on=(
        # Called unpatched on the forward path; a change here changes the claim.
        "vllm.model_executor.models.llama:LlamaForCausalLM.forward",
        "vllm.model_executor.models.llama:LlamaForCausalLM.compute_logits",
        "vllm.model_executor.models.llama:LlamaDecoderLayer.forward",
        "vllm.model_executor.models.llama:LlamaAttention.forward",
        "vllm.model_executor.models.llama:LlamaMLP.forward",
        "vllm.model_executor.models.llama:LlamaModel.forward",
        "vllm.model_executor.layers.fusion.fused_act_quant:maybe_fused_act_quant",
        "vllm.v1.sample.sampler:Sampler.forward",
        "transformers.models.llama.modeling_llama:LlamaDecoderLayer.forward",
        "transformers.models.llama.modeling_llama:LlamaModel.forward",
        "transformers.models.llama.modeling_llama:LlamaRotaryEmbedding.forward",
    ),
    modules=vllm_cpu.DECODER_MODULES
    + vllm_cpu.MLP_MODULES
    + vllm_cpu.stock(
        "vllm.model_executor.models.llama:LlamaForCausalLM",
        "vllm.model_executor.models.llama:LlamaDecoderLayer",
        "vllm.model_executor.models.llama:LlamaAttention",
        "vllm.model_executor.models.llama:LlamaMLP",
        "vllm.model_executor.models.llama:LlamaModel",
    )
    + hf.dense_modules(_HF, "Llama"),
    reviewed=_HERE / "reviewed.json",
    manifests=(_HERE / "manifests",),
    profiles=_HERE / "profiles",
    default_profile="cpu_tree",
    weight_map=vllm_cpu.WEIGHT_MAP,
    covers="patchkit_llama.coverage:check_model",
    logprobs="patchkit.providers:selected_token_logprobs",
    tiny_model="patchkit_llama.tiny:make_tiny_model",
    operators="patchkit_llama.operators:operators",
)
