"""What every binding promises, and how it refuses a layer outside of the promise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from patchkit.errors import PatchkitError

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
            f"{self.layer}: not covered by the exact operators ({listed}). "
            "Run this model without the adapter, or use an adapter that covers it"
        )


def refuse_unless(layer: object, /, **required: tuple[Any, Any]) -> None:
    """Raise when a layer has a feature outside the claim: ``name=(found, expected)``."""
    wrong = {name: pair for name, pair in required.items() if pair[0] != pair[1]}
    if wrong:
        raise UncoveredLayerError(type(layer).__name__, wrong)


def plain(setting: Any) -> Any:
    """An enum member's value; vLLM uses enums and strings for the same settings."""
    return getattr(setting, "value", setting)


def chunks_per_rank(layer: object, tp_size: int) -> int:
    """Slices of K that one tensor-parallel rank holds."""
    if TREE_CHUNKS % tp_size:
        raise UncoveredLayerError(
            type(layer).__name__, {"tp_size": (tp_size, f"a divisor of {TREE_CHUNKS}")}
        )
    return TREE_CHUNKS // tp_size
