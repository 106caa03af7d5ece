"""A float32 output layer in vLLM, whatever the model.

Trainers compute logits in float32; an engine that rounds them to bf16 moves every
log-probability. vLLM 0.26 and later have an option for it (``head_dtype``), whose bits
depend on the batch on CPU; the operator here has the option's precision without that.
``README.md`` beside this file has the measurements.

Importing this package imports neither torch nor vLLM.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from patchkit.engine import Adapter, Patch
from patchkit.runtime.patches import RUNTIME_PATCHES

_HERE = Path(__file__).parent
_REPLACEMENTS = "patchkit_adapters.fp32_lm_head.rollout:"
_LOGITS = "vllm.model_executor.layers.logits_processor:LogitsProcessor."

PIPELINERL = "pipelinerl_v1"
"""The profile in which requests are judged, too; the patches alone refuse none."""

_patches = (
    Patch(
        symbol=_LOGITS + "_apply_head",
        action="replace",
        versions=">=0.26,<0.34",
        replacement=_REPLACEMENTS + "apply_head",
        depends_on=(_LOGITS + "_get_logits",),
        reason="float32 logits whose bits depend on their own row alone; vLLM's head_dtype "
        "option has the precision, but on CPU its rows change with the batch",
        consequence="bf16 logits (or, with the option, logits that differ in the last bits "
        "between batch sizes): ratios, clip rate and KL carry the rounding",
        until="vLLM's head_dtype=float32 is batch-invariant on every platform",
    ),
    Patch(
        symbol=_LOGITS + "_get_logits",
        action="replace",
        versions=">=0.18,<0.26",
        replacement=_REPLACEMENTS + "get_logits",
        depends_on=(_LOGITS + "_gather_logits",),
        reason="float32 logits where vLLM has no option for them",
        consequence="bf16 logits: ratios, clip rate and KL carry the rounding",
        until="vLLM 0.26, which has the option head_dtype",
    ),
)

adapter = Adapter(
    name="fp32_lm_head",
    rollout=tuple(replace(p, profiles=(PIPELINERL,)) for p in RUNTIME_PATCHES) + _patches,
    reviewed=_HERE / "reviewed.json",
    profiles=_HERE / "profiles",
    operators="patchkit_adapters.fp32_lm_head.operators:operators",
    exercise="patchkit_adapters.fp32_lm_head.exercise:exercise",
)
