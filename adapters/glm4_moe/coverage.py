"""What the GLM-4.5 claim covers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from patchkit.bindings import settings
from patchkit.errors import Violation


def _grouped_experts(config: Mapping[str, Any]) -> Iterator[settings.Setting]:
    """Groups of equal size; shared experts beside the routed ones, in every such layer."""
    experts = settings.value(config, "n_routed_experts", 0)
    groups = settings.value(config, "n_group", 1)
    kept = settings.value(config, "topk_group", 1)
    size = experts // max(1, groups)
    yield settings.Setting(
        name="n_group",
        found=groups,
        covered=f"a divisor of n_routed_experts ({experts}) with two experts a group",
        ok=groups > 0 and experts % groups == 0 and size >= 2,
    )
    yield settings.Setting(
        name="topk_group",
        found=kept,
        covered="as many groups as hold num_experts_per_tok experts",
        ok=0 < kept <= groups and kept * size >= settings.value(config, "num_experts_per_tok", 0),
    )
    shared = settings.value(config, "n_shared_experts", 0)
    yield settings.Setting(
        name="n_shared_experts", found=shared, covered="at least 1", ok=shared >= 1
    )
    width = shared * settings.value(config, "moe_intermediate_size", 0)
    yield settings.chunked("n_shared_experts * moe_intermediate_size", width)


def _partial_rotation(config: Mapping[str, Any]) -> Iterator[settings.Setting]:
    size = settings.value(config, "head_dim") or settings.value(config, "hidden_size", 0) // max(
        1, settings.value(config, "num_attention_heads", 0)
    )
    factor = settings.rope(config).get(
        "partial_rotary_factor", settings.value(config, "partial_rotary_factor", 0.5)
    )
    turned = int(size * factor)
    yield settings.Setting(
        name="partial_rotary_factor",
        found=factor,
        covered=f"an even part of head_dim ({size})",
        ok=0 < turned <= size and turned % 2 == 0,
    )


def _own_output_layer(config: Mapping[str, Any]) -> Iterator[settings.Setting]:
    """vLLM builds one of its own, tied or not, and would leave it as memory was."""
    yield settings.only(config, "tie_word_embeddings", False)


RULES = (
    settings.model_type("glm4_moe"),
    settings.decoder,
    settings.gated_mlp,
    settings.experts("n_routed_experts"),
    _grouped_experts,
    _partial_rotation,
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
