"""Qwen3 (dense): vLLM rollout and Hugging Face FSDP replay with equal bits.

Importing this package imports neither torch, vLLM nor transformers. It writes no
operator of its own: everything is shared with the other adapters.
"""

from __future__ import annotations

from pathlib import Path

from patchkit.bindings import transformers as hf
from patchkit.bindings import vllm_cpu
from patchkit.engine import Adapter
from patchkit.parity.checkpointing import CHECKPOINT_PATCHES
from patchkit.runtime.patches import RUNTIME_PATCHES

_HERE = Path(__file__).parent
_HF = "transformers.models.qwen3.modeling_qwen3"
_VLLM = "vllm.model_executor.models."

adapter = Adapter(
    name="qwen3",
    rollout=RUNTIME_PATCHES + vllm_cpu.DENSE,
    trainer=CHECKPOINT_PATCHES + hf.dense(_HF, "Qwen3"),
    relies_on=(
        # Called unpatched on the forward path; a change here changes the claim.
        _VLLM + "qwen3:Qwen3Attention.forward",
        _VLLM + "qwen3:Qwen3DecoderLayer.forward",
        _VLLM + "qwen3:Qwen3ForCausalLM.compute_logits",
        _VLLM + "qwen2:Qwen2Model.forward",
        _VLLM + "qwen2:Qwen2MLP.forward",
        "vllm.v1.sample.sampler:Sampler.forward",
        f"{_HF}:Qwen3DecoderLayer.forward",
        f"{_HF}:Qwen3Model.forward",
    ),
    modules=vllm_cpu.DECODER_MODULES
    + vllm_cpu.MLP_MODULES
    + vllm_cpu.stock(
        *(_VLLM + "qwen3:Qwen3" + n for n in ("ForCausalLM", "Model", "DecoderLayer", "Attention")),
        _VLLM + "qwen2:Qwen2MLP",
    )
    + hf.dense_modules(_HF, "Qwen3"),
    reviewed=_HERE / "reviewed.json",
    profiles=_HERE / "profiles",
    default_profile="cpu_tree",
    weight_map=vllm_cpu.WEIGHT_MAP,
    covers="patchkit_adapters.qwen3.coverage:check_model",
    logprobs="patchkit.providers:selected_token_logprobs",
    tiny_model="patchkit_adapters.qwen3.tiny:make_tiny_model",
    operators="patchkit_adapters.qwen3.operators:operators",
)
