"""Which tokens of a batch form a sequence: what varlen attention needs to know."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Packing:
    """Sequences in a flattened ``[B * S]`` batch.

    Computed once per forward, since finding the boundaries waits for the GPU.

    Attributes:
        starts: ``[sequences + 1]`` int32, cumulative lengths.
        longest: Tokens in the longest sequence.
        rows: Indices of the real tokens in the flattened batch; None where all are.
    """

    starts: Tensor
    longest: int
    rows: Tensor | None = None

    @classmethod
    def of(cls, positions_BS: Tensor, mask_BS: Tensor | None = None) -> Packing:
        """From position ids that restart with every sequence, or from a padding mask.

        Args:
            positions_BS: ``[B, S]`` integer positions. Without a mask, a position
                that is not its left neighbour's plus one starts a sequence.
            mask_BS: ``[B, S]``, nonzero where a token is real: one sequence a row.
        """
        rows = None
        if mask_BS is None:
            fresh = torch.ones_like(positions_BS, dtype=torch.bool)
            fresh[:, 1:] = positions_BS[:, 1:] != positions_BS[:, :-1] + 1
            begin = fresh.flatten().nonzero()[:, 0]
            starts = torch.cat([begin, begin.new_full((1,), positions_BS.numel())])
        else:
            real = mask_BS != 0
            rows = real.flatten().nonzero()[:, 0]
            lengths = real.sum(1)
            starts = torch.cat([lengths.new_zeros(1), lengths[lengths > 0].cumsum(0)])
        longest = int((starts[1:] - starts[:-1]).max())
        return cls(starts.to(torch.int32), longest, rows)

    def gather(self, x: Tensor) -> Tensor:
        """Only the real tokens of ``[B * S, ...]``."""
        return x if self.rows is None else x[self.rows]

    def scatter(self, x: Tensor, tokens: int) -> Tensor:
        """Undo :meth:`gather`; padding becomes zero."""
        if self.rows is None:
            return x
        return x.new_zeros((tokens, *x.shape[1:])).index_copy(0, self.rows, x)
