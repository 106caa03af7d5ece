"""Qwen3-MoE: vLLM rollout and Hugging Face FSDP replay with equal bits.

Importing this package imports neither torch, vLLM nor transformers: the
declarations name their replacements by reference. What each operator agrees on
stands in the table of ``README.md`` beside this file.
"""

from __future__ import annotations

from pathlib import Path

from patchkit.bindings import transformers as hf
from patchkit.bindings import vllm_cpu
from patchkit.engine import Adapter
from patchkit.parity.checkpointing import CHECKPOINT_PATCHES
from patchkit.runtime.patches import RUNTIME_PATCHES
from patchkit_adapters.qwen3_moe.cuda import CUDA_ROLLOUT, CUDA_TRAINER

_HERE = Path(__file__).parent
_HF = "transformers.models.qwen3_moe.modeling_qwen3_moe"
_VLLM = "vllm.model_executor.models.qwen3_moe:Qwen3Moe"

adapter = Adapter(
    name="qwen3_moe",
    rollout=RUNTIME_PATCHES + vllm_cpu.MOE + CUDA_ROLLOUT,
    trainer=CHECKPOINT_PATCHES + hf.softmax_moe(_HF, "Qwen3Moe") + CUDA_TRAINER,
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
    modules=vllm_cpu.DECODER_MODULES
    + vllm_cpu.EXPERT_MODULES
    + vllm_cpu.stock(
        *(_VLLM + name for name in ("ForCausalLM", "Model", "DecoderLayer", "Attention")),
        _VLLM + "SparseMoeBlock",
    )
    + hf.softmax_moe_modules(_HF, "Qwen3Moe"),
    reviewed=_HERE / "reviewed.json",
    profiles=_HERE / "profiles",
    default_profile="cpu_tree",
    weight_map=vllm_cpu.WEIGHT_MAP,
    covers="patchkit_adapters.qwen3_moe.coverage:check_model",
    logprobs="patchkit_adapters.qwen3_moe.logprobs:selected_token_logprobs",
    tiny_model="patchkit_adapters.qwen3_moe.tiny:make_tiny_model",
    operators="patchkit_adapters.qwen3_moe.operators:operators",
)
