"""Whether the processes of an engine are still there, while something waits for them.

An engine core that is killed says nothing, and what its client makes of that depends on
vLLM's version and on the call: ``EngineDeadError`` without a name, ``cancelled``, or
nothing at all. A core that is stuck is never noticed by anybody. So calls into an engine with
processes of its own run in a thread here, and the caller looks at the processes while
it waits. Imports neither torch nor vLLM.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from patchkit.errors import ConfigurationError, PatchkitError
from patchkit.runtime.attestation import Attestation, read_attestations
from patchkit.runtime.state import EngineState

__all__ = ["EngineLostError", "EngineWatch", "WatchedEngine"]


class EngineLostError(PatchkitError):
    """A process of the engine ended, or the engine did not answer within its bound.

    Attributes:
        wanted: What was asked of the engine.
        lost: The processes that ended; empty if none did and the time was up.
        waited_s: How long was waited for the answer.
    """

    def __init__(self, wanted: str, lost: Sequence[str], waited_s: float) -> None:
        self.wanted, self.lost, self.waited_s = wanted, tuple(lost), waited_s
        what = (
            f"{', '.join(self.lost)} ended"
            if self.lost
            else "every process is there, but none answered"
        )
        super().__init__(
            f"{wanted}: the engine is lost after {waited_s:.1f} s: {what}. Nothing that it had "
            "under way was returned, so there is nothing to train on. Start a new engine from "
            "the checkpoint of its version."
        )

    def __reduce__(self) -> Any:
        return type(self), (self.wanted, self.lost, self.waited_s)


class EngineWatch:
    """Knows the processes of one engine, and when one of them ends.

    Args:
        processes: Name and process id, on this host. This process itself is left out:
            an engine that runs in it cannot be lost without it.
        interval_s: How often is looked while a call waits.
        grace_s: How long a call may take to end by itself once a process has ended.
    """

    def __init__(
        self,
        processes: Iterable[tuple[str, int]],
        *,
        interval_s: float = 0.2,
        grace_s: float = 2.0,
    ) -> None:
        if interval_s <= 0 or grace_s < 0:
            raise ConfigurationError("EngineWatch: interval_s must be positive, grace_s not less")
        self.interval_s, self.grace_s = interval_s, grace_s
        self._handles: dict[int, str] = {}
        self._pids: dict[int, str] = {}
        self._lost: list[str] = []
        for name, pid in processes:
            if pid == os.getpid():
                continue
            who = f"{name} (pid {pid})"
            try:
                # A handle, not a number: it is of this process whoever gets its number next,
                # and it says so before the parent has collected the exit code.
                self._handles[os.pidfd_open(pid)] = who
            except ProcessLookupError:
                self._lost.append(who)
            except (AttributeError, OSError):
                self._pids[pid] = who

    @classmethod
    def of_run(cls, run_dir: str | Path, **bounds: float) -> EngineWatch:
        """The engine processes that attested in a run's folder, on this host."""
        return cls.of(read_attestations(run_dir), **bounds)

    @classmethod
    def of(cls, attestations: Iterable[Attestation], **bounds: float) -> EngineWatch:
        """The same for attestations that were read already."""
        here = socket.gethostname()
        found = {
            a.pid: f"{a.role} {a.rank}"
            for a in attestations
            if a.role in ("engine-core", "worker") and a.host == here
        }
        return cls(((name, pid) for pid, name in found.items()), **bounds)

    @property
    def watching(self) -> bool:
        """Whether there is a process to watch at all."""
        return bool(self._handles or self._pids or self._lost)

    def lost(self) -> tuple[str, ...]:
        """Processes that have ended."""
        if self._handles:
            poll = select.poll()
            for handle in self._handles:
                poll.register(handle, select.POLLIN)
            for handle, _ in poll.poll(0):
                self._lost.append(self._handles.pop(handle))
                os.close(handle)
        for pid in list(self._pids):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                self._lost.append(self._pids.pop(pid))
        return tuple(self._lost)

    def call(
        self,
        wanted: str,
        function: Callable[..., Any],
        /,
        *args: Any,
        bound_s: float = 0.0,
        **kwargs: Any,
    ) -> Any:
        """Call ``function`` and wait for it, as long as the engine's processes live.

        Args:
            wanted: What it is for, in the error.
            function: May block for ever; its thread is left behind then.
            args: Given to it.
            bound_s: The longest wait; none if 0.
            kwargs: Given to it.

        Raises:
            EngineLostError: A process ended, or the time is up. What the function
                itself raises comes through, if no process has ended.
        """
        begun = time.monotonic()

        def gone() -> EngineLostError | None:
            lost = self.lost()
            return EngineLostError(wanted, lost, time.monotonic() - begun) if lost else None

        if (error := gone()) is not None:
            raise error
        if not self.watching and not bound_s:
            return function(*args, **kwargs)
        answer = _Answer(function, args, kwargs)
        ended_at = 0.0
        while not answer.done.wait(self.interval_s):
            now = time.monotonic()
            if self.lost() and not ended_at:
                ended_at = now
            if ended_at and now - ended_at >= self.grace_s:
                raise EngineLostError(wanted, self.lost(), now - begun)
            if bound_s and now - begun >= bound_s:
                raise EngineLostError(wanted, self.lost(), now - begun)
        if answer.error is not None:
            # What a client says about a core that has gone is a consequence, not the cause.
            raise (gone() or answer.error) from answer.error
        return answer.value

    def close(self) -> None:
        """Give the handles back."""
        for handle in self._handles:
            os.close(handle)
        self._handles.clear()


class _Answer:
    """One call in a thread of its own; nobody has to wait for that thread."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.done = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None

        def run() -> None:
            try:
                self.value = function(*args, **kwargs)
            except BaseException as e:
                self.error = e
            finally:
                self.done.set()

        threading.Thread(target=run, name="patchkit-engine-call", daemon=True).start()


class WatchedEngine:
    """An engine whose every method is called under a watch; poisons the state if it is lost.

    Args:
        engine: ``vllm.LLM``; for :class:`~patchkit.runtime.sync.WeightSync` too.
        watch: Of its processes.
        state: Shared with the weight synchronisation.
        bound_s: The longest that any single call may take; none if 0.
    """

    def __init__(
        self, engine: Any, watch: EngineWatch, state: EngineState, *, bound_s: float = 0.0
    ) -> None:
        self._engine, self._watch, self._state, self._bound_s = engine, watch, state, bound_s

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return self._watch.call(name, found, *args, bound_s=self._bound_s, **kwargs)
            except EngineLostError as e:
                self._state.poison(str(e))
                raise

        return call
