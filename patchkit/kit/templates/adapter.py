"""$architecture: vLLM rollout and Hugging Face FSDP replay with equal bits.

Importing this package imports neither torch, vLLM nor transformers.
"""

from __future__ import annotations

${imports}from pathlib import Path

from patchkit.bindings import transformers as hf
from patchkit.bindings import vllm_cpu
from patchkit.engine import Adapter
from patchkit.parity.checkpointing import CHECKPOINT_PATCHES
from patchkit.runtime.patches import RUNTIME_PATCHES

_HERE = Path(__file__).parent
_HF = "$hf_module"

adapter = Adapter(
    name="$name",
    rollout=RUNTIME_PATCHES + $rollout,
    trainer=$trainer,
    relies_on=(
        # Called unpatched on the forward path; a change here changes the claim.
$relies_on
    ),
$modules    reviewed=_HERE / "reviewed.json",
    manifests=(_HERE / "manifests",),
    profiles=_HERE / "profiles",
    default_profile="cpu_tree",
    weight_map=vllm_cpu.WEIGHT_MAP,
    covers="$package.coverage:check_model",
    logprobs="patchkit.providers:selected_token_logprobs",
    tiny_model="$package.tiny:make_tiny_model",
    operators="$package.operators:operators",
)
