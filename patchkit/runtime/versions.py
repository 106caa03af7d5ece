"""Which policy version drew which token, and keeping updates away from requests.

For an on-policy claim every token of a sequence must come from the version that the
trainer holds. :class:`UpdateBarrier` makes that so for a rollout that runs beside
the trainer: at an update no request is under way. Where weights change under
running requests on purpose (a profile with the claim ``in_flight``), the lag of each
token is measured instead, and nothing is called on-policy.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from patchkit.errors import ConfigurationError, PatchkitError, Violation, ViolationsError

__all__ = [
    "BarrierTimeoutError",
    "LagReport",
    "Span",
    "TrajectoryRefusedError",
    "UpdateBarrier",
    "lag_report",
    "output_spans",
    "require_on_policy",
]


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``start`` to ``end`` (exclusive) of a sequence came from ``version``."""

    version: int
    start: int
    end: int


class TrajectoryRefusedError(ViolationsError):
    """Sequences that are not of the trainer's version throughout."""


class BarrierTimeoutError(PatchkitError):
    """Requests did not end in time, so the update did not happen.

    Attributes:
        running: How many were left.
        waited_s: How long was waited.
    """

    def __init__(self, running: int, waited_s: float, cancelled: bool) -> None:
        self.running, self.waited_s, self.cancelled = running, waited_s, cancelled
        how = "and were cancelled, but did not end" if cancelled else "and nothing cancels them"
        super().__init__(
            f"weight update refused: {running} request(s) still run after {waited_s:g} s {how}. "
            "Nothing was updated; requests may start again. Raise the time limit, or give "
            "cancel= a function that aborts them."
        )

    def __reduce__(self) -> Any:
        return type(self), (self.running, self.waited_s, self.cancelled)


def output_spans(completion: Any) -> tuple[Span, ...]:
    """What the engine itself says about one finished output.

    Args:
        completion: vLLM's ``CompletionOutput``; its ``weight_versions`` are labels
            that :class:`~patchkit.runtime.sync.WeightSync` set at each commit.

    Raises:
        TrajectoryRefusedError: The engine does not say, or its labels are not policy
            versions, or they leave tokens out.
    """
    given = getattr(completion, "weight_versions", None)
    tokens = len(completion.token_ids)
    try:
        spans = tuple(Span(int(s.version), s.start, s.end) for s in given or ())
    except ValueError:
        spans = ()
    covered = [i for s in spans for i in range(s.start, s.end)]
    if covered != list(range(tokens)):
        raise TrajectoryRefusedError(
            "the engine does not say which weights drew which token",
            [
                Violation(
                    subject="weight_versions",
                    problem="no policy version for every token",
                    expected=f"spans of versions over {tokens} tokens",
                    found=repr(given),
                    remedy="begin weight synchronisation before generating; a version of vLLM "
                    "without weight versions needs an UpdateBarrier and the version at its start",
                )
            ],
        )
    return spans


def require_on_policy(
    sequences: Sequence[Iterable[Span]], trainer_version: int
) -> tuple[list[int], list[int]]:
    """Start and end version of each sequence, if all are the trainer's.

    Raises:
        TrajectoryRefusedError: Naming each sequence that is not, and why.
    """
    starts, ends, violations = [], [], []
    for number, spans in enumerate(map(tuple, sequences)):
        if not spans:
            violations.append(_refused(number, "has no tokens", trainer_version, "no span"))
            continue
        starts.append(spans[0].version)
        ends.append(spans[-1].version)
        seen = sorted({s.version for s in spans})
        if seen == [trainer_version]:
            continue
        told = ", ".join(f"tokens {s.start} to {s.end}: version {s.version}" for s in spans)
        problem = (
            "mixes versions: weights changed while it ran"
            if len(seen) > 1
            else f"is {'stale' if seen[0] < trainer_version else 'ahead of the trainer'}"
        )
        violations.append(_refused(number, problem, trainer_version, told))
    if violations:
        raise TrajectoryRefusedError(
            f"{len(violations)} of {len(sequences)} sequences are not of version {trainer_version}",
            violations,
        )
    return starts, ends


