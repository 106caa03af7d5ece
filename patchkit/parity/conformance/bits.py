"""Where two tensors first differ, by bit pattern."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _as_integers(x: Tensor) -> Tensor:
    if x.dtype.is_complex:
        x = torch.view_as_real(x)
    return x.contiguous().view(_INTEGER_OF_SIZE[x.element_size()])


def bit_pattern(x: Tensor) -> str:
    """Bits of a one-element tensor, as ``0x…`` with its full width."""
    size = x.element_size()
    number = int(_as_integers(x.detach().cpu().reshape(1))[0])
    return f"0x{number % (1 << 8 * size):0{2 * size}x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first element at which two tensors differ.

    Attributes:
        index: Its index, the same in both.
        expected: Value of the first tensor, as text.
        found: Value of the second.
        expected_bits: Its bit pattern.
        found_bits: That of the second.
        differing: Elements that differ in all.
        compared: Elements compared.
    """

    index: tuple[int, ...]
    expected: str
    found: str
    expected_bits: str
    found_bits: str
    differing: int
    compared: int


def first_difference(expected: Tensor, found: Tensor) -> Difference | None:
    """Compare bit patterns: ``-0.0`` is not ``0.0``, and a NaN equals only its own bits.

    Raises:
        ValueError: Shapes or dtypes differ; there is nothing to compare then.
    """
    if expected.shape != found.shape or expected.dtype != found.dtype:
        raise ValueError(
            f"cannot compare {expected.dtype} {list(expected.shape)} "
            f"with {found.dtype} {list(found.shape)}: make shape and dtype equal first"
        )
    expected, found = expected.detach(), found.detach().to(expected.device)
    unequal = _as_integers(expected) != _as_integers(found)
    count = int(unequal.sum())
    if not count:
        return None
    flat = int(unequal.reshape(-1).to(torch.uint8).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), unequal.shape))
    a, b = expected[index], found[index]
    return Difference(
        index=index,
        expected=repr(a.item()),
        found=repr(b.item()),
        expected_bits=bit_pattern(a),
        found_bits=bit_pattern(b),
        differing=count,
        compared=unequal.numel(),
    )
