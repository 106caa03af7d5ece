"""A checkpoint with random weights in the layer shape of Qwen3-30B-A3B."""

from __future__ import annotations

from pathlib import Path


def make(folder: Path, layers: int, seed: int = 0) -> None:
    """Write it; the spread of the weights makes roundings and routing matter."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
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
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            elif "embed_tokens" in name:
                parameter.mul_(10)  # a residual stream of realistic size
            elif "gate.weight" in name or "lm_head" in name:
                parameter.mul_(2)
    model.save_pretrained(folder, max_shard_size="20GB")
