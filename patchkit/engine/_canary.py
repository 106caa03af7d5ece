"""Installed is not reached: a trial run that counts, and names what ran instead.

For its duration the installed functions' own code is exchanged for a counting
detour. That reaches every holder, bound methods and registries included, and
compilers notice it; afterwards the code is exchanged back and nothing is left.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import TYPE_CHECKING, Any

from patchkit.engine import _detour as detour
from patchkit.engine import _inert as inert
from patchkit.engine import _process as process
from patchkit.engine import _shape as shape
from patchkit.engine.errors import CanaryBusyError, NotReachedError, violation
from patchkit.errors import Violation
from patchkit.symbols import Symbol

if TYPE_CHECKING:
    from patchkit.engine._installation import Installation
    from patchkit.engine._plan import PlannedPatch

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, eq=False)
class _Count:
    """One counted function, and how to give it its code back."""

    identity: str
    function: FunctionType
    code: CodeType
    names: tuple[str, str]
    ticks: itertools.count[int]
    traces: itertools.count[int]


class Canary:
    """A counted run; made by :meth:`Installation.canary`.

    Attributes:
        hits: Patch identity -> calls or traces in this run, after it ended.
        traced: Those of the hits that a compiler's trace made: what compiled code keeps.
        by_evidence: Patches that count as reached through stored evidence.
        instead: Patch identity -> what ran under that name instead.
    """

    def __init__(
        self, installation: Installation, evidence: Mapping[str, int], watch_calls: bool
    ) -> None:
        self.hits: dict[str, int] = {}
        self.traced: dict[str, int] = {}
        self.by_evidence: tuple[str, ...] = ()
        self.instead: dict[str, list[str]] = {}
        self._installation = installation
        self._evidence = evidence
        self._counts: list[_Count] = []
        self._calls: Counter[CodeType] = Counter()
        self._homes: dict[CodeType, str] = {}
        self._watch_calls = watch_calls
        self._profilers: tuple[Any, Any] | None = None
        self._wanted = {Symbol.parse(p.patch.symbol).name for p in installation._patches}

    def __enter__(self) -> Canary:
        with process.lock:
            if self._installation._canary is not None:
                raise CanaryBusyError(self._installation.adapter.name)
            self._installation._canary = self
            for planned in self._installation._patches:
                self.include(planned)
        if self._watch_calls and sys.getprofile() is None:
            self._profilers = (sys.getprofile(), threading.getprofile())
            threading.setprofile(self._profile)
            sys.setprofile(self._profile)
        return self

    def include(self, planned: PlannedPatch) -> None:
        """Count this patch from now on; also called when a pending one arrives."""
        function = planned.built.counted if planned.built is not None else None
        if function is None:
            return
        number = next(_numbers)
        names = (f"hit_{number}", f"call_{number}")
        ticks, traces = itertools.count(), itertools.count()
        space = inert.namespace(sys.modules[__name__])
        space[names[0]] = _ticker(ticks, traces)
        space[names[1]] = shape.twin(function)
        code = detour.rerouted(function, __name__, *names)
        count = _Count(planned.patch.identity, function, function.__code__, names, ticks, traces)
        self._counts.append(count)
        function.__code__ = code

    def stop(self) -> None:
        """Give every function its code back. Idempotent."""
        if self._profilers is not None:
            sys.setprofile(self._profilers[0])
            threading.setprofile(self._profilers[1])  # type: ignore[arg-type]
            self._profilers = None
        space = inert.namespace(sys.modules[__name__])
        hits: dict[str, int] = {}
        traced: dict[str, int] = {}
        for count in self._counts:
            count.function.__code__ = count.code
            hits[count.identity] = hits.get(count.identity, 0) + next(count.ticks)
            if traces := next(count.traces):
                traced[count.identity] = traced.get(count.identity, 0) + traces
        for count in self._counts:
            for name in count.names:
                space.pop(name, None)
        if self._counts:
            self.hits, self.traced = hits, traced
        self._counts = []
        if self._installation._canary is self:
            self._installation._canary = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with process.lock:
            self.stop()
            installation = self._installation
            for identity, hits in self.hits.items():
                installation.hits[identity] = installation.hits.get(identity, 0) + hits
        if error is None:
            missed = self._missed()
            if missed:
                raise NotReachedError(
                    f"adapter {installation.adapter.name!r} ({installation.side}) is installed, "
                    "but the canary run did not come by all of it",
                    missed,
                )

    def _missed(self) -> list[Violation]:
        found, evident = [], []
        for planned in self._installation._patches:
            identity = planned.patch.identity
            if self.hits.get(identity) or not planned.patch.required:
                continue
            if not planned.pending and (planned.built is None or planned.built.counted is None):
                continue  # a value or a class: nothing to count, docs/limits.md says so
            if self._evidence.get(identity):
                evident.append(identity)
                continue
            self.instead[identity] = self._ran_instead(planned)
            found.append(self._told(planned))
        self.by_evidence = tuple(evident)
        return found

    def _told(self, planned: PlannedPatch) -> Violation:
        identity = planned.patch.identity
        if planned.pending:
            what = f"its module {planned.module} was never imported"
        else:
            what = "no call and no trace"
        instead = "; ".join(self.instead[identity]) or "nothing of that name"
        return violation(
            identity,
            "was not reached",
            expected="at least one hit",
            found=f"{what}; what ran instead: {instead}",
            remedy="patch what runs instead, make the run come by, or declare required=False",
        )

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name in self._wanted:
            self._calls[frame.f_code] += 1
            self._homes.setdefault(frame.f_code, str(frame.f_globals.get("__name__")))

    def _ran_instead(self, planned: PlannedPatch) -> list[str]:
        name = Symbol.parse(planned.patch.symbol).name
        originals = {
            f.__code__
            for f in (inert.layers(planned.target.value) if planned.target is not None else ())
            if type(f) is FunctionType
        }
        told = []
        for code, calls in self._calls.most_common():
            if code.co_name != name:
                continue
            home = self._homes[code]
            if home == "patchkit.engine.generated":
                continue
            where = f"{inert.short_file(code.co_filename, home)}:{code.co_firstlineno}"
            qualname = getattr(code, "co_qualname", code.co_name)  # 3.11
            who = f"{home}:{qualname} ({where}, {calls} calls)"
            if code in originals:
                who += ", the original itself, through a reference that was not found"
            told.append(who)
        return told[:5]


def _ticker(ticks: itertools.count[int], traces: itertools.count[int]) -> Any:
    def hit() -> None:
        next(ticks)
        # Not imported for this: without it loaded, nothing is being traced.
        guards = sys.modules.get("torch._guards")
        if guards is not None and guards.TracingContext.try_get() is not None:
            next(traces)

    # torch.compile runs such a function while tracing and leaves nothing of it in the
    # graph: a trace is a hit, and the compiled code is the same as without a canary.
    hit._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return hit
