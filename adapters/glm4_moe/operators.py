"""The shapes at which GLM-4.5's operators go through the conformance kit."""

from __future__ import annotations

from collections.abc import Iterator

from patchkit.bindings.operators import Operator, Operators, Shape

# The demo's model, and GLM-4.5-Air.
TINY = Shape(
    hidden=128, dense_width=256, moe_width=64, shared_width=64, experts=8, top_k=2,
    groups=4, kept_groups=2, vocabulary=512, heads=4, kv_heads=2, head_size=32,
    rotary_dim=16, qkv_bias=True, max_position=2048,
)  # fmt: skip
REAL = Shape(
    hidden=4096, dense_width=10_944, moe_width=1408, shared_width=1408, experts=128, top_k=8,
    groups=1, kept_groups=1, vocabulary=151_552, heads=96, kv_heads=8, head_size=128,
    rotary_dim=64, qkv_bias=True, qk_norm=False, max_position=131_072,
)  # fmt: skip


def operators() -> Iterator[Operator]:
    """Every operator on the forward path, small."""
    return Operators(shape=TINY, row_counts=(1, 2, 7, 33)).all(context=70, requests=(70, 1, 33))
