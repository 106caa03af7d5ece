"""Patches of vLLM's shared CPU layers, ready for an adapter's ``rollout``.

A replaced method serves every layer of its class in the process, so each
replacement first checks that the layer is of the kind that it covers and refuses
it by name otherwise. Signatures follow vLLM 0.32; where a version differs, the
declaration says so.

>>> from patchkit.bindings import vllm_cpu
>>> rollout = RUNTIME_PATCHES + vllm_cpu.DENSE           # doctest: +SKIP

All of them belong to the profile ``cpu_tree``; :func:`in_profiles` gives them to
others.
"""

from __future__ import annotations

from patchkit.bindings.vllm_cpu._declarations import (
    ACTIVATION,
    ATTENTION,
    DECODER,
    DENSE,
    EXPERTS,
    EXPERTS_OUTPUT,
    GATE,
    GROUPED_ROUTER,
    LINEAR,
    LM_HEAD,
    LOGPROBS,
    MOE,
    NORM,
    PROFILE,
    ROTARY,
    ROUTER,
    SHARED_EXPERTS_OUTPUT,
    SHARED_MOE,
    in_profiles,
)
from patchkit.bindings.vllm_cpu._modules import (
    DECODER_MODULES,
    EXPERT_MODULES,
    MLP_MODULES,
    SHARED_EXPERT_MODULES,
    stock,
)

WEIGHT_MAP = "patchkit.bindings.vllm_cpu.weights:weight_map"

__all__ = [
    "ACTIVATION",
    "ATTENTION",
    "DECODER",
    "DECODER_MODULES",
    "DENSE",
    "EXPERTS",
    "EXPERTS_OUTPUT",
    "EXPERT_MODULES",
    "GATE",
    "GROUPED_ROUTER",
    "LINEAR",
    "LM_HEAD",
    "LOGPROBS",
    "MLP_MODULES",
    "MOE",
    "NORM",
    "PROFILE",
    "ROTARY",
    "ROUTER",
    "SHARED_EXPERTS_OUTPUT",
    "SHARED_EXPERT_MODULES",
    "SHARED_MOE",
    "WEIGHT_MAP",
    "in_profiles",
    "stock",
]
