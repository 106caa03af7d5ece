"""What the Qwen3 claim covers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from patchkit.bindings import settings
from patchkit.errors import Violation

RULES = (
    settings.model_type("qwen3"),
    settings.decoder,
    settings.no_attention_bias,
    settings.no_sliding_window,
    settings.gated_mlp,
)


def check_model(config: Mapping[str, Any], *, rollout_tensor: int = 1) -> list[Violation]:
    """Compare a Hugging Face ``config.json`` with what the adapter covers.

    ``tie_word_embeddings`` may be either: the output layer reads the same weight
    on both sides.

    Args:
        config: The file's content.
        rollout_tensor: Tensor-parallel size of the rollout side.

    Returns:
        Every setting that is not covered; empty when the model is covered.
    """
    return settings.check("qwen3", config, RULES, rollout_tensor=rollout_tensor)
