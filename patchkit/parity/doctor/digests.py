"""One number of 64 bits per row: what the doctor keeps instead of tensors.

A row's number is ``sum(bits * factor)`` modulo 2**64, with a fixed odd factor of 64 random
bits for every column. A single changed element always changes it (an odd factor maps
different bits to different terms); several cancel each other with a chance of about
2**-62, or 2**-46 between rows of bf16 numbers, whose lower 16 bits are zero. It is one
multiplication and one addition per element: measured, mixing the bits better costs ten
to forty times as much.

Values are widened to float32 first (float64 stays), which is exact for every dtype of a
model: the number then says whether *values* agree, and the dtype is compared on its own.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["matrix_digest", "multiset_digest", "row_digests"]

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
# Elements worked on at a time: the temporaries are integers of eight bytes.
_CHUNK = 1 << 20


def _signed(value: int) -> int:
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


def _mixed(z: Tensor) -> Tensor:
    """Every bit of the result depends on every bit of ``z`` (splitmix64); works in place."""
    z ^= (z >> 30).bitwise_and_((1 << 34) - 1)  # the mask makes the shift a logical one
    z *= _signed(_MIX_1)
    z ^= (z >> 27).bitwise_and_((1 << 37) - 1)
    z *= _signed(_MIX_2)
    z ^= (z >> 31).bitwise_and_((1 << 33) - 1)
    return z


@lru_cache(maxsize=256)
def _factors(width: int, device: torch.device) -> Tensor:
    # A tensor made under inference mode would be of no use outside of it.
    with torch.inference_mode(False), torch.no_grad():
        column = torch.arange(1, width + 1, dtype=torch.int64)
        return _mixed(column * _signed(_GOLDEN)).bitwise_or_(1).to(device)


def _bits(values: Tensor) -> Tensor:
    """The bits of each element as int64."""
    if not values.is_floating_point():
        return values.to(torch.int64)
    if values.dtype == torch.float64:
        return values.contiguous().view(torch.int64)
    return values.float().contiguous().view(torch.int32).to(torch.int64)


def row_digests(values_NW: Tensor, *, first_column: int = 0) -> Tensor:
    """``[N, W]`` (or ``[N, ...]``, flattened) to ``[N]`` int64, on the tensor's device.

    Digests of a row's parts add up to the row's, if each part says which column of the
    whole row it begins with: so shards are recorded where they are.
    """
    with torch.no_grad():
        flat = values_NW.detach().flatten(1)
        rows, width = flat.shape
        found = torch.zeros(rows, dtype=torch.int64, device=flat.device)
        if not rows or not width:
            return found
        factors = _factors(first_column + width, flat.device)[first_column:]
        step = max(1, _CHUNK // width)
        for start in range(0, rows, step):
            # Wraps modulo 2**64, which is the arithmetic wanted.
            found[start : start + step] = (_bits(flat[start : start + step]) * factors).sum(-1)
        return found


def matrix_digest(weight: Tensor) -> int:
    """Digest of a whole tensor in which every element counts with its place."""
    with torch.no_grad():
        rows = row_digests(weight.detach().reshape(weight.shape[0], -1) if weight.ndim else weight)
        # Mixed in between: a sum of sums would not tell an element's row from its column.
        return int(row_digests(_mixed(rows)[None])[0])


def multiset_digest(weight: Tensor) -> int:
    """Digest of a tensor's numbers without their places: equal for every layout of them."""
    with torch.no_grad():
        flat = weight.detach().reshape(-1)
        total = 0
        for start in range(0, flat.numel(), _CHUNK):
            bits = _bits(flat[start : start + _CHUNK]).clone()
            total += int(_mixed(bits.mul_(_signed(_GOLDEN))).sum())
        return _signed(total)
