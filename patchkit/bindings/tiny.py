"""Checkpoints small enough for two CPU cores and sharp enough to be a test.

Random weights with a large spread: routing and softmax far from uniform, so that
one different bit anywhere shows in the log-probabilities of the next tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# What the tiny models of all families have in common; the demo needs 320 positions.
DECODER: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.12,
}


def write_tiny_model(
    folder: Path,
    model_class: Any,
    settings: Mapping[str, Any],
    *,
    seed: int,
    adjust: Callable[[str, Any], Any] | None = None,
) -> Path:
    """Write a checkpoint with random bf16 weights.

    Args:
        folder: Where to; created.
        model_class: The causal model's class in transformers.
        settings: Of its configuration.
        seed: Of the weights.
        adjust: ``adjust(name, tensor)`` gives a parameter or a saved buffer another
            value, or None to leave it; norms are spread around one in any case.

    Returns:
        ``folder``.
    """
    import torch

    def value(name: str, tensor: Any) -> Any:
        chosen = adjust(name, tensor) if adjust else None
        if chosen is None and "norm" in name:
            return 1 + 0.2 * torch.randn_like(tensor)
        return chosen

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(model_class.config_class(**settings))
        with torch.no_grad():
            for name, tensor in model.state_dict(keep_vars=True).items():
                if (chosen := value(name, tensor)) is not None:
                    tensor.copy_(chosen)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    return Path(folder)
