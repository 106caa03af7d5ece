"""The shape at which the operators go through the conformance kit."""

from __future__ import annotations

from collections.abc import Iterator

from patchkit.bindings.operators import Operator, Operators, Shape

# That of the tiny model.
TINY = Shape(
    hidden=128,
    vocabulary=512,
    heads=4,
    kv_heads=2,
    head_size=32,
    max_position=2048,
    qk_norm=False,
    dense_width=256,
)


def operators() -> Iterator[Operator]:
    """Every operator on the forward path, small."""
    return Operators(shape=TINY, row_counts=(1, 2, 7, 33)).all(context=70, requests=(70, 1, 33))
