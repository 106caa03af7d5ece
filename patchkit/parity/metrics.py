"""How far two sets of selected-token log-probabilities are apart, bit by bit.

Equality is decided on the float32 *bit patterns*, so ``-0.0`` and ``0.0``
differ and NaN is never equal to anything. What cannot be compared at all (a
wrong dtype, different shapes, NaN, infinities) is a violation, and its tokens
count as mismatches: no wrong input can make a comparison look better.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from patchkit.errors import Violation

__all__ = ["Mismatch", "ParityMetrics", "compare_logprobs", "compare_rows", "merge_metrics"]

DEFAULT_FIRST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """One token whose two log-probabilities have different bits.

    Attributes:
        sequence: Number of the sequence, as the caller counts.
        position: Absolute position of the token in its sequence (prompt included).
        token_id: The token; -1 where the caller gave none.
        rollout: The reference value.
        replay: The value compared with it.
        rollout_bits: Bit pattern of ``rollout``, as ``0x…``.
        replay_bits: Bit pattern of ``replay``.
    """

    sequence: int
    position: int
    token_id: int
    rollout: float
    replay: float
    rollout_bits: str
    replay_bits: str

    def __str__(self) -> str:
        return (
            f"sequence {self.sequence}, position {self.position}, token {self.token_id}: "
            f"{self.rollout!r} ({self.rollout_bits}) against {self.replay!r} ({self.replay_bits})"
        )

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityMetrics:
    """Result of one comparison, or of several merged.

    ``k3`` is Schulman's estimator of the KL divergence, ``exp(d) - 1 - d`` with
    ``d = replay - rollout``, in float64; it and ``max_absdiff`` cover the tokens
    that are finite on both sides.

    Attributes:
        token_count: Tokens compared.
        mismatch_count: Tokens whose bit patterns differ or could not be compared.
        max_absdiff: Largest absolute difference.
        k3_mean: Mean of k3 over the finite tokens.
        k3_max: Largest k3.
        first_mismatches: The first ones, in the order of the comparison.
        violations: Why the comparison itself was not valid.
        finite_count: Tokens that are finite on both sides.
    """

    token_count: int
    mismatch_count: int
    max_absdiff: float = 0.0
    k3_mean: float = 0.0
    k3_max: float = 0.0
    first_mismatches: tuple[Mismatch, ...] = ()
    violations: tuple[Violation, ...] = ()
    finite_count: int = field(default=-1)

    def __post_init__(self) -> None:
        if self.finite_count < 0:
            object.__setattr__(self, "finite_count", self.token_count)

    @property
    def exact(self) -> bool:
        """Whether at least one token was compared and every one had equal bits."""
        return self.token_count > 0 and self.mismatch_count == 0 and not self.violations

    def as_dict(self) -> dict[str, Any]:
        return {
            "token_count": self.token_count,
            "mismatch_count": self.mismatch_count,
            "max_absdiff": self.max_absdiff,
            "k3_mean": self.k3_mean,
            "k3_max": self.k3_max,
            "finite_count": self.finite_count,
            "first_mismatches": [m.as_dict() for m in self.first_mismatches],
            "violations": [v.as_dict() for v in self.violations],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ParityMetrics:
        return cls(
            **{
                **data,
                "first_mismatches": tuple(Mismatch(**m) for m in data["first_mismatches"]),
                "violations": tuple(Violation(**v) for v in data["violations"]),
            }
        )


def compare_logprobs(
    rollout: torch.Tensor,
    replay: torch.Tensor,
    *,
    positions: torch.Tensor | Sequence[int],
    token_ids: torch.Tensor | Sequence[int] | None = None,
    sequences: torch.Tensor | Sequence[int] | None = None,
    first: int = DEFAULT_FIRST,
    names: tuple[str, str] = ("rollout", "replay"),
) -> ParityMetrics:
    """Compare two vectors of selected-token log-probabilities.

    Args:
        rollout: float32 ``[tokens]``, the reference.
        replay: float32 ``[tokens]``, in the same order.
        positions: Absolute position of each token in its sequence.
        token_ids: The tokens, for the report.
        sequences: Which sequence each token belongs to, for the report.
        first: How many mismatches to describe.
        names: What the two sides are called in messages.

    Returns:
        The metrics. An invalid comparison is a result with ``violations``.
    """
    count = max(rollout.numel(), replay.numel())
    violations = list(_incomparable(rollout, replay, names))
    labels = {"positions": positions, "token_ids": token_ids, "sequences": sequences}
    columns: dict[str, list[int]] = {}
    for label, values in labels.items():
        if values is None:
            continue
        column = values.tolist() if isinstance(values, torch.Tensor) else list(values)
        columns[label] = column
        if len(column) != count:
            violations.append(
                Violation(
                    subject=label,
                    problem="one entry per token is needed",
                    expected=str(count),
                    found=str(len(column)),
                    remedy="pass the absolute position (and token, sequence) of every log-prob",
                )
            )
    if violations:
        return ParityMetrics(
            token_count=count, mismatch_count=count, violations=tuple(violations), finite_count=0
        )

    a = rollout.detach().cpu().contiguous()
    b = replay.detach().cpu().contiguous()
    bits_a, bits_b = a.view(torch.int32), b.view(torch.int32)
    finite = torch.isfinite(a) & torch.isfinite(b)
    violations += _not_finite(a, b, names, columns)
    differs = (bits_a != bits_b) | ~finite
    if not violations and torch.equal(bits_a, bits_b):
        return ParityMetrics(token_count=count, mismatch_count=0)

    d = (b[finite].double() - a[finite].double()).double()
    k3 = torch.expm1(d) - d
    worst = torch.nonzero(differs).flatten()[:first].tolist()
    return ParityMetrics(
        token_count=count,
        mismatch_count=int(differs.sum()),
        max_absdiff=float(d.abs().max()) if d.numel() else 0.0,
        k3_mean=float(k3.mean()) if d.numel() else 0.0,
        k3_max=float(k3.max()) if d.numel() else 0.0,
        finite_count=int(finite.sum()),
        first_mismatches=tuple(
            Mismatch(
                sequence=columns["sequences"][i] if "sequences" in columns else 0,
                position=columns["positions"][i],
                token_id=columns["token_ids"][i] if "token_ids" in columns else -1,
                rollout=float(a[i]),
                replay=float(b[i]),
                rollout_bits=f"0x{int(bits_a[i]) & 0xFFFFFFFF:08x}",
                replay_bits=f"0x{int(bits_b[i]) & 0xFFFFFFFF:08x}",
            )
            for i in worst
        ),
        violations=tuple(violations),
    )


def compare_rows(
    rollout: torch.Tensor,
    replay: torch.Tensor,
    *,
    positions: torch.Tensor | Sequence[int],
    sequences: torch.Tensor | Sequence[int] | None = None,
    first: int = DEFAULT_FIRST,
    names: tuple[str, str] = ("rollout rows", "replay rows"),
) -> ParityMetrics:
    """Compare whole rows over the vocabulary at a sample of positions.

    Stronger than the selected tokens alone: a difference in a logit that was not
    drawn shows, too. Masked logits (``-inf`` on both sides) belong to no policy that
    is covered, so they are violations like everything that is not finite.

    Args:
        rollout: float32 ``[rows, vocabulary]``, logits or log-probabilities.
        replay: The same of the trainer.
        positions: Absolute position of each row's token.
        sequences: Which sequence each row belongs to.
        first: How many mismatches to describe; their ``token_id`` is the column.
        names: What the two sides are called in messages.

    Returns:
        Metrics that count matrix entries as tokens.
    """
    if rollout.ndim != 2 or rollout.shape != replay.shape:
        count = max(rollout.numel(), replay.numel())
        return ParityMetrics(
            token_count=count,
            mismatch_count=count,
            finite_count=0,
            violations=(
                Violation(
                    subject=f"{names[0]} and {names[1]}",
                    problem="not the same rows",
                    expected="two matrices [rows, vocabulary] of one shape",
                    found=f"{tuple(rollout.shape)} and {tuple(replay.shape)}",
                    remedy="gather the vocabulary shards, and cut off padding columns",
                ),
            ),
        )
    rows, width = rollout.shape
    labels = {"positions": positions, "sequences": sequences}
    spread = {
        k: torch.as_tensor(v).repeat_interleave(width) for k, v in labels.items() if v is not None
    }
    return compare_logprobs(
        rollout.reshape(-1),
        replay.reshape(-1),
        positions=spread["positions"],
        sequences=spread.get("sequences"),
        token_ids=torch.arange(width).repeat(rows),
        first=first,
        names=names,
    )


def merge_metrics(parts: Iterable[ParityMetrics], *, first: int = DEFAULT_FIRST) -> ParityMetrics:
    """Add up comparisons of disjoint tokens (sequences, ranks, updates)."""
    parts = list(parts)
    finite = sum(p.finite_count for p in parts)
    return ParityMetrics(
        token_count=sum(p.token_count for p in parts),
        mismatch_count=sum(p.mismatch_count for p in parts),
        max_absdiff=max((p.max_absdiff for p in parts), default=0.0),
        k3_mean=sum(p.k3_mean * p.finite_count for p in parts) / finite if finite else 0.0,
        k3_max=max((p.k3_max for p in parts), default=0.0),
        finite_count=finite,
        first_mismatches=tuple(m for p in parts for m in p.first_mismatches)[:first],
        violations=tuple(v for p in parts for v in p.violations),
    )


def _incomparable(
    rollout: torch.Tensor, replay: torch.Tensor, names: tuple[str, str]
) -> Iterable[Violation]:
    for name, tensor in zip(names, (rollout, replay), strict=True):
        if tensor.dtype is not torch.float32:
            yield Violation(
                subject=f"{name} log-probabilities",
                problem="wrong dtype",
                expected="torch.float32",
                found=str(tensor.dtype),
                remedy="compute log-probabilities in float32; a cast afterwards hides the loss",
            )
        if tensor.ndim != 1:
            yield Violation(
                subject=f"{name} log-probabilities",
                problem="wrong shape",
                expected="one dimension, one entry per generated token",
                found=str(tuple(tensor.shape)),
                remedy="select the generated tokens by absolute position first",
            )
    if rollout.shape != replay.shape:
        yield Violation(
            subject=f"{names[0]} and {names[1]} log-probabilities",
            problem="different shapes",
            expected=str(tuple(rollout.shape)),
            found=str(tuple(replay.shape)),
            remedy="both sides must cover the same tokens: compare their position masks",
        )


def _not_finite(
    a: torch.Tensor, b: torch.Tensor, names: tuple[str, str], columns: dict[str, list[int]]
) -> Iterable[Violation]:
    for name, tensor in zip(names, (a, b), strict=True):
        bad = torch.nonzero(~torch.isfinite(tensor)).flatten()
        if not bad.numel():
            continue
        i = int(bad[0])
        where = f"position {columns['positions'][i]}"
        if "sequences" in columns:
            where = f"sequence {columns['sequences'][i]}, {where}"
        yield Violation(
            subject=f"{name} log-probabilities",
            problem="not finite",
            expected="finite values only",
            found=f"{bad.numel()} of {tensor.numel()}; the first is {float(tensor[i])} at {where}",
            remedy="a selected token of probability zero, or an overflow: look at its logits",
        )
