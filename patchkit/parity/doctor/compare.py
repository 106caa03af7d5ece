"""Two recordings side by side: which operator differs first, and in which rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from patchkit.parity.doctor.layout import label
from patchkit.parity.doctor.recording import (
    AFTER,
    BEFORE,
    HeldTensor,
    OperatorKey,
    OperatorRecord,
    Recording,
)

__all__ = ["Cell", "Comparison", "Origin", "compare", "measure"]

Status = Literal["equal", "differs", "not compared"]

# What a block returns as a whole says nothing new beside its last operator.
_WITHIN = {"mlp": ("mlp.experts", "mlp.down_proj"), "feed_forward": ("feed_forward.down_proj",)}
_SELECTED = OperatorKey(AFTER, "logprob")


@dataclass(slots=True, kw_only=True)
class Cell:
    """One operator of one layer, both sides.

    Attributes:
        key: The operator.
        order: Its place in the forward pass.
        status: What was found.
        why: Why it was not compared; empty if it was.
        rows: Rows that both sides have.
        differing: Those whose bits differ.
        unmatched: Rows that only one side has (a cached prefix, tokens not sampled).
        dtypes: Of the rollout's and the trainer's output.
        shapes: Of one row.
        first_row: Sequence and position of the first differing row.
        max_absdiff: Over the differing rows; None where no values were held.
        max_ulp: The same in units of the last place of the coarser dtype, at the row's size.
        elements: Share of the differing rows' elements that differ; None likewise.
        weights: Weights that are not the same on both sides, and how.
        facts: Settings of both sides.
        owners: Who implements it on both sides.
        unrepeatable: Rows that a side computed twice with different bits, per side.
        steps: For the differing rows: tokens of the rollout's forward, least and most.
        split: Where the size of the rollout's forward decides which rows differ: in words.
    """

    key: OperatorKey
    order: int
    status: Status
    why: str = ""
    rows: int = 0
    differing: int = 0
    unmatched: int = 0
    dtypes: tuple[str, str] = ("", "")
    shapes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    first_row: tuple[int, int] | None = None
    max_absdiff: float | None = None
    max_ulp: float | None = None
    elements: float | None = None
    weights: dict[str, str] = field(default_factory=dict)
    facts: tuple[dict[str, Any], dict[str, Any]] = field(default_factory=lambda: ({}, {}))
    owners: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    unrepeatable: tuple[int, int] = (0, 0)
    steps: tuple[int, int] | None = None
    split: str = ""

    @property
    def label(self) -> str:
        return label(self.key.op)

    @property
    def is_integer(self) -> bool:
        """Whether the operator's output are indices, not numbers with a magnitude."""
        return self.dtypes[0].startswith(("int", "uint"))

    def as_dict(self) -> dict[str, Any]:
        layer = self.key.layer
        return {
            "operator": self.key.op,
            "label": self.label,
            "layer": None if layer in (BEFORE, AFTER) else layer,
            "status": self.status,
            "why": self.why,
            "rows": self.rows,
            "differing_rows": self.differing,
            "unmatched_rows": self.unmatched,
            "dtypes": list(self.dtypes),
            "shapes": [list(s) for s in self.shapes],
            "first_row": list(self.first_row) if self.first_row else None,
            "max_absdiff": self.max_absdiff,
            "max_ulp": self.max_ulp,
            "differing_elements": self.elements,
            "weights": self.weights,
            "facts": {"rollout": self.facts[0], "trainer": self.facts[1]},
            "unrepeatable_rows": list(self.unrepeatable),
            "split": self.split,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Rows in which an operator is the first to differ: it read equal inputs there."""

    key: OperatorKey
    rows: int


@dataclass(slots=True, kw_only=True)
class Comparison:
    """All operators, in the order of the forward pass.

    Attributes:
        cells: One per operator and layer that either side has.
        origins: Operators that differ although what they read was equal, in order.
        seconds: Spent in taking digests, per side.
    """

    cells: list[Cell]
    origins: list[Origin]
    seconds: tuple[float, float] = (0.0, 0.0)

    @property
    def first(self) -> Cell | None:
        """The first operator that differs."""
        return next((c for c in self.cells if c.status == "differs"), None)

    @property
    def equal(self) -> bool:
        """Whether everything that was compared is equal, and something was."""
        return self.first is None and any(c.status == "equal" for c in self.cells)

    def cell(self, key: OperatorKey) -> Cell:
        return next(c for c in self.cells if c.key == key)


def compare(
    rollout: Recording, trainer: Recording, *, previous: Mapping[int, Recording] | None = None
) -> Comparison:
    """Align by (sequence, position) and compare every operator.

    Args:
        rollout: The engine's recording.
        trainer: The trainer's, over the same sequences.
        previous: Earlier recordings of the trainer by policy version, to tell stale
            weights from others.
    """
    cells = []
    differing: dict[OperatorKey, np.ndarray] = {}
    order = _order(rollout, trainer)
    for place, key in enumerate(order):
        a, b = rollout.operators.get(key), trainer.operators.get(key)
        if a is None or b is None:
            only, missing = ("trainer", "rollout") if a is None else ("rollout", "trainer")
            one = b if a is None else a
            assert one is not None
            cells.append(
                Cell(
                    key=key,
                    order=place,
                    status="not compared",
                    why=f"seen on the {only} side only; the {missing} has no such step of its own",
                    unmatched=len(one.rows),
                    owners=(one.owners, ()) if b is None else ((), one.owners),
                )
            )
            continue
        cell, wrong = _compare(key, place, a, b, rollout.step_tokens)
        cell.weights = _weights(key, a, b, previous or {})
        cells.append(cell)
        differing[key] = wrong
    return Comparison(
        cells=cells,
        origins=_origins(cells, differing),
        seconds=(rollout.seconds, trainer.seconds),
    )


def _order(rollout: Recording, trainer: Recording) -> list[OperatorKey]:
    """Forward order: by layer, then as the trainer ran them, then the rollout's own."""
    keys = {*rollout.operators, *trainer.operators}
    for key in list(keys):
        parts = key.op.rsplit(".", 1)
        within = _WITHIN.get(parts[-1], ())
        # Only where both sides have the finer operator.
        if any(
            OperatorKey(key.layer, op) in rollout.operators
            and OperatorKey(key.layer, op) in trainer.operators
            for op in within
        ):
            keys.discard(key)
    ranks: dict[OperatorKey, float] = {k: r.order for k, r in trainer.operators.items()}
    # What only the rollout has stands behind the last operator before it that both have.
    last = -1.0
    for key, _ in sorted(rollout.operators.items(), key=lambda item: item[1].order):
        if key in ranks:
            last = max(last, ranks[key])
        else:
            ranks[key] = last = last + 1e-3
    return sorted(keys, key=lambda k: (k.layer, ranks[k]))


def _compare(
    key: OperatorKey, place: int, a: OperatorRecord, b: OperatorRecord, step_tokens: list[int]
) -> tuple[Cell, np.ndarray]:
    names_a, names_b = _names(a.rows), _names(b.rows)
    _, at_a, at_b = np.intersect1d(names_a, names_b, assume_unique=True, return_indices=True)
    cell = Cell(
        key=key,
        order=place,
        status="equal",
        rows=len(at_a),
        unmatched=len(names_a) + len(names_b) - 2 * len(at_a),
        dtypes=(a.dtype, b.dtype),
        shapes=(a.shape, b.shape),
        facts=(a.facts, b.facts),
        owners=(a.owners, b.owners),
        unrepeatable=(a.unrepeatable, b.unrepeatable),
    )
    nothing = np.empty(0, np.int64)
    if not len(at_a):
        cell.status, cell.why = "not compared", "no row was computed on both sides"
        return cell, nothing
    if int(np.prod(a.shape)) != int(np.prod(b.shape)):
        cell.status, cell.why = "not compared", f"rows of {a.shape} and of {b.shape}"
        return cell, nothing
    wrong = a.digests[at_a] != b.digests[at_b]
    cell.differing = int(wrong.sum())
    if cell.differing:
        rows = a.rows[at_a][wrong]
        first = np.lexsort((rows[:, 1], rows[:, 0]))[0]
        cell.status = "differs"
        cell.first_row = (int(rows[first, 0]), int(rows[first, 1]))
        if step_tokens and a.steps.min() >= 0:
            tokens = np.asarray(step_tokens)[a.steps[at_a]]
            cell.steps = (int(tokens[wrong].min()), int(tokens[wrong].max()))
            cell.split = _split(tokens, wrong)
    return cell, names_a[at_a][wrong]


# Fewer rows than this on a side of a split are a coincidence.
_ENOUGH = 8


def _split(tokens: np.ndarray, wrong: np.ndarray) -> str:
    """Whether rows differ in large forwards only, or in small ones only."""
    differing = tokens[wrong]
    for large in (True, False):
        least, most = int(differing.min()), int(differing.max())
        inside = tokens >= least if large else tokens <= most
        outside = int((~inside).sum())
        share = float(wrong[inside].mean())
        if int(wrong.sum()) < _ENOUGH or outside < _ENOUGH or share < 0.5:
            continue
        limit = f"{least} tokens or more" if large else f"{most} tokens or fewer"
        return (
            f"{int(wrong.sum()):,} of {int(inside.sum()):,} rows in forwards of {limit} differ, "
            f"and none of the {outside:,} rows in {'smaller' if large else 'larger'} ones"
        )
    return ""


def _names(rows: np.ndarray) -> np.ndarray:
    names: np.ndarray = (rows[:, 0] << 32) | rows[:, 1]
    return names


def _weights(
    key: OperatorKey, a: OperatorRecord, b: OperatorRecord, previous: Mapping[int, Recording]
) -> dict[str, str]:
    """Weights that differ in value, and what is known about it."""
    found = {}
    for name, theirs in b.weights.items():
        ours = a.weights.get(name)
        if ours is None or ours.digest == theirs.digest:
            continue
        stale = [
            version
            for version, recording in sorted(previous.items())
            if (old := recording.operators.get(key)) is not None
            and name in old.weights
            and old.weights[name].digest == ours.digest
        ]
        if ours.multiset == theirs.multiset and not (
            theirs.transposed and ours.digest == theirs.transposed
        ):
            found[name] = "the same numbers in another layout"
        elif ours.shape != theirs.shape:
            found[name] = f"shapes {list(ours.shape)} and {list(theirs.shape)}"
        elif theirs.transposed and ours.digest == theirs.transposed:
            found[name] = "transposed"
        elif stale:
            found[name] = f"stale: the weights of policy version {stale[-1]}"
        else:
            found[name] = "other values"
    return found


def _origins(cells: list[Cell], differing: Mapping[OperatorKey, np.ndarray]) -> list[Origin]:
    """Operators that differ in rows where everything before them was equal.

    Attention reads other rows: there, everything that the sequence's earlier rows
    handed over has to be equal, too.
    """
    found = []
    touched: set[int] = set()
    for cell in cells:
        wrong = differing.get(cell.key)
        if wrong is None or not len(wrong):
            continue
        rows = set(wrong.tolist())
        fresh = rows - touched
        if cell.key.op.endswith("attention") and touched:
            first_bad: dict[int, int] = {}
            for name in touched:
                sequence, position = name >> 32, name & 0xFFFFFFFF
                first_bad[sequence] = min(position, first_bad.get(sequence, position))
            fresh = {n for n in fresh if (n & 0xFFFFFFFF) < first_bad.get(n >> 32, 1 << 32)}
        if fresh:
            found.append(Origin(key=cell.key, rows=len(fresh)))
        touched |= rows
    return found


Fetch = Callable[[OperatorKey], "tuple[HeldTensor, HeldTensor] | None"]


def measure(cell: Cell, held: tuple[HeldTensor, HeldTensor] | None) -> None:
    """Add to a cell what only values tell."""
    if held is None or cell.status != "differs":
        return
    a, b = aligned(*held)
    if not len(a) or a.shape != b.shape:
        return
    coarse = _coarser(*cell.dtypes)
    if a.is_floating_point():
        a, b = a.float(), b.float()
    unequal = a != b
    rows = unequal.any(-1)
    if not rows.any():
        return
    difference = (a[rows].double() - b[rows].double()).abs()
    cell.max_absdiff = float(difference.max())
    cell.elements = float(unequal[rows].double().mean())
    if a.is_floating_point():
        cell.max_ulp = float((difference / ulp(b[rows], coarse)).max())


def aligned(a: HeldTensor, b: HeldTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that both have, in one order."""
    _, at_a, at_b = np.intersect1d(
        _names(a.rows), _names(b.rows), assume_unique=True, return_indices=True
    )
    return a.values[torch.from_numpy(at_a)], b.values[torch.from_numpy(at_b)]


def aligned_rows(a: HeldTensor, b: HeldTensor) -> np.ndarray:
    """Names of the rows of :func:`aligned`."""
    _, at_a, _ = np.intersect1d(
        _names(a.rows), _names(b.rows), assume_unique=True, return_indices=True
    )
    rows: np.ndarray = a.rows[at_a]
    return rows


_MANTISSA = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}


def _coarser(a: str, b: str) -> str:
    return min((a, b), key=lambda d: _MANTISSA.get(d, 24))


def ulp(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """One unit in the last place at the size of each row, float64 ``[..., 1]``.

    At the row's size and not the element's: where terms cancel in a sum, a small result
    carries the error of large terms.
    """
    _, exponent = torch.frexp(values.double().abs().amax(-1, keepdim=True).clamp_min(1e-30))
    return torch.pow(2.0, exponent.double() - _MANTISSA.get(dtype, 24))
