"""Norms of vLLM."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from patchkit import providers
from patchkit.bindings.claim import refuse_unless


def rms_norm_forward(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    """``RMSNorm.forward_native``: the residual sum is rounded before the norm reads it."""
    refuse_unless(
        self,
        has_weight=(self.has_weight, True),
        variance_size_override=(self.variance_size_override, None),
    )
    weight = self.weight.data
    if residual is None:
        return providers.rms_norm(x, weight, self.variance_epsilon)
    summed = providers.add_residual(x, residual)
    return providers.rms_norm(summed, weight, self.variance_epsilon), summed
