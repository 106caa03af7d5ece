"""Routers: rows in, chosen experts out, and what happens to equals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from patchkit.parity.conformance.rows import RowOperator
from patchkit.parity.conformance.trial import Check, Trial, outputs_of


def _tied_logits(experts: int, top_k: int) -> dict[str, Tensor]:
    """Rows of router logits with equals among them, most of them at the cut."""
    generator = torch.Generator().manual_seed(7)
    spread = torch.linspace(-4.0, 0.0, experts)
    across = spread[torch.randperm(experts, generator=generator)]
    # The top_k-th and all that follow it are equal: which of them is in?
    across[across < across.sort(descending=True).values[top_k - 1]] = across.sort(
        descending=True
    ).values[top_k - 1]
    at_the_end = spread.clone()
    at_the_end[-top_k - 2 :] = 3.0
    levels = torch.randint(0, 4, (64, experts), generator=generator) * 0.5
    zeros = torch.zeros(experts)
    zeros[::2] = -0.0
    return {
        "all equal": torch.ones(1, experts),
        "equal across the cut": across[None],
        "more equals than places, at the end": at_the_end[None],
        "four levels": levels,
        "both zeros": zeros[None],
    }


def _lowest_first(row: list[float], top_k: int) -> list[int]:
    # Python's sort is stable, and -0.0 equals 0.0.
    return sorted(range(len(row)), key=lambda expert: -row[expert])[:top_k]


@dataclass(frozen=True, kw_only=True)
class RouterOperator(RowOperator):
    """A router: ``run(logits=[T, E])`` gives weights ``[T, k]`` and expert ids ``[T, k]``.

    Of two equal experts the one with the lower id must be chosen, and stand first.
    """

    top_k: int

    def checks(self) -> dict[str, Check]:
        return {**super().checks(), "ties": self.ties}

    def _ids(self, logits: Tensor) -> Tensor:
        return outputs_of(self.run(logits=logits, **self.weights))[1].long()

    def ties(self) -> Iterator[Trial]:
        logits = self.inputs["logits"]
        for case, planted in _tied_logits(logits.shape[1], self.top_k).items():
            expected = [_lowest_first(row, self.top_k) for row in planted.tolist()]
            for copies in (1, 3, 32):
                rows = planted.repeat(copies, 1).to(logits.device, logits.dtype)

                yield Trial(
                    case=f"{case}, M={len(rows)}",
                    found=partial(self._ids, rows),
                    expected=torch.tensor(expected * copies, device=logits.device),
                )
