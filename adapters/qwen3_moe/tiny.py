"""A Qwen3-MoE model small enough for two CPU cores and sharp enough to be a test.

Random weights with a large spread: routing and softmax far from uniform, so that
one different bit anywhere shows in the log-probabilities of the next tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.12,
}


def make_tiny_model(folder: Path, *, seed: int = 1, **changes: Any) -> Path:
    """Write a checkpoint with random bf16 weights.

    Args:
        folder: Where to; created.
        seed: Of the weights.
        changes: Settings that differ from :data:`SHAPE`.

    Returns:
        ``folder``.
    """
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SHAPE, **changes}))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
    model.to(torch.bfloat16).save_pretrained(folder)
    return Path(folder)
