"""A checkpoint with random weights in the layer shape of Qwen3-30B-A3B."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def configuration(layers: int) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        dtype="bfloat16",
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.02,
    )


def spread(name: str) -> tuple[float, float]:
    """Mean and standard deviation of a parameter, so that roundings and routing matter."""
    if "norm" in name:
        return 1.0, 0.2
    if "embed_tokens" in name:
        return 0.0, 0.2  # a residual stream of realistic size
    if "gate.weight" in name or "lm_head" in name:
        return 0.0, 0.04
    return 0.0, 0.02


def has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


def make(folder: Path, layers: int, *, weights: bool = True, seed: int = 0) -> None:
    """Write it; without weights, whoever builds the model draws them."""
    import torch
    from transformers import Qwen3MoeForCausalLM

    if not weights:
        configuration(layers).save_pretrained(folder)
        return
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen3MoeForCausalLM(configuration(layers))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(*spread(name))
    model.save_pretrained(folder, max_shard_size="20GB")
