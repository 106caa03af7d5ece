"""A GLM-4.5 model small enough for two CPU cores and sharp enough to be a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from patchkit.bindings.tiny import DECODER, write_tiny_model

# One dense layer, then two of experts in four groups, of which two are kept.
SHAPE: dict[str, Any] = {
    **DECODER,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "attention_bias": True,
    "use_qk_norm": True,
    "num_nextn_predict_layers": 0,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000000.0,
        "partial_rotary_factor": 0.5,
    },
}


def make_tiny_model(folder: Path, *, seed: int = 1, **changes: Any) -> Path:
    """Write a checkpoint with random bf16 weights and a float32 correction bias.

    Args:
        folder: Where to; created.
        seed: Of the weights.
        changes: Settings that differ from :data:`SHAPE`.
    """
    import torch
    from transformers import Glm4MoeForCausalLM

    def spread(name: str, tensor: Any) -> Any:
        # Both start at zero, where neither would be noticed if it were left out.
        if name.endswith("e_score_correction_bias"):
            return 0.2 * torch.randn_like(tensor)
        return 0.3 * torch.randn_like(tensor) if name.endswith("_proj.bias") else None

    return write_tiny_model(
        folder, Glm4MoeForCausalLM, {**SHAPE, **changes}, seed=seed, adjust=spread
    )
