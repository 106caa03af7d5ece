"""GLM-4.5 (glm4_moe): vLLM rollout and Hugging Face FSDP replay with equal bits.

What it has and Qwen3-MoE has not: a sigmoid router with a correction bias and
groups, shared experts, dense layers before the routed ones, rotation of a part of
each head, biases of the query, key and value projections. Importing this package
imports neither torch, vLLM nor transformers.
"""

from __future__ import annotations

from pathlib import Path

from patchkit.bindings import transformers as hf
from patchkit.bindings import vllm_cpu
from patchkit.engine import Adapter
from patchkit.parity.checkpointing import CHECKPOINT_PATCHES
from patchkit.runtime.patches import RUNTIME_PATCHES

_HERE = Path(__file__).parent
_HF = "transformers.models.glm4_moe.modeling_glm4_moe"
_VLLM = "vllm.model_executor.models.glm4_moe:Glm4"

adapter = Adapter(
    name="glm4_moe",
    rollout=RUNTIME_PATCHES + vllm_cpu.SHARED_MOE,
    # Before 5.19, the causal model returns another kind of output.
    trainer=CHECKPOINT_PATCHES + hf.grouped_moe(_HF, "Glm4Moe", since="5.19"),
    relies_on=(
        # Called unpatched on the forward path; a change here changes the claim.
        _VLLM + "MoeAttention.forward",
        _VLLM + "MoeDecoderLayer.forward",
        _VLLM + "MoeMLP.forward",
        _VLLM + "MoE.__init__",
        _VLLM + "MoE.forward",
        _VLLM + "MoeModel.forward",
        _VLLM + "MoeForCausalLM.compute_logits",
        "vllm.model_executor.layers.fused_moe.router.gate_linear:GateLinear.forward",
        "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner.forward",
        "vllm.model_executor.layers.fused_moe.runner.shared_experts:SharedExperts.forward",
        "vllm.v1.sample.sampler:Sampler.forward",
        f"{_HF}:Glm4MoeDecoderLayer.forward",
        f"{_HF}:Glm4MoeModel.forward",
    ),
    modules=vllm_cpu.DECODER_MODULES
    + vllm_cpu.MLP_MODULES
    + vllm_cpu.SHARED_EXPERT_MODULES
    + vllm_cpu.stock(
        *(_VLLM + name for name in ("MoeForCausalLM", "MoeModel", "MoeDecoderLayer")),
        *(_VLLM + name for name in ("MoeAttention", "MoeMLP", "MoE")),
    )
    + hf.grouped_moe_modules(_HF, "Glm4Moe"),
    reviewed=_HERE / "reviewed.json",
    profiles=_HERE / "profiles",
    default_profile="cpu_tree",
    weight_map=vllm_cpu.WEIGHT_MAP,
    covers="patchkit_adapters.glm4_moe.coverage:check_model",
    logprobs="patchkit.providers:selected_token_logprobs",
    tiny_model="patchkit_adapters.glm4_moe.tiny:make_tiny_model",
    operators="patchkit_adapters.glm4_moe.operators:operators",
)
