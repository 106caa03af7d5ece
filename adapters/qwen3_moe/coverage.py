"""What the Qwen3-MoE claim covers, and how the rest is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from patchkit.errors import PatchkitError, Violation

# Slices of K in every row-parallel layer; a tensor-parallel size must divide it.
TREE_CHUNKS = 4


class UncoveredLayerError(PatchkitError):
    """A patched operator met a layer outside the claim.

    Attributes:
        layer: The layer's class.
        features: What differs: name to (found, expected).
    """

    def __init__(self, layer: str, features: Mapping[str, tuple[Any, Any]]) -> None:
        self.layer, self.features = layer, dict(features)
        super().__init__(layer, self.features)

    def __str__(self) -> str:
        listed = "; ".join(
            f"{name} is {found!r}, covered: {expected!r}"
            for name, (found, expected) in self.features.items()
        )
        return (
            f"{self.layer}: not covered by adapter qwen3_moe ({listed}). "
            "Run this model without the adapter, or use an adapter that covers it"
        )


def _expected(config: Mapping[str, Any]) -> list[tuple[str, Any, str, bool]]:
    """Setting, value found, what is covered, whether it is."""

    def get(name: str, default: Any = None) -> Any:
        value = config.get(name, default)
        return default if value is None else value

    rope = get("rope_parameters") or get("rope_scaling") or {}
    # transformers 5 writes the count of experts under its general name.
    experts = get("num_experts", 0) or get("num_local_experts", 0)
    chosen = get("num_experts_per_tok", 0)
    heads, kv_heads = get("num_attention_heads", 0), get("num_key_value_heads", 0)
    head_size = get("head_dim") or (get("hidden_size", 0) // max(1, heads))
    moe_width, attention_width = get("moe_intermediate_size", 0), heads * head_size
    return [
        ("model_type", get("model_type"), "'qwen3_moe'", get("model_type") == "qwen3_moe"),
        (
            "head_dim",
            head_size,
            "an even size up to 8192",
            0 < head_size <= 8192 and head_size % 2 == 0,
        ),
        (
            "num_key_value_heads",
            kv_heads,
            f"a divisor of num_attention_heads ({heads})",
            kv_heads > 0 and heads % kv_heads == 0,
        ),
        (
            "num_attention_heads * head_dim",
            attention_width,
            f"a multiple of {TREE_CHUNKS}",
            attention_width % TREE_CHUNKS == 0,
        ),
        (
            "moe_intermediate_size",
            moe_width,
            f"a multiple of {TREE_CHUNKS}",
            moe_width > 0 and moe_width % TREE_CHUNKS == 0,
        ),
        ("hidden_size", get("hidden_size", 0), "at most 8192", 0 < get("hidden_size", 0) <= 8192),
        ("num_experts", experts, "at least num_experts_per_tok", experts >= chosen > 0),
        (
            "decoder_sparse_step",
            get("decoder_sparse_step", 1),
            "1",
            get("decoder_sparse_step", 1) == 1,
        ),
        ("mlp_only_layers", get("mlp_only_layers", []), "[]", not get("mlp_only_layers", [])),
        ("attention_bias", get("attention_bias", False), "False", not get("attention_bias", False)),
        (
            "attention_dropout",
            get("attention_dropout", 0.0),
            "0.0",
            not get("attention_dropout", 0.0),
        ),
        ("hidden_act", get("hidden_act", "silu"), "'silu'", get("hidden_act", "silu") == "silu"),
        (
            "use_sliding_window",
            get("use_sliding_window", False),
            "False",
            not get("use_sliding_window", False),
        ),
        (
            "rope_type",
            rope.get("rope_type", rope.get("type", "default")),
            "'default'",
            rope.get("rope_type", rope.get("type", "default")) == "default",
        ),
        (
            "shared_expert_intermediate_size",
            get("shared_expert_intermediate_size", 0),
            "absent (no shared experts)",
            not get("shared_expert_intermediate_size", 0),
        ),
        (
            "quantization_config",
            get("quantization_config"),
            "absent",
            get("quantization_config") is None,
        ),
    ]


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
    tree = (
        "tensor-parallel size",
        rollout_tensor,
        f"a divisor of {TREE_CHUNKS}, the slices of the tree",
        rollout_tensor > 0 and TREE_CHUNKS % rollout_tensor == 0,
    )
    return [
        Violation(
            subject=name if name == tree[0] else f"config.{name}",
            problem="not covered by adapter qwen3_moe",
            expected=covered,
            found=repr(found),
            remedy="use a model inside the covered range, or an adapter that covers this one",
        )
        for name, found, covered, ok in (*_expected(config), tree)
        if not ok
    ]
