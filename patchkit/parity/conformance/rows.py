"""Operators in which one row goes in and one row comes out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from patchkit.parity.conformance.cases import (
    LAYOUTS,
    NEIGHBOURS,
    ROW_COUNTS,
    SPLITS,
    TENSOR_PARALLEL,
    THREAD_COUNTS,
    cuts,
)
from patchkit.parity.conformance.trial import (
    Check,
    Result,
    Skipped,
    Trial,
    take,
    threads,
)

# Small batches on which checks other than "batch size" run: one row, a few, more than a tile.
_FEW = (1, 3, 33)


@dataclass(frozen=True, kw_only=True)
class RowOperator:
    """An operator, the rows to try it on, and its weights.

    Attributes:
        name: Shown in findings; include the shape.
        run: Called with the row inputs and the weights as keywords. Every output's
            dimension 0 counts rows.
        inputs: Row inputs, dimension 0 counts rows; enough for the largest count.
        weights: What all rows share.
        row_counts: Batch sizes to try. Every result is compared with the rows of
            the largest one.
        sharded: ``sharded(ranks, **inputs, **weights)``: what that many
            tensor-parallel ranks compute together. None when the operator is
            replicated.
        ranks: Tensor-parallel sizes to try.
        reference: Another implementation of the same contract that must give the
            same bits; None when there is none.
        poison: Inputs in which a NaN may stand; all floating ones by default.
        swallows_nan: Its contract replaces a NaN, which then does not show in its own row.
            That it shows in no other is tried all the same.
        spreads_nan: A NaN or an infinity in one row may reach others, as zero times NaN is
            NaN; it shows, and is not confined. Only finite neighbours are tried then.
        layouts: Memory layouts of the inputs and weights that its contract covers, by
            their names in :data:`~patchkit.parity.conformance.cases.LAYOUTS`.
    """

    name: str
    run: Callable[..., Result]
    inputs: Mapping[str, Tensor]
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    row_counts: tuple[int, ...] = ROW_COUNTS
    sharded: Callable[..., Result] | None = None
    ranks: tuple[int, ...] = TENSOR_PARALLEL
    reference: Callable[..., Result] | None = None
    poison: tuple[str, ...] | None = None
    swallows_nan: bool = False
    spreads_nan: bool = False
    layouts: tuple[str, ...] = tuple(LAYOUTS)

    def __post_init__(self) -> None:
        rows = {name: tensor.shape[0] for name, tensor in self.inputs.items()}
        if not rows or min(rows.values()) < max(self.row_counts):
            raise ValueError(
                f"{self.name}: inputs have {rows} rows, {max(self.row_counts)} are needed; "
                "give more rows, or smaller row_counts"
            )
        if unknown := sorted(set(self.layouts) - set(LAYOUTS)):
            raise ValueError(f"{self.name}: no layouts {unknown}; there are {sorted(LAYOUTS)}")

    @property
    def device(self) -> torch.device:
        return next(iter(self.inputs.values())).device

    @property
    def count(self) -> int:
        return max(self.row_counts)

    def _rows(self, rows: slice | list[int]) -> dict[str, Tensor]:
        return {name: tensor[rows] for name, tensor in self.inputs.items()}

    def _run(
        self, inputs: Mapping[str, Tensor], kept: slice | list[int] = slice(None)
    ) -> tuple[Tensor, ...]:
        """Some rows of the results for ``inputs``."""
        return take(self.run(**inputs, **self.weights), kept)

    def _run_rows(self, rows: slice | list[int]) -> tuple[Tensor, ...]:
        return self._run(self._rows(rows))

    def _run_in_pieces(self, pieces: list[slice]) -> tuple[Tensor, ...]:
        results = [self._run_rows(piece) for piece in pieces]
        return tuple(torch.cat(parts) for parts in zip(*results, strict=True))

    def _run_threaded(self, number: int, rows: slice) -> tuple[Tensor, ...]:
        with threads(number):
            return self._run_rows(rows)

    @cached_property
    def together(self) -> tuple[Tensor, ...]:
        """All rows in one call: what every other way of asking must equal."""
        with torch.no_grad():
            return self._run_rows(slice(self.count))

    def checks(self) -> dict[str, Check]:
        return {
            "batch size": self.batch_sizes,
            "alone": self.alone,
            "position": self.positions,
            "neighbours": self.neighbours,
            "padding": self.padding,
            "splits": self.splits,
            "threads": self.thread_counts,
            "repetition": self.repetitions,
            "layout": self.arrangements,
            "tensor parallel": self.shards,
            "no rows": self.no_rows,
            "same bits as the reference": self.same_as_reference,
        }

    def _few(self) -> Iterator[int]:
        return (count for count in _FEW if count <= self.count)

    def batch_sizes(self) -> Iterator[Trial]:
        for count in self.row_counts:
            yield Trial(
                case=f"M={count}",
                found=partial(self._run_rows, slice(count)),
                expected=take(self.together, slice(count)),
            )

    def alone(self) -> Iterator[Trial]:
        for row in sorted({0, 1, self.count // 2, self.count - 1}):
            yield Trial(
                case=f"row {row} of {self.count}",
                found=partial(self._run_rows, [row]),
                expected=take(self.together, [row]),
                rows=(row,),
            )

    def positions(self) -> Iterator[Trial]:
        count = min(self.count, 257)
        orders = {"reversed": list(range(count))[::-1]}
        for shift in (1, 7, count // 2):
            orders[f"shifted by {shift}"] = [(row + shift) % count for row in range(count)]
        for case, order in orders.items():
            yield Trial(
                case=f"M={count}, {case}",
                found=partial(self._run_rows, order),
                expected=take(self.together, order),
                rows=tuple(order),
            )

    def _poisoned(self) -> list[str]:
        if self.poison is not None:
            return list(self.poison)
        return [name for name, x in self.inputs.items() if x.is_floating_point()]

    def neighbours(self) -> Iterator[Trial | Skipped]:
        names = self._poisoned()
        if not names:
            yield Skipped("no floating input")
            return
        count = min(self.count, 33)
        kept, damaged = list(range(0, count, 2)), list(range(1, count, 2))
        if self.spreads_nan:
            yield Skipped("by its contract a NaN or an infinity may show in other rows, too")
        for case, value in NEIGHBOURS.items():
            if self.spreads_nan and not math.isfinite(value):
                continue
            inputs = {name: tensor.clone() for name, tensor in self._rows(slice(count)).items()}
            for name in names:
                inputs[name][damaged] = value
            yield Trial(
                case=case,
                found=partial(self._run, inputs, kept),
                expected=take(self.together, kept),
                rows=tuple(kept),
            )
        if damaged:
            for name in names:
                inputs = {key: x.clone() for key, x in self._rows(slice(count)).items()}
                inputs[name][damaged, ..., -1] = torch.nan
                if not self.spreads_nan:
                    yield Trial(
                        case=f"one NaN in {name}, neighbours",
                        found=partial(self._run, inputs, kept),
                        expected=take(self.together, kept),
                        rows=tuple(kept),
                    )
                if self.swallows_nan:
                    yield Skipped("by its contract a NaN need not show in its own row")
                    continue
                yield Trial(
                    case=f"one NaN in {name}, its own row",
                    found=partial(self._run, inputs, damaged),
                    rows=tuple(damaged),
                    want="nan",
                )

    def padding(self) -> Iterator[Trial]:
        for count, padded in ((1, 8), (7, 32), (33, 256)):
            if padded > self.count:
                continue
            inputs = self._rows(slice(count))
            for name, tensor in inputs.items():
                zeros = tensor.new_zeros((padded - count, *tensor.shape[1:]))
                inputs[name] = torch.cat([tensor, zeros])
            yield Trial(
                case=f"{count} rows padded to {padded}",
                found=partial(self._run, inputs, slice(count)),
                expected=take(self.together, slice(count)),
            )

    def splits(self) -> Iterator[Trial]:
        count = min(self.count, 64)
        for case, sizes in SPLITS.items():
            yield Trial(
                case=case,
                found=partial(self._run_in_pieces, cuts(count, sizes)),
                expected=take(self.together, slice(count)),
            )

    def thread_counts(self) -> Iterator[Trial | Skipped]:
        if self.device.type != "cpu":
            yield Skipped(f"the operator runs on {self.device.type}")
            return
        for number in THREAD_COUNTS:
            for count in (1, min(self.count, 257)):
                yield Trial(
                    case=f"{number} threads, M={count}",
                    found=partial(self._run_threaded, number, slice(count)),
                    expected=take(self.together, slice(count)),
                )

    def repetitions(self) -> Iterator[Trial]:
        count = min(self.count, 33)
        for turn in range(3):
            yield Trial(
                case=f"run {turn + 1}",
                found=partial(self._run_rows, slice(count)),
                expected=take(self.together, slice(count)),
            )

    def arrangements(self) -> Iterator[Trial | Skipped]:
        if not self.layouts:
            yield Skipped("its contract is contiguous tensors, as PyTorch allocates them")
            return
        if others := [layout for layout in LAYOUTS if layout not in self.layouts]:
            yield Skipped(f"not in its contract: {', '.join(others)}")
        count = min(self.count, 33)
        for layout in self.layouts:
            arrange = LAYOUTS[layout]
            for name in self.inputs:
                for rows in self._few():
                    inputs = self._rows(slice(rows))
                    inputs[name] = arrange(inputs[name])
                    yield Trial(
                        case=f"{name}: {layout}, M={rows}",
                        found=partial(self._run, inputs),
                        expected=take(self.together, slice(rows)),
                    )
            for name in self.weights:
                weights = {**self.weights, name: arrange(self.weights[name])}
                yield Trial(
                    case=f"{name}: {layout}",
                    found=partial(self.run, **self._rows(slice(count)), **weights),
                    expected=take(self.together, slice(count)),
                )

    def shards(self) -> Iterator[Trial | Skipped]:
        sharded = self.sharded
        if sharded is None:
            yield Skipped("every rank computes the whole operator")
            return
        for ranks in self.ranks:
            for count in self._few():
                yield Trial(
                    case=f"TP={ranks}, M={count}",
                    found=partial(sharded, ranks, **self._rows(slice(count)), **self.weights),
                    expected=take(self.together, slice(count)),
                )

    def no_rows(self) -> Iterator[Trial]:
        yield Trial(
            case="M=0",
            found=partial(self._run_rows, slice(0)),
            expected=take(self.together, slice(0)),
        )

    def same_as_reference(self) -> Iterator[Trial | Skipped]:
        reference = self.reference
        if reference is None:
            yield Skipped("no reference was given")
            return
        for count in self.row_counts:
            yield Trial(
                case=f"M={count}",
                found=partial(self._run_rows, slice(count)),
                expected=reference(**self._rows(slice(count)), **self.weights),
            )
