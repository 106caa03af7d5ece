"""What the Qwen3-MoE claim covers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from patchkit.bindings import settings
from patchkit.errors import Violation


def _every_layer_routed(config: Mapping[str, Any]) -> Iterator[settings.Setting]:
    yield settings.only(config, "decoder_sparse_step", 1)
    yield settings.only(config, "mlp_only_layers", [])
    yield settings.only(config, "shared_expert_intermediate_size", 0, "absent (no shared experts)")


RULES = (
    settings.model_type("qwen3_moe"),
    settings.decoder,
    settings.no_attention_bias,
    settings.no_sliding_window,
    # transformers 5 writes the count of experts under its general name.
    settings.experts("num_experts", "num_local_experts"),
    _every_layer_routed,
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
    return settings.check("qwen3_moe", config, RULES, rollout_tensor=rollout_tensor)
