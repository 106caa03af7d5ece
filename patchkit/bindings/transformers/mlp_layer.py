"""Feed-forward layers of transformers models.

Shapes: T tokens, H hidden width, F intermediate width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from patchkit import providers
from patchkit.bindings.claim import TREE_CHUNKS, refuse_unless


def gated_mlp(mlp: Any, x: Tensor) -> Tensor:
    """``down(silu(gate(x)) * up(x))``, the last product float32 and not rounded yet."""
    activation = getattr(getattr(mlp, "config", None), "hidden_act", "silu")
    layers = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    refuse_unless(
        mlp,
        hidden_act=(activation, "silu"),
        bias=(any(layer.bias is not None for layer in layers), False),
    )
    gate, up = (providers.linear(x, layer.weight).to(x.dtype) for layer in layers[:2])
    hidden = providers.silu_mul(torch.cat([gate, up], dim=-1))
    return providers.linear(hidden, mlp.down_proj.weight, chunks=TREE_CHUNKS)


def gated_mlp_forward(self: Any, x: Tensor) -> Tensor:
    """``MLP.forward``: the rollout's roundings, slices of the down projection as a tree."""
    return gated_mlp(self, x).to(x.dtype)
