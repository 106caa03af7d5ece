"""Rotary position embedding, NeoX halves.

Agreed roundings: angles, cosines and sines in float32 (vLLM caches them in
bf16), the rotation in float32 with one rounding to the stream's dtype.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=16)
def _cos_sin_table(
    rotary_dim: int, base: float, length: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines for positions 0 to length-1: two ``[length, rotary_dim/2]`` float32.

    Computed once for all positions, so that a position's bits cannot depend on
    which positions were asked for together, and on the CPU whatever the device,
    so that they cannot depend on that either.
    """
    # Tensors made under inference mode could not be saved for backward later.
    with torch.inference_mode(False), torch.no_grad():
        exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        inverse_frequency = 1.0 / (base**exponent)
        angle = torch.arange(length, dtype=torch.float32)[:, None] * inverse_frequency[None, :]
        return angle.cos().to(device), angle.sin().to(device)


def rotate(
    x_THD: Tensor,
    positions_T: Tensor,
    *,
    base: float,
    max_position: int,
    rotary_dim: int | None = None,
) -> Tensor:
    """Rotate every head by its token's absolute position.

    Args:
        x_THD: ``[T, H, D]`` queries or keys.
        positions_T: ``[T]`` integer positions, below ``max_position``.
        base: ``rope_theta``.
        max_position: ``max_position_embeddings``; decides the table's length.
        rotary_dim: How many of the first elements of each head are rotated; even.
            The rest passes through. All of them if None.

    Returns:
        ``[T, H, D]`` in the dtype of ``x_THD``.

    Source: Su et al., "RoFormer" (arXiv 2104.09864), in the half-split form of
    ``transformers`` ``rotate_half``.
    """
    size = x_THD.shape[-1]
    rotary_dim = size if rotary_dim is None else rotary_dim
    if rotary_dim % 2 or not 0 < rotary_dim <= size:
        raise ValueError(
            f"rotate: rotary_dim = {rotary_dim} is not an even number up to the head size {size}"
        )
    half = rotary_dim // 2
    cos, sin = _cos_sin_table(2 * half, float(base), int(max_position), x_THD.device)
    cos_T1d = cos[positions_T][:, None, :]
    sin_T1d = sin[positions_T][:, None, :]
    x = x_THD.float()
    first, second, rest = x[..., :half], x[..., half:rotary_dim], x[..., rotary_dim:]
    turned = torch.cat(
        [first * cos_T1d - second * sin_T1d, second * cos_T1d + first * sin_T1d, rest], dim=-1
    )
    return turned.to(x_THD.dtype)