def _refused(number: int, problem: str, version: int, found: str) -> Violation:
    return Violation(
        subject=f"sequence {number}",
        problem=problem,
        expected=f"version {version} from start to end",
        found=found,
        remedy="drop the sequence, or put an UpdateBarrier between rollout and updates",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LagReport:
    """How far behind the trainer the weights were, token by token.

    Attributes:
        tokens: Tokens counted.
        mean: Mean lag in versions.
        largest: Largest lag.
        histogram: Tokens by lag.
        mixed: Sequences with more than one version.
        on_policy: Never true for a positive lag anywhere, nor for no tokens.
    """

    tokens: int
    mean: float
    largest: int
    histogram: dict[int, int]
    mixed: int

    @property
    def on_policy(self) -> bool:
        return self.tokens > 0 and set(self.histogram) == {0}

    def as_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "mean": self.mean,
            "largest": self.largest,
            "histogram": {str(k): v for k, v in sorted(self.histogram.items())},
            "mixed": self.mixed,
            "on_policy": self.on_policy,
        }


def lag_report(sequences: Iterable[Iterable[Span]], trainer_version: int) -> LagReport:
    """Measure the version lag of every token."""
    histogram: Counter[int] = Counter()
    mixed = 0
    for spans in map(tuple, sequences):
        mixed += len({s.version for s in spans}) > 1
        for s in spans:
            histogram[trainer_version - s.version] += s.end - s.start
    tokens = sum(histogram.values())
    total = sum(lag * n for lag, n in histogram.items())
    return LagReport(
        tokens=tokens,
        mean=total / tokens if tokens else 0.0,
        largest=max(histogram, default=0),
        histogram=dict(histogram),
        mixed=mixed,
    )


class UpdateBarrier:
    """Requests share it, updates own it: no request is under way during an update.

    An update stops new requests from starting, waits for those under way (or has
    them cancelled), and lets requests start again when it is over, whether it
    succeeded or not. Threads use :meth:`request` and :meth:`update`, coroutines
    :meth:`arequest` and :meth:`aupdate`; both kinds may be mixed.

    Args:
        timeout_s: How long an update waits for requests to end.
        cancel: Aborts what is under way; called once when the time is up, and
            then ``grace_s`` more are waited.
        grace_s: See ``cancel``.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        cancel: Callable[[], Any] | None = None,
        grace_s: float = 5.0,
    ) -> None:
        if timeout_s < 0 or timeout_s == float("inf") or grace_s <= 0:
            raise ConfigurationError("UpdateBarrier: timeout_s and grace_s must be finite times")
        self.timeout_s, self.grace_s = timeout_s, grace_s
        self._cancel = cancel
        self._condition = threading.Condition()
        self._running = 0
        self._updating = False

    @property
    def running(self) -> int:
        """Requests under way."""
        return self._running

    @contextmanager
    def request(self) -> Iterator[None]:
        """Be a request; waits while an update is under way."""
        with self._condition:
            self._condition.wait_for(lambda: not self._updating)
            self._running += 1
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def update(self) -> Iterator[None]:
        """Be the update; one at a time.

        Raises:
            BarrierTimeoutError: Requests did not end; nothing was updated.
        """
        begun = time.monotonic()
        with self._condition:
            if not self._condition.wait_for(lambda: not self._updating, self.timeout_s):
                raise BarrierTimeoutError(self._running, self.timeout_s, cancelled=False)
            self._updating = True
        try:
            self._drain(begun)
            yield
        finally:
            with self._condition:
                self._updating = False
                self._condition.notify_all()

    def _drain(self, begun: float) -> None:
        def none() -> bool:
            return self._running == 0

        with self._condition:
            left = self.timeout_s - (time.monotonic() - begun)
            if self._condition.wait_for(none, max(left, 0)):
                return
        if self._cancel is not None:
            self._cancel()  # outside the lock: it ends requests, which need the lock
            with self._condition:
                if self._condition.wait_for(none, self.grace_s):
                    return
        raise BarrierTimeoutError(
            self._running, time.monotonic() - begun, cancelled=self._cancel is not None
        )

    def _leave(self) -> None:
        with self._condition:
            self._running -= 1
            self._condition.notify_all()

    @asynccontextmanager
    async def arequest(self) -> AsyncIterator[None]:
        """The same for a coroutine; the event loop is never blocked."""
        while not self._enter_at_once():
            await asyncio.sleep(0.005)
        try:
            yield
        finally:
            self._leave()

    def _enter_at_once(self) -> bool:
        with self._condition:
            if self._updating:
                return False
            self._running += 1
            return True

    @asynccontextmanager
    async def aupdate(self) -> AsyncIterator[None]:
        """The same for a coroutine; requests of this loop go on while it waits."""
        # Entered and left in a thread of its own: it sleeps on a condition.
        context = self.update()
        await asyncio.to_thread(context.__enter__)
        try:
            yield
        finally:
            context.__exit__(None, None, None)
