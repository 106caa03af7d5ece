"""A model of this architecture, small enough for two CPU cores and sharp enough to be a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from patchkit.bindings.tiny import DECODER, write_tiny_model

SHAPE: dict[str, Any] = {
    **DECODER,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_type": "default", "rope_theta": 130000},
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
}


def _adjust(name: str, tensor: Any) -> Any:
    """Biases that do something: a fresh model's are zero."""
    import torch

    return 0.1 * torch.randn_like(tensor) if name.endswith(".bias") else None


def make_tiny_model(folder: Path, *, seed: int = 1, **changes: Any) -> Path:
    """Write a checkpoint with random bf16 weights.

    Args:
        folder: Where to; created.
        seed: Of the weights.
        changes: Settings that differ from :data:`SHAPE`.
    """
    from transformers import LlamaForCausalLM

    settings = {**SHAPE, **changes}
    return write_tiny_model(folder, LlamaForCausalLM, settings, seed=seed, adjust=_adjust)
