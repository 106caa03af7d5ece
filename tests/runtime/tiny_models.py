"""Small checkpoints of several architectures, random and sharp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {
    "vocab_size": 500,  # no multiple of vLLM's padding
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.12,
}


def write_tiny(kind: str, folder: Path, *, seed: int = 1, scale: float = 1.0) -> Path:
    """Write a checkpoint: ``llama`` (tied embeddings), ``qwen2``, or ``qwen3_moe``."""
    if kind == "qwen3_moe":
        from patchkit_adapters.qwen3_moe.tiny import make_tiny_model

        return make_tiny_model(folder, seed=seed)
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    model: Any
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder
