"""What one side did, operator by operator: digests of rows, and tensors where they were held.

A row is one token's part of an operator's output, and its name is (sequence, absolute
position): engines batch, chunk and reorder tokens, so nothing else identifies it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchkit.parity.doctor.digests import matrix_digest, multiset_digest, row_digests

__all__ = ["HeldTensor", "OperatorKey", "OperatorRecord", "Recorder", "Recording", "WeightFacts"]

# Layer of what stands before the first and after the last decoder layer.
BEFORE, AFTER = -1, 1 << 20


class OperatorKey(NamedTuple):
    """An operator of a layer; the layer is :data:`BEFORE` or :data:`AFTER` outside of them."""

    layer: int
    op: str

    def __str__(self) -> str:
        return self.op if self.layer in (BEFORE, AFTER) else f"{self.op} of layer {self.layer}"


class WeightFacts(NamedTuple):
    """A weight as the operator used it.

    ``transposed`` is the digest of the square matrix's transpose (zero if not square),
    ``multiset`` that of its numbers whatever their places.
    """

    digest: int
    transposed: int
    multiset: int
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, weight: Tensor) -> WeightFacts:
        square = weight.ndim == 2 and weight.shape[0] == weight.shape[1]
        return cls(
            matrix_digest(weight),
            matrix_digest(weight.t().contiguous()) if square else 0,
            multiset_digest(weight),
            str(weight.dtype).removeprefix("torch."),
            tuple(weight.shape),
        )


@dataclass(slots=True)
class OperatorRecord:
    """All rows of one operator.

    Attributes:
        order: When the operator ran for the first time, counted over all operators.
        rows: int64 ``[N, 2]``: sequence and absolute position.
        digests: int64 ``[N]``.
        dtype: Of the output.
        shape: Of one row of the output.
        unrepeatable: Rows computed more than once (preemption) with different bits.
        weights: Facts about the weights used, by their names in the checkpoint.
        facts: Settings of the module: epsilon, scale and the like.
        owners: ``module:Class`` of everything that implements the operator, nearest first.
        steps: int32 ``[N]``: in which forward the row was computed.
        span: Where a shard's columns are in the whole row: the first one, and the whole
            row's width; None for a whole row.
    """

    order: int
    rows: np.ndarray
    digests: np.ndarray
    dtype: str
    shape: tuple[int, ...]
    steps: np.ndarray
    unrepeatable: int = 0
    weights: dict[str, WeightFacts] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    owners: tuple[str, ...] = ()
    span: tuple[int, int] | None = None


@dataclass(slots=True)
class HeldTensor:
    """Values of an operator's rows, in the order of ``rows``."""

    rows: np.ndarray
    values: Tensor
    dtype: str


@dataclass(slots=True)
class Recording:
    """One side's run over all sequences.

    Attributes:
        side: "rollout" or "trainer".
        operators: By layer and operator.
        step_tokens: Tokens of each forward.
        notes: What could not be recorded, and why.
        seconds: Spent in taking digests.
        held: Operators whose values can be fetched.
        bytes_held: Size of those values.
    """

    side: str
    operators: dict[OperatorKey, OperatorRecord] = field(default_factory=dict)
    step_tokens: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    held: set[OperatorKey] = field(default_factory=set)
    bytes_held: int = 0

    def renumbered(self, sequences: Mapping[int, int]) -> Recording:
        """The same with other sequence numbers; rows of unnamed sequences are dropped."""
        for record in self.operators.values():
            keep = np.isin(record.rows[:, 0], list(sequences))
            record.rows = record.rows[keep]
            record.digests, record.steps = record.digests[keep], record.steps[keep]
            record.rows[:, 0] = [sequences[s] for s in record.rows[:, 0].tolist()]
        return self

    def as_plain(self) -> dict[str, Any]:
        """Numbers, strings and bytes only: survives an engine's own serialisation."""
        return {
            "side": self.side,
            "step_tokens": self.step_tokens,
            "notes": self.notes,
            "seconds": self.seconds,
            "held": [list(key) for key in self.held],
            "bytes_held": self.bytes_held,
            "operators": [
                {
                    "key": list(key),
                    "order": r.order,
                    "rows": r.rows.tobytes(),
                    "digests": r.digests.tobytes(),
                    "steps": r.steps.tobytes(),
                    "dtype": r.dtype,
                    "shape": list(r.shape),
                    "unrepeatable": r.unrepeatable,
                    # As text: serialisers differ in what they do to 64-bit integers.
                    "weights": {
                        n: [
                            str(w.digest),
                            str(w.transposed),
                            str(w.multiset),
                            w.dtype,
                            list(w.shape),
                        ]
                        for n, w in r.weights.items()
                    },
                    "facts": r.facts,
                    "owners": list(r.owners),
                    "span": list(r.span) if r.span else None,
                }
                for key, r in self.operators.items()
            ],
        }

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Recording:
        made = cls(
            side=data["side"],
            step_tokens=list(data["step_tokens"]),
            notes=list(data["notes"]),
            seconds=data["seconds"],
            held={OperatorKey(*key) for key in data["held"]},
            bytes_held=data["bytes_held"],
        )
        for r in data["operators"]:
            made.operators[OperatorKey(*r["key"])] = OperatorRecord(
                order=r["order"],
                rows=np.frombuffer(r["rows"], np.int64).reshape(-1, 2).copy(),
                digests=np.frombuffer(r["digests"], np.int64).copy(),
                steps=np.frombuffer(r["steps"], np.int32).copy(),
                dtype=r["dtype"],
                shape=tuple(r["shape"]),
                unrepeatable=r["unrepeatable"],
                weights={
                    n: WeightFacts(int(w[0]), int(w[1]), int(w[2]), w[3], tuple(w[4]))
                    for n, w in r["weights"].items()
                },
                facts=dict(r["facts"]),
                owners=tuple(r["owners"]),
                span=tuple(r["span"]) if r["span"] else None,
            )
        return made


def gathered(ranks: Sequence[Recording]) -> Recording:
    """Recordings of tensor-parallel ranks, which each hold all rows: shards are put together.

    Whole rows are rank 0's; where another rank has other bits, a note says so.
    """
    whole, *others = ranks
    for key, record in list(whole.operators.items()):
        theirs = [(n, r.operators[key]) for n, r in enumerate(others, 1) if key in r.operators]
        if any(not np.array_equal(record.rows, r.rows) for _, r in theirs):
            whole.notes.append(f"{key}: the ranks computed other rows")
            del whole.operators[key]
        elif record.span is None:
            for rank, r in theirs:
                wrong = int((r.digests != record.digests).sum())
                if wrong:
                    whole.notes.append(
                        f"{key}: rank {rank} has other bits than rank 0, {wrong} rows"
                    )
        else:
            # Key and value heads may be held by several ranks; each span counts once.
            parts = {record.span[0]: record}
            for _, r in theirs:
                assert r.span is not None
                parts.setdefault(r.span[0], r)
            covered = sum(int(np.prod(r.shape)) for r in parts.values())
            if covered != record.span[1]:
                whole.notes.append(f"{key}: ranks hold {covered} of {record.span[1]} columns")
                del whole.operators[key]
                continue
            total = np.zeros_like(record.digests)
            for part in parts.values():
                total += part.digests  # arrays wrap modulo 2**64, as they should
            record.digests = total
            record.shape, record.span = (record.span[1],), None
            record.unrepeatable = max(r.unrepeatable for r in parts.values())
    for other in others:
        whole.held &= other.held
        whole.bytes_held += other.bytes_held
        whole.notes += [n for n in other.notes if n not in whole.notes]
        whole.seconds = max(whole.seconds, other.seconds)
    return whole


def gathered_tensor(
    parts: Sequence[HeldTensor | None], spans: Sequence[tuple[int, int] | None]
) -> HeldTensor | None:
    """Values of tensor-parallel ranks, put together by their columns."""
    first = parts[0] if parts else None
    if first is None or spans[0] is None:
        return first
    shards: dict[int, Tensor] = {}
    for part, span in zip(parts, spans, strict=True):
        if part is None or span is None:
            return None
        shards.setdefault(span[0], part.values)
    return HeldTensor(first.rows, torch.cat([shards[at] for at in sorted(shards)], 1), first.dtype)


def merged(parts: Sequence[Recording]) -> Recording:
    """Recordings of ranks that shared the sequences among them."""
    first, *others = parts
    for other in others:
        first.step_tokens += other.step_tokens
        first.notes += [n for n in other.notes if n not in first.notes]
        first.seconds = max(first.seconds, other.seconds)
        first.held &= other.held
        first.bytes_held += other.bytes_held
        for key, r in other.operators.items():
            mine = first.operators.get(key)
            if mine is None:
                first.operators[key] = r
                continue
            mine.rows = np.concatenate([mine.rows, r.rows])
            mine.digests = np.concatenate([mine.digests, r.digests])
            mine.steps = np.concatenate([mine.steps, r.steps])
            mine.unrepeatable += r.unrepeatable
    return first


@dataclass(slots=True)
class _Pending:
    """Rows of one operator as they come in."""

    order: int
    dtype: str
    shape: tuple[int, ...]
    facts: dict[str, Any]
    owners: tuple[str, ...]
    rows: list[np.ndarray] = field(default_factory=list)
    digests: list[Tensor] = field(default_factory=list)
    steps: list[np.ndarray] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    weights: dict[str, WeightFacts] = field(default_factory=dict)
    span: tuple[int, int] | None = None


