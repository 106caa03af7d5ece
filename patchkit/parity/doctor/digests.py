"""One number of 64 bits per row: what the doctor keeps instead of tensors.

A row's number is a sum, modulo 2**64, of one term per element; the term mixes the bits
of the element's value with its column. Two rows of equal bits have equal numbers, a
single changed element always changes the number (the mix is a bijection of the
element's bits), and several cancel each other with a chance of about 2**-64.

Values are widened to float32 first (float64 stays), which is exact for every dtype of a
model: the number then says whether *values* agree, and the dtype is compared on its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["matrix_digest", "multiset_digest", "row_digests"]

_GOLDEN = 0x9E3779B97F4A7C15
_ODD_1 = 0xD1342543DE82EF95
_ODD_2 = 0xBF58476D1CE4E5B9
# Elements worked on at a time: the temporaries are integers of eight bytes.
_CHUNK = 1 << 20


def _signed(value: int) -> int:
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


def _bits(values: Tensor) -> Tensor:
    """The bits of each element as int64."""
    if not values.is_floating_point():
        return values.to(torch.int64)
    if values.dtype == torch.float64:
        return values.contiguous().view(torch.int64)
    return values.float().contiguous().view(torch.int32).to(torch.int64)


def row_digests(values_NW: Tensor) -> Tensor:
    """``[N, W]`` (or ``[N, ...]``, flattened) to ``[N]`` int64, on the tensor's device."""
    with torch.no_grad():
        flat = values_NW.detach().flatten(1)
        rows, width = flat.shape
        found = torch.zeros(rows, dtype=torch.int64, device=flat.device)
        if not rows or not width:
            return found
        # Arithmetic wraps modulo 2**64, which is what is wanted.
        columns = torch.arange(1, width + 1, dtype=torch.int64, device=flat.device)
        columns = columns.mul_(_signed(_GOLDEN))
        step = max(1, _CHUNK // width)
        for start in range(0, rows, step):
            z = _bits(flat[start : start + step]) * _signed(_ODD_1)
            z += columns
            z ^= (z >> 32).bitwise_and_(0xFFFFFFFF)  # the mask makes the shift a logical one
            z *= _signed(_ODD_2)
            z ^= (z >> 29).bitwise_and_((1 << 35) - 1)
            found[start : start + step] = z.sum(-1)
        return found


def matrix_digest(weight: Tensor) -> int:
    """Digest of a whole tensor in which every element counts with its place."""
    with torch.no_grad():
        rows = row_digests(weight.detach().reshape(weight.shape[0], -1) if weight.ndim else weight)
        return int(row_digests(rows[None])[0])


def multiset_digest(weight: Tensor) -> int:
    """Digest of a tensor's numbers without their places: equal for every layout of them."""
    with torch.no_grad():
        flat = weight.detach().reshape(-1)
        total = 0
        for start in range(0, flat.numel(), _CHUNK):
            z = _bits(flat[start : start + _CHUNK]) * _signed(_ODD_1)
            z ^= (z >> 32).bitwise_and_(0xFFFFFFFF)
            z *= _signed(_ODD_2)
            z ^= (z >> 29).bitwise_and_((1 << 35) - 1)
            total += int(z.sum())
        return _signed(total)
