"""Rotary embedding of vLLM."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from patchkit import providers
from patchkit.bindings.claim import refuse_unless


def rotary_forward(
    self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """``RotaryEmbedding.forward_cpu``: float32 cosines and sines, one rounding."""
    refuse_unless(
        self,
        type=(type(self).__name__, "RotaryEmbedding"),
        is_neox_style=(self.is_neox_style, True),
    )
    flat_positions = positions.view(-1)

    def rotated(x: Tensor) -> Tensor:
        heads = x.view(flat_positions.numel(), -1, self.head_size)
        return providers.rotate(
            heads,
            flat_positions,
            base=self.base,
            max_position=self.max_position_embeddings,
            rotary_dim=self.rotary_dim,
        ).view(x.shape)

    return rotated(query), None if key is None else rotated(key)