class Recorder:
    """Collects rows while a side runs.

    Args:
        side: "rollout" or "trainer".
        budget: Bytes of values to hold beside the digests; 0 holds none.
        hold: Operators whose values are held whatever the budget.
    """

    def __init__(self, side: str, *, budget: int = 0, hold: Iterable[OperatorKey] = ()) -> None:
        self.side = side
        self._budget, self._hold = budget, set(hold)
        self._operators: dict[OperatorKey, _Pending] = {}
        self._held: set[OperatorKey] = set()
        self._vectors: dict[OperatorKey, Tensor] = {}
        self._bytes = 0
        self._notes: list[str] = []
        self._steps: list[int] = []
        self.seconds = 0.0

    def step(self, tokens: int) -> None:
        """A forward begins."""
        self._steps.append(tokens)

    def note(self, text: str) -> None:
        """Say once that something was not recorded."""
        if text not in self._notes:
            self._notes.append(text)

    def add(
        self,
        key: OperatorKey,
        rows: np.ndarray,
        values: Tensor,
        *,
        owners: tuple[str, ...] = (),
        facts: Mapping[str, Any] | None = None,
        weights: Mapping[str, Tensor] | None = None,
        span: tuple[int, int] | None = None,
    ) -> None:
        """Rows of an operator's output.

        Args:
            key: The operator.
            rows: ``[N, 2]`` names of the first rows of ``values``; what stands behind
                them is padding. A negative sequence marks a row to leave out.
            values: ``[N or more, ...]``.
            owners: Who implements it.
            facts: Settings.
            weights: By their names in the checkpoint; looked at the first time only.
            span: First column and whole width, where ``values`` are a rank's shard.
        """
        kept = rows[:, 0] >= 0
        values = values.detach()[: len(rows)]
        if not kept.all():
            rows, values = rows[kept], values[torch.from_numpy(kept).to(values.device)]
        if not len(rows):
            return
        pending = self._operators.get(key)
        if pending is None:
            pending = self._operators[key] = _Pending(
                order=len(self._operators),
                dtype=str(values.dtype).removeprefix("torch."),
                shape=tuple(values.shape[1:]),
                facts=dict(facts or {}),
                owners=owners,
                span=span,
            )
            pending.weights = {n: WeightFacts.of(w) for n, w in (weights or {}).items()}
            for weight in (weights or {}).values():
                if weight.ndim == 1:  # small, and what a hypothesis about a norm needs
                    self._vectors[key] = weight.detach().float().clone()
        pending.rows.append(rows)
        pending.digests.append(row_digests(values, first_column=span[0] if span else 0))
        pending.steps.append(np.full(len(rows), len(self._steps) - 1, np.int32))
        size = values.numel() * values.element_size()
        if key in self._hold or self._bytes + size <= self._budget:
            # A copy: the engine writes its buffers again in the next step.
            pending.tensors.append(values.flatten(1).clone())
            self._bytes += size

    def finish(self) -> Recording:
        """Everything, each row once: where one was computed again, the first counts."""
        made = Recording(
            side=self.side,
            step_tokens=self._steps,
            notes=self._notes,
            seconds=self.seconds,
            bytes_held=self._bytes,
        )
        for key, p in self._operators.items():
            rows = np.concatenate(p.rows)
            digests = torch.cat(p.digests).cpu().numpy()
            first, inverse = _first_of_each(rows)
            again = digests != digests[first][inverse]
            made.operators[key] = OperatorRecord(
                order=p.order,
                rows=rows[first],
                digests=digests[first],
                steps=np.concatenate(p.steps)[first],
                dtype=p.dtype,
                shape=p.shape,
                unrepeatable=len(np.unique(rows[again], axis=0)) if again.any() else 0,
                weights=p.weights,
                facts=p.facts,
                owners=p.owners,
                span=p.span,
            )
            if len(p.tensors) == len(p.rows):
                made.held.add(key)
        self._held = made.held
        return made

    def tensor(self, key: OperatorKey) -> HeldTensor | None:
        """Values that were held, each row once; None if they were not."""
        pending = self._operators.get(key)
        if pending is None or key not in self._held:
            return None
        rows, values = np.concatenate(pending.rows), torch.cat(pending.tensors)
        first, _ = _first_of_each(rows)
        dtype = str(values.dtype).removeprefix("torch.")
        return HeldTensor(rows[first], values[torch.from_numpy(first)].cpu(), dtype)

    def vector(self, key: OperatorKey) -> Tensor | None:
        """A norm's weight, as the operator used it."""
        return self._vectors.get(key)


def _first_of_each(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Index of each distinct row's first occurrence, and which one each row is."""
    name = (rows[:, 0] << 32) | rows[:, 1]
    _, first, inverse = np.unique(name, return_index=True, return_inverse=True)
    return first, inverse.reshape(-1)


def tensor_as_plain(held: HeldTensor | None) -> dict[str, Any] | None:
    """For the way out of a worker; the values go as float32 or int64, which is exact."""
    if held is None:
        return None
    values = held.values.float() if held.values.is_floating_point() else held.values.long()
    return {
        "rows": held.rows.tobytes(),
        "values": values.contiguous().numpy().tobytes(),
        "integers": not held.values.is_floating_point(),
        "dtype": held.dtype,
    }


def tensor_from_plain(data: Mapping[str, Any] | None) -> HeldTensor | None:
    """The way back."""
    if data is None:
        return None
    rows = np.frombuffer(data["rows"], np.int64).reshape(-1, 2).copy()
    kind = np.int64 if data["integers"] else np.float32
    values = torch.from_numpy(np.frombuffer(data["values"], kind).copy()).view(len(rows), -1)
    return HeldTensor(rows, values, data["dtype"])
