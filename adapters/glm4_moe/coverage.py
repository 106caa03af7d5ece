"""What the GLM-4.5 claim covers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from patchkit.bindings import settings
from patchkit.errors import Violation


def _own_output_layer(config: Mapping[str, Any]) -> Iterator[settings.Setting]:
    """vLLM builds one of its own, tied or not, and would leave it as memory was."""
    yield settings.only(config, "tie_word_embeddings", False)


RULES = (
    settings.model_type("glm4_moe"),
    settings.decoder,
    settings.gated_mlp,
    settings.experts("n_routed_experts"),
    settings.grouped_experts,
    settings.partial_rotation,
    _own_output_layer,
)


def check_model(config: Mapping[str, Any], *, rollout_tensor: int = 1) -> list[Violation]:
    """Compare a Hugging Face ``config.json`` with what the adapter covers.

    ``attention_bias`` and ``use_qk_norm`` may be either. Layers for multi-token
    prediction are not loaded on either side.

    Args:
        config: The file's content.
        rollout_tensor: Tensor-parallel size of the rollout side.

    Returns:
        Every setting that is not covered; empty when the model is covered.
    """
    return settings.check("glm4_moe", config, RULES, rollout_tensor=rollout_tensor)
