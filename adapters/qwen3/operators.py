"""The shapes at which Qwen3's operators go through the conformance kit."""

from __future__ import annotations

from collections.abc import Iterator

from patchkit.bindings.operators import Operator, Operators, Shape

# The demo's model, and Qwen3-8B.
TINY = Shape(
    hidden=128, dense_width=256, vocabulary=512,
    heads=4, kv_heads=2, head_size=32, max_position=2048,
)  # fmt: skip
REAL = Shape(
    hidden=4096, dense_width=12_288, vocabulary=151_936,
    heads=32, kv_heads=8, head_size=128, max_position=40_960,
)  # fmt: skip


def operators() -> Iterator[Operator]:
    """Every operator on the forward path, small."""
    return Operators(shape=TINY, row_counts=(1, 2, 7, 33)).all(context=70, requests=(70, 1, 33))
