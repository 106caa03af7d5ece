"""The parity gate: all ranks pass together or raise together, before backward.

Each rank judges its own tokens with :func:`~patchkit.parity.oracle.three_way`
and then meets the others in two small all-reduces on a gloo group of the gate's
own. Their size does not depend on the number of ranks, parameters or tokens.
Only when somebody failed do the ranks exchange descriptions.

A rank that never arrives (killed, or stuck in another collective) is noticed
within :attr:`ParityGate.bound_s`: the gate waits on an asynchronous collective
against the clock instead of trusting a backend's time-out, and survivors tell
each other through the group's store. What the gate cannot bound is a collective
that *others* started: ranks that hang inside FSDP's own all-gather leave it when
that group's time-out says so.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from patchkit.errors import ConfigurationError, PatchkitError, Violation, ViolationsError
from patchkit.parity.metrics import ParityMetrics
from patchkit.parity.oracle import OracleResult, SelectedLogprobs, three_way

__all__ = [
    "GateClosedError",
    "GateReport",
    "GateStep",
    "ParityError",
    "ParityGate",
    "RankLostError",
]

_MAX_VIOLATIONS_PER_RANK = 8
_MAX_DETAIL_BYTES = 16384
_NOTICE_EVERY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """What all ranks together found at one passage of the gate.

    Attributes:
        step: The caller's step number.
        version: The policy version.
        world_size: Ranks that took part.
        recompute: Rollout against recompute, over all ranks.
        first_forward: Rollout against the first training forward, ditto.
        failed_ranks: How many ranks had something wrong.
        seconds: What the passage cost this rank, waiting for others included.
    """

    step: int
    version: int
    world_size: int
    recompute: ParityMetrics
    first_forward: ParityMetrics
    failed_ranks: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "version": self.version,
            "world_size": self.world_size,
            "recompute": self.recompute.as_dict(),
            "first_forward": self.first_forward.as_dict(),
            "failed_ranks": self.failed_ranks,
            "seconds": self.seconds,
        }


class ParityError(ViolationsError):
    """The gate did not open; raised on every rank.

    Attributes:
        report: The aggregated metrics.
    """

    def __init__(self, violations: Iterable[Violation], report: GateReport) -> None:
        self.report = report
        super().__init__(
            f"parity gate: step {report.step}, policy version {report.version}: no backward",
            violations,
        )

    def __reduce__(self) -> Any:
        # Ranks send their errors to the driver.
        return type(self), (self.violations, self.report)


class RankLostError(PatchkitError):
    """Some rank did not arrive at the gate within its bound.

    Attributes:
        missing: Group ranks that neither arrived nor reported; empty if the store
            that would tell is gone too.
        bound_s: The bound that was kept.
    """

    def __init__(self, missing: Sequence[int], bound_s: float, reason: str, rank: int) -> None:
        self.missing = tuple(missing)
        self.bound_s = bound_s
        self.reason, self.rank = reason, rank
        who = ", ".join(map(str, missing)) or "unknown (the store does not answer either)"
        super().__init__(
            f"parity gate, seen from rank {rank}: rank(s) {who} did not arrive within "
            f"{bound_s:g} s: dead, or stuck in another collective ({reason}). No backward has "
            "run. Stop all ranks and restart from the last checkpoint; if the ranks are only "
            "slow, give ParityGate a larger timeout_s."
        )

    def __reduce__(self) -> Any:
        return type(self), (self.missing, self.bound_s, self.reason, self.rank)


class GateClosedError(PatchkitError):
    """The gate was used after a rank had been lost."""

    def __init__(self) -> None:
        super().__init__(
            "parity gate: a rank was lost earlier, so no step can be proven any more. "
            "Restart the process group and build a new gate."
        )

    def __reduce__(self) -> Any:
        return type(self), ()


@dataclass(slots=True)
class GateStep:
    """What one rank hands to the gate for one step; see :meth:`ParityGate.step`.

    Attributes:
        rollout: The engine's log-probabilities of this rank's tokens.
        recompute: The trainer's, without gradient.
        first_forward: Those of the training forward.
        start_versions: Engine version when each sequence (or all) started.
        end_versions: Engine version when each sequence (or all) ended.
        optimizer_version: Version after the last optimizer step, where tracked.
        oracle: This rank's own result, after the gate.
        report: Everybody's, after the gate.
    """

    version: int
    number: int
    rollout: SelectedLogprobs | None = None
    recompute: SelectedLogprobs | None = None
    first_forward: SelectedLogprobs | None = None
    start_versions: int | Iterable[int] | None = None
    end_versions: int | Iterable[int] | None = None
    optimizer_version: int | None = None
    oracle: OracleResult | None = None
    report: GateReport | None = None
    _gate: ParityGate | None = field(default=None, repr=False)

    def __enter__(self) -> GateStep:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._gate is not None
        if error is None:
            try:
                self.oracle = self._judge()
            except Exception as e:  # the other ranks are waiting: report, never just leave
                error = e
        violations = [] if error is None else [_raised(error)]
        try:
            self.report = self._gate.agree(
                violations, oracle=self.oracle, version=self.version, step=self.number
            )
        except PatchkitError as refusal:
            if error is not None and not isinstance(error, Exception):
                return  # SystemExit and KeyboardInterrupt go on; the others know already
            raise refusal from error

    def _judge(self) -> OracleResult:
        unknown = [
            Violation(
                subject=f"policy version at the rollout's {label}",
                problem="not given",
                expected=f"{self.version} for every sequence",
                found="None",
                remedy=f"set step.{label}_versions from what the engine reported",
            )
            for label, value in (("start", self.start_versions), ("end", self.end_versions))
            if value is None
        ]
        result = three_way(
            self.rollout,
            self.recompute,
            self.first_forward,
            trainer_version=self.version,
            # What is unknown has been said above.
            start_versions=self.version if self.start_versions is None else self.start_versions,
            end_versions=self.version if self.end_versions is None else self.end_versions,
            optimizer_version=self.optimizer_version,
        )
        return OracleResult(
            recompute=result.recompute,
            first_forward=result.first_forward,
            violations=(*unknown, *result.violations),
        )


class ParityGate:
    """Makes the ranks of one FSDP group pass or raise together.

    Build it on every rank of the group, at the same point of the program: it
    opens a gloo group of its own.

    Args:
        group: The ranks that train together; the default group if None. Without
            an initialised process group the gate works for the one process.
        timeout_s: How long a rank waits for the others.
        grace_s: How much longer survivors wait to learn who is missing.

    Example:
        >>> gate = ParityGate(timeout_s=60)                      # doctest: +SKIP
        >>> with gate.step(version=3) as step:                   # doctest: +SKIP
        ...     step.rollout, step.start_versions, step.end_versions = rollout, 3, 3
        ...     step.recompute = recompute()
        ...     step.first_forward = forward()
        >>> loss.backward()                                      # doctest: +SKIP
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float = 60.0,
        grace_s: float = 2.0,
    ) -> None:
        if not (timeout_s > 0 and math.isfinite(timeout_s) and grace_s > 0):
            raise ConfigurationError(
                f"ParityGate: timeout_s must be positive and finite, found {timeout_s!r} "
                f"(grace_s {grace_s!r}): a gate without a bound can wait for ever"
            )
        self.timeout_s = timeout_s
        self.grace_s = grace_s
        self._passages = 0
        self._steps = 0
        self._closed = False
        self._group: dist.ProcessGroup | None = None
        self._store: Any = None
        self.rank, self.world_size = 0, 1
        self._before_group = not _initialized()
        if self._before_group:
            if group is not None:
                raise ConfigurationError(
                    "ParityGate: a process group was given, but torch.distributed is not "
                    "initialised in this process; call init_process_group first"
                )
            return
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.world_size = len(ranks)
        self.rank = dist.get_rank(group)
        if self.world_size == 1:
            return
        self._group = dist.new_group(
            ranks,
            backend="gloo",
            # A little longer than our own clock, so that it is ours that decides.
            timeout=timedelta(seconds=timeout_s + grace_s),
            use_local_synchronization=True,
            group_desc="patchkit parity gate",
        )
        self._store = dist.distributed_c10d._get_process_group_store(self._group)

    @property
    def bound_s(self) -> float:
        """Longest time that :meth:`agree` takes, whatever happens to other ranks.

        Two exchanges (verdicts, and descriptions when somebody failed) share one
        clock; the grace is for learning who is missing.
        """
        return self.timeout_s + self.grace_s

    def step(self, *, version: int, number: int | None = None) -> GateStep:
        """Open a step: fill it inside ``with``; leaving it is the gate.

        Args:
            version: The policy version that the trainer holds.
            number: A step number that must be equal on all ranks; counted if None.
        """
        self._steps += 1
        return GateStep(
            version=version, number=self._steps if number is None else number, _gate=self
        )

    def agree(
        self,
        violations: Sequence[Violation],
        *,
        oracle: OracleResult | None = None,
        version: int = 0,
        step: int = 0,
    ) -> GateReport:
        """Meet the other ranks with this rank's verdict.

        Args:
            violations: What is wrong on this rank; what the oracle says already may be
                left out.
            oracle: This rank's metrics; None counts as no tokens.
            version: Must be equal on all ranks.
            step: Must be equal on all ranks.

        Returns:
            The aggregated report, if every rank is satisfied and at least one
            token was compared.

        Raises:
            ParityError: On every rank, if any rank is not satisfied.
            ConfigurationError: The process group came after the gate.
            RankLostError: If a rank does not arrive; the gate is closed then.
            GateClosedError: If it is closed already.
        """
        if self._closed:
            raise GateClosedError
        if self._before_group and _initialized() and dist.get_world_size() > 1:
            raise ConfigurationError(
                "ParityGate: it was built before init_process_group and knows no other rank, so "
                "that each would pass or raise for itself; build it afterwards"
            )
        if oracle is not None:
            violations = [*violations, *(v for v in oracle.violations if v not in violations)]
        started = time.monotonic()
        deadline = started + self.timeout_s
        self._passages += 1
        sums = torch.tensor([float(bool(violations)), *_sums(oracle)], dtype=torch.float64)
        maxima = torch.tensor(
            [version, -version, step, -step, *_maxima(oracle)], dtype=torch.float64
        )
        self._all_reduce(sums, dist.ReduceOp.SUM, deadline)
        self._all_reduce(maxima, dist.ReduceOp.MAX, deadline)
        report = GateReport(
            step=step,
            version=version,
            world_size=self.world_size,
            recompute=_aggregate(sums[1:6], maxima[4:6]),
            first_forward=_aggregate(sums[6:11], maxima[6:8]),
            failed_ranks=int(sums[0]),
            seconds=time.monotonic() - started,
        )
        uneven = [
            label
            for label, low, high in (
                ("policy version", -maxima[1], maxima[0]),
                ("step", -maxima[3], maxima[2]),
            )
            if low != high
        ]
        empty = report.recompute.token_count == 0 or report.first_forward.token_count == 0
        if not (report.failed_ranks or uneven or empty):
            return report
        found = [
            Violation(
                subject="all ranks",
                problem="no token was compared, so nothing was shown",
                expected="at least one generated token in each comparison",
                found=f"recompute {report.recompute.token_count}, "
                f"first forward {report.first_forward.token_count}",
                remedy="check the masks: they must select the generated tokens",
            )
        ] * (empty and not report.failed_ranks)
        found += self._exchange(violations, version, step, uneven, deadline)
        raise ParityError(found, report)

    def _exchange(
        self,
        violations: Sequence[Violation],
        version: int,
        step: int,
        uneven: Sequence[str],
        deadline: float,
    ) -> list[Violation]:
        mine = {
            "version": version,
            "step": step,
            "count": len(violations),
            "violations": [v.as_dict() for v in violations[:_MAX_VIOLATIONS_PER_RANK]],
        }
        everybody = self._all_gather(_encode(mine), deadline)
        found = []
        for label, key in (("policy version", "version"), ("step", "step")):
            if label in uneven:
                found.append(
                    Violation(
                        subject=f"{label} of the ranks",
                        problem="the ranks are not at the same one",
                        expected="one number",
                        found=", ".join(f"rank {r}: {d[key]}" for r, d in enumerate(everybody)),
                        remedy="every rank passes the gate once per step, skipped steps too",
                    )
                )
        for rank, detail in enumerate(everybody):
            for v in detail["violations"]:
                found.append(Violation(**{**v, "subject": f"rank {rank}: {v['subject']}"}))
            if (left := detail["count"] - len(detail["violations"])) > 0:
                found.append(
                    Violation(subject=f"rank {rank}", problem=f"{left} more violations, not sent")
                )
        return found

    # -- collectives against the clock -------------------------------------------------

    def _all_reduce(self, tensor: torch.Tensor, op: Any, deadline: float) -> None:
        if self._group is not None:
            self._finish(
                lambda: dist.all_reduce(tensor, op=op, group=self._group, async_op=True), deadline
            )

    def _all_gather(self, data: bytes, deadline: float) -> list[dict[str, Any]]:
        if self._group is None:
            return [json.loads(data)]
        group = self._group
        own = torch.tensor([len(data)], dtype=torch.int64)
        sizes = [torch.zeros_like(own) for _ in range(self.world_size)]
        self._finish(lambda: dist.all_gather(sizes, own, group=group, async_op=True), deadline)
        longest = max(int(s) for s in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = [torch.zeros_like(padded) for _ in range(self.world_size)]
        self._finish(lambda: dist.all_gather(rows, padded, group=group, async_op=True), deadline)
        return [
            json.loads(bytes(row[: int(size)].tolist()))
            for row, size in zip(rows, sizes, strict=True)
        ]

    def _finish(self, start: Any, deadline: float) -> None:
        """Run one asynchronous collective to its end, or declare who is lost."""
        pause, next_notice = 0.0002, time.monotonic() + _NOTICE_EVERY_S
        try:
            work = start()
            while not work.is_completed():
                now = time.monotonic()
                if now >= deadline:
                    raise TimeoutError("timed out")
                if now >= next_notice:
                    next_notice = now + _NOTICE_EVERY_S
                    if self._store.check([self._key("trouble")]):
                        raise ConnectionError("another rank noticed it")
                time.sleep(min(pause, max(deadline - now, 0)))
                pause = min(pause * 1.5, 0.01)
            work.wait()
        except Exception as e:
            self._closed = True
            reason = f"{type(e).__name__}: {e}".splitlines()[0][:200]
            raise RankLostError(
                self._who_is_missing(deadline), self.bound_s, reason, self.rank
            ) from e

    def _key(self, name: object) -> str:
        return f"patchkit-gate/{self._passages}/{name}"

    def _who_is_missing(self, deadline: float) -> list[int]:
        """Survivors sign in at the store; whoever does not is missing.

        This happens only after a failure, so a good step writes nothing there.
        """
        others = [r for r in range(self.world_size) if r != self.rank]
        try:
            self._store.set(self._key(self.rank), "alive")
            self._store.set(self._key("trouble"), "1")
            until = min(deadline, time.monotonic()) + self.grace_s
            while True:
                missing = [r for r in others if not self._store.check([self._key(r)])]
                if not missing or time.monotonic() >= until:
                    return missing
                time.sleep(0.05)
        except Exception:  # the store's host may be the very rank that died
            return []


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _sums(oracle: OracleResult | None) -> list[float]:
    return [
        value
        for m in ((oracle.recompute, oracle.first_forward) if oracle else (None, None))
        for value in (
            (
                m.token_count,
                m.mismatch_count,
                m.finite_count,
                m.k3_mean * m.finite_count if m.finite_count else 0.0,
                len(m.violations),
            )
            if m
            else (0, 0, 0, 0.0, 0)
        )
    ]


def _maxima(oracle: OracleResult | None) -> list[float]:
    return [
        value
        for m in ((oracle.recompute, oracle.first_forward) if oracle else (None, None))
        for value in ((m.max_absdiff, m.k3_max) if m else (0.0, 0.0))
    ]


def _aggregate(sums: torch.Tensor, maxima: torch.Tensor) -> ParityMetrics:
    tokens, mismatches, finite, k3, _ = sums.tolist()
    return ParityMetrics(
        token_count=int(tokens),
        mismatch_count=int(mismatches),
        finite_count=int(finite),
        k3_mean=k3 / finite if finite else 0.0,
        max_absdiff=float(maxima[0]),
        k3_max=float(maxima[1]),
    )


def _raised(error: BaseException) -> Violation:
    return Violation(
        subject="this step",
        problem=f"raised {type(error).__name__}",
        expected="rollout, recompute and first training forward",
        found=str(error)[:500] or type(error).__name__,
        remedy="repair the cause on that rank; no rank has run backward",
    )


def _encode(detail: dict[str, Any]) -> bytes:
    data = json.dumps(detail).encode()
    while len(data) > _MAX_DETAIL_BYTES and len(detail["violations"]) > 1:
        detail = {**detail, "violations": detail["violations"][:-1]}
        data = json.dumps(detail).encode()
    if len(data) > _MAX_DETAIL_BYTES:
        only = {k: v[:1000] for k, v in detail["violations"][0].items()}
        data = json.dumps({**detail, "violations": [only]}).encode()
    return data
