"""rollout = recompute = first training forward, for one policy version.

The oracle is local to one rank; :class:`~patchkit.parity.gate.ParityGate` makes
the ranks agree on its answers. Both sides say which tokens they mean by
sequence, absolute position and token id, so that a shifted mask or a re-encoded
prefix is a violation and not a comparison of other tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from patchkit.errors import Violation
from patchkit.parity.metrics import DEFAULT_FIRST, ParityMetrics, compare_logprobs

__all__ = ["OracleResult", "SelectedLogprobs", "three_way", "version_violations"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedLogprobs:
    """Log-probabilities of generated tokens, with the tokens they belong to.

    Attributes:
        logprobs: float32 ``[tokens]``.
        sequences: int64 ``[tokens]``, number of the sequence.
        positions: int64 ``[tokens]``, absolute position (the prompt counts).
        token_ids: int64 ``[tokens]``.
    """

    logprobs: torch.Tensor
    sequences: torch.Tensor
    positions: torch.Tensor
    token_ids: torch.Tensor

    def __len__(self) -> int:
        return self.logprobs.numel()

    @classmethod
    def from_sequences(
        cls,
        logprobs: Sequence[Sequence[float]] | Sequence[torch.Tensor],
        token_ids: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        *,
        sequence_numbers: Sequence[int] | None = None,
    ) -> SelectedLogprobs:
        """Build from one list per sequence; generated tokens only.

        Args:
            logprobs: Per sequence, the log-probability of each generated token.
                Python floats must come from float32 values (as vLLM's do): the
                way through a double loses nothing.
            token_ids: Per sequence, the generated tokens.
            prompt_lengths: Where the generated tokens start.
            sequence_numbers: Global numbers of these sequences; 0, 1, … if absent.
        """
        numbers = range(len(token_ids)) if sequence_numbers is None else sequence_numbers
        rows = [torch.as_tensor(r, dtype=_float_dtype(r)).flatten() for r in logprobs]
        spans = list(zip(prompt_lengths, token_ids, strict=True))
        return cls(
            logprobs=torch.cat(rows) if rows else torch.zeros(0),
            sequences=torch.tensor(
                [n for n, t in zip(numbers, token_ids, strict=True) for _ in t], dtype=torch.int64
            ),
            positions=torch.tensor(
                [start + i for start, t in spans for i in range(len(t))], dtype=torch.int64
            ),
            token_ids=torch.tensor([i for t in token_ids for i in t], dtype=torch.int64),
        )

    @classmethod
    def from_padded(
        cls,
        logprobs: torch.Tensor,
        token_ids: torch.Tensor,
        mask: torch.Tensor,
        *,
        sequence_numbers: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> SelectedLogprobs:
        """Build from ``[batch, length]`` tensors and the mask of generated tokens.

        Args:
            logprobs: ``logprobs[b, p]`` belongs to the token *at* position ``p``
                (not to the one that follows it).
            token_ids: ``[batch, length]``.
            mask: True where a generated token stands.
            sequence_numbers: ``[batch]`` global numbers; 0, 1, … if absent.
            position_ids: Absolute positions where they differ from the column
                (left padding, packing).
        """
        rows, columns = torch.nonzero(mask, as_tuple=True)
        return cls(
            logprobs=logprobs[rows, columns],
            sequences=rows if sequence_numbers is None else sequence_numbers[rows],
            positions=columns if position_ids is None else position_ids[rows, columns],
            token_ids=token_ids[rows, columns],
        )


def _float_dtype(row: Any) -> torch.dtype:
    # A tensor keeps its dtype, so that a wrong one is reported and not cast away.
    return row.dtype if isinstance(row, torch.Tensor) else torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleResult:
    """What one rank found about one policy version.

    Attributes:
        recompute: Rollout against recompute; None if there was no recompute.
        first_forward: Rollout against the first training forward, ditto.
        violations: Everything that is wrong, the metrics' own violations included.
    """

    recompute: ParityMetrics | None
    first_forward: ParityMetrics | None
    violations: tuple[Violation, ...]

    @property
    def exact(self) -> bool:
        return not self.violations

    @property
    def token_count(self) -> int:
        """Tokens of the rollout that were compared, counted once."""
        compared = [m.token_count for m in (self.recompute, self.first_forward) if m is not None]
        return max(compared, default=0)

    def as_dict(self) -> dict[str, Any]:
        return {
            "recompute": self.recompute.as_dict() if self.recompute else None,
            "first_forward": self.first_forward.as_dict() if self.first_forward else None,
            "violations": [v.as_dict() for v in self.violations],
        }


def three_way(
    rollout: SelectedLogprobs | None,
    recompute: SelectedLogprobs | None,
    first_forward: SelectedLogprobs | None,
    *,
    trainer_version: int,
    start_versions: int | Iterable[int],
    end_versions: int | Iterable[int],
    optimizer_version: int | None = None,
    first: int = DEFAULT_FIRST,
) -> OracleResult:
    """Judge one rank's tokens of one policy version.

    Args:
        rollout: What the engine reported. None is a violation.
        recompute: What the trainer computed without gradient. None means that the
            recompute was skipped, which is a violation and never "equal".
        first_forward: The training forward whose backward is about to run.
        trainer_version: Version of the weights that the trainer holds.
        start_versions: Version of the engine when each sequence (or all) started.
        end_versions: Version of the engine when each sequence (or all) ended.
        optimizer_version: Version after the last optimizer step, if tracked; it
            must still be ``trainer_version`` at the first forward.
        first: How many mismatches to describe.
    """
    start_versions, end_versions = (
        v if isinstance(v, int) else tuple(v) for v in (start_versions, end_versions)
    )
    violations = list(
        version_violations(trainer_version, start_versions, end_versions, optimizer_version)
    )
    if rollout is not None:
        violations += _unversioned(rollout, start=start_versions, end=end_versions)
    metrics: dict[str, ParityMetrics | None] = {"recompute": None, "first training forward": None}
    if rollout is None:
        violations.append(_absent("rollout", "the engine's log-probabilities were not given"))
    for name, other in (("recompute", recompute), ("first training forward", first_forward)):
        if other is None:
            violations.append(_absent(name, "it was skipped on this rank"))
        elif rollout is not None:
            metrics[name] = found = _compare(rollout, other, name, first)
            violations += found.violations
            if found.mismatch_count and not found.violations:
                violations.append(_differs(name, found))
    return OracleResult(
        recompute=metrics["recompute"],
        first_forward=metrics["first training forward"],
        violations=tuple(violations),
    )


def version_violations(
    trainer_version: int,
    start_versions: int | Iterable[int],
    end_versions: int | Iterable[int],
    optimizer_version: int | None = None,
) -> Iterable[Violation]:
    """Start version = end version = the trainer's version, for every sequence."""
    for label, versions in (("start", start_versions), ("end", end_versions)):
        values = [versions] if isinstance(versions, int) else list(versions)
        wrong = [(i, v) for i, v in enumerate(values) if v != trainer_version]
        if not wrong:
            continue
        ahead = any(v > trainer_version for _, v in wrong)
        yield Violation(
            subject=f"policy version at the rollout's {label}",
            problem="not the trainer's version",
            expected=str(trainer_version),
            found=", ".join(f"sequence {i}: version {v}" for i, v in wrong[:DEFAULT_FIRST])
            + (f" and {len(wrong) - DEFAULT_FIRST} more" if len(wrong) > DEFAULT_FIRST else ""),
            remedy=(
                "the trainer's weights are older than the engine's: load that version"
                if ahead
                else "drain or cancel requests at each weight update, and drop these sequences"
            ),
        )
    if optimizer_version is not None and optimizer_version != trainer_version:
        yield Violation(
            subject="first training forward",
            problem="an optimizer step came before it",
            expected=f"weights of version {trainer_version}",
            found=f"weights of version {optimizer_version}",
            remedy="compare the first forward of a version before its first optimizer step",
        )


def _unversioned(
    rollout: SelectedLogprobs, **versions: int | tuple[int, ...]
) -> Iterable[Violation]:
    """Sequences for which no version was given: none of a short list would be wrong."""
    sequences = rollout.sequences.unique().numel()
    for label, given in versions.items():
        if not isinstance(given, int) and len(given) < sequences:
            yield Violation(
                subject=f"policy version at the rollout's {label}",
                problem="not given for every sequence",
                expected=f"{sequences} versions, or one for all",
                found=str(len(given)),
                remedy="give the version that the engine reported for each sequence",
            )


def _compare(
    rollout: SelectedLogprobs, other: SelectedLogprobs, name: str, first: int
) -> ParityMetrics:
    violations = [
        Violation(
            subject=f"{column} of rollout and {name}",
            problem="different tokens are compared",
            expected=_excerpt(getattr(rollout, column), at),
            found=_excerpt(getattr(other, column), at),
            remedy="compare by token ids and absolute positions; never rebuild tokens from text",
        )
        for column in ("sequences", "positions", "token_ids")
        if (at := _first_difference(getattr(rollout, column), getattr(other, column))) is not None
    ]
    if violations:
        count = max(len(rollout), len(other))
        return ParityMetrics(
            token_count=count, mismatch_count=count, violations=tuple(violations), finite_count=0
        )
    return compare_logprobs(
        rollout.logprobs,
        other.logprobs,
        positions=rollout.positions,
        token_ids=rollout.token_ids,
        sequences=rollout.sequences,
        first=first,
        names=("rollout", name),
    )


def _first_difference(a: torch.Tensor, b: torch.Tensor) -> int | None:
    a, b = a.cpu().flatten(), b.cpu().flatten()
    shared = min(a.numel(), b.numel())
    unequal = torch.nonzero(a[:shared] != b[:shared]).flatten()
    if unequal.numel():
        return int(unequal[0])
    return None if a.numel() == b.numel() else shared


def _excerpt(values: torch.Tensor, at: int) -> str:
    shown = values.cpu().flatten()[at : at + 4].tolist()
    return f"{values.numel()} entries; from entry {at}: {shown}"


def _absent(name: str, why: str) -> Violation:
    return Violation(
        subject=name,
        problem=f"missing: {why}",
        expected="rollout, recompute and first training forward of every version",
        found="none",
        remedy="give it to the gate on every rank; a rank without tokens gives an empty one",
    )


def _differs(name: str, metrics: ParityMetrics) -> Violation:
    return Violation(
        subject=f"rollout and {name}",
        problem="log-probabilities differ in their float32 bits",
        expected=f"0 of {metrics.token_count} tokens",
        found=f"{metrics.mismatch_count} of {metrics.token_count} tokens, "
        f"max |difference| {metrics.max_absdiff:.3e}, k3 mean {metrics.k3_mean:.3e}; "
        + "; ".join(str(m) for m in metrics.first_mismatches[:3]),
        remedy="`patchkit doctor` finds the first operator that differs",
    )
