"""A Qwen3 model small enough for two CPU cores and sharp enough to be a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from patchkit.bindings.tiny import DECODER, write_tiny_model

SHAPE: dict[str, Any] = {
    **DECODER,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}


def make_tiny_model(folder: Path, *, seed: int = 1, **changes: Any) -> Path:
    """Write a checkpoint with random bf16 weights.

    Args:
        folder: Where to; created.
        seed: Of the weights.
        changes: Settings that differ from :data:`SHAPE`.
    """
    from transformers import Qwen3ForCausalLM

    return write_tiny_model(folder, Qwen3ForCausalLM, {**SHAPE, **changes}, seed=seed)
