"""Rollout patches that belong to the runtime, not to a model.

An adapter puts them in front of its own: ``rollout=(*RUNTIME_PATCHES, …)``.
"""

from __future__ import annotations

from patchkit.engine import Patch

__all__ = ["RUNTIME_PATCHES"]

# The versions whose request fields have been decided upon, and the next.
_VERSIONS = ">=0.26,<0.34"

RUNTIME_PATCHES: tuple[Patch, ...] = (
    Patch(
        symbol="vllm.v1.engine.input_processor:InputProcessor.assign_request_id",
        action="wrap",
        versions=_VERSIONS,
        replacement="patchkit.runtime.admission:guard_front_end",
        reason="The last function that every request passes before it leaves the front end, "
        "after defaults were merged into its parameters: the caller gets the refusal.",
        consequence="A request with another temperature, a mask or a bias is sampled from "
        "another distribution than the trainer replays; the ratio hides it.",
        until="vLLM offers a hook that validates final effective requests.",
        required=False,
    ),
    Patch(
        symbol="vllm.v1.engine.core:EngineCore.preprocess_add_request",
        action="wrap",
        versions=_VERSIONS,
        replacement="patchkit.runtime.admission:guard_engine_core",
        reason="The engine's own entrance, whatever front end the request came from.",
        consequence="A front end without patchkit can send what the claim does not cover.",
        until="vLLM offers a hook that validates final effective requests.",
    ),
)
