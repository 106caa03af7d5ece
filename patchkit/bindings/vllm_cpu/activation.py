"""Activations of vLLM's dense layers."""

from __future__ import annotations

from torch import Tensor

from patchkit import providers


def silu_and_mul_forward(x: Tensor) -> Tensor:
    """``SiluAndMul.forward_native``: one rounding, bits that do not depend on strides."""
    return providers.silu_mul(x)
