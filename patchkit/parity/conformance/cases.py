"""The cases, as tables.

Row counts lie at and around the sizes at which kernels change: one row, a few,
a tile less one, a tile, a tile and one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ROW_COUNTS = (1, 2, 3, 7, 31, 32, 33, 255, 256, 257)
MANY_ROWS = (*ROW_COUNTS, 1024)

THREAD_COUNTS = (1, 2)
TENSOR_PARALLEL = (1, 2, 4)

# How a prompt may be cut: sizes of the pieces, in turn, repeated to the end.
SPLITS: dict[str, tuple[int, ...]] = {
    "1 at a time, then 7": (1, 1, 1, 7),
    "odd pieces": (13, 1, 31, 3),
    "pieces of 33": (33,),
    "all but one, then one": (-1, 1),
}


def cuts(length: int, sizes: tuple[int, ...]) -> list[slice]:
    """Slices that cover ``length`` rows; a negative size means that many fewer than the rest."""
    pieces, start, turn = [], 0, 0
    while start < length:
        size = sizes[turn % len(sizes)]
        size = max(1, length - start + size) if size < 0 else size
        pieces.append(slice(start, min(length, start + size)))
        start, turn = pieces[-1].stop, turn + 1
    return pieces


def _odd_offset(x: Tensor) -> Tensor:
    buffer = x.new_zeros(x.numel() + 3)
    buffer[3:] = x.reshape(-1)
    return buffer[3:].view(x.shape)


def _inside_wider_rows(x: Tensor) -> Tensor:
    buffer = x.new_zeros(*x.shape[:-1], x.shape[-1] + 5)
    buffer[..., 3:-2] = x
    return buffer[..., 3:-2]


def _every_second_column(x: Tensor) -> Tensor:
    buffer = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
    buffer[..., ::2] = x
    return buffer[..., ::2]


def _every_second_row(x: Tensor) -> Tensor:
    buffer = x.new_zeros(2 * x.shape[0], *x.shape[1:])
    buffer[1::2] = x
    return buffer[1::2]


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


# The same values in other memory. Not all of them are contiguous or aligned.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "storage offset 3": _odd_offset,
    "slice of wider rows": _inside_wider_rows,
    "every second column": _every_second_column,
    "every second row": _every_second_row,
    "transposed storage": _transposed,
}

# What may stand in the rows beside the one that counts. A huge neighbour moves
# any scale that is shared over the batch.
NEIGHBOURS: dict[str, float] = {
    "zeros": 0.0,
    "huge": 1e30,
    "tiny": 1e-30,
    "infinity": torch.inf,
    "NaN": torch.nan,
}
