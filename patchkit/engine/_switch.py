"""The switch between a stock function and its exact replacement, per thread and task.

Three states: *unset* (the thread never said), *exact* and *stock*. A thread
that never said runs stock as long as nobody is inside ``exact``; while somebody
is, it gets an error, since both answers could be the wrong one: autograd and
activation checkpointing recompute in threads of their own.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from weakref import WeakSet

from patchkit.engine.errors import SwitchBusyError, SwitchOrderError, SwitchUnsetError

_switches: WeakSet[Switch] = WeakSet()


@dataclass(frozen=True, slots=True, eq=False)
class _Frame:
    """One entered context, on the stack that the ContextVar carries."""

    state: bool | None
    owner: State
    local: bool | None  # what the thread-local mirror said before
    below: _Frame | None


class _Local(threading.local):
    """The state again, as an attribute: a compiler can guard on it, not on a ContextVar."""

    def __init__(self) -> None:
        # On the instance, not the class: torch.compile guards instance attributes only.
        self.state: bool | None = None


class Switch:
    """A two-state, thread- and async-aware flag.

    Attributes:
        name: The adapter it belongs to.
        entered: Whether anyone in the process is inside a context of it. As
            long as this is false, a patched function asks nothing further.
    """

    __slots__ = ("__weakref__", "_inside", "_local", "_lock", "_var", "entered", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.entered = False
        self._inside = 0
        self._lock = threading.Lock()
        self._local = _Local()
        self._var: ContextVar[_Frame | None] = ContextVar(f"patchkit:{name}", default=None)
        _switches.add(self)

    @property
    def state(self) -> bool | None:
        """True exact, False stock, None unset; of this thread or task."""
        top = self._var.get()
        return None if top is None else top.state

    @property
    def inside(self) -> int:
        """How many contexts of this switch are entered, over all threads."""
        return self._inside

    def exact(self) -> State:
        """A context in which the replacements run."""
        return State(self, True)

    def stock(self) -> State:
        """A context in which the originals run, said explicitly."""
        return State(self, False)

    def capture(self) -> State:
        """The state of this thread or task, as a context to enter elsewhere, as often as needed."""
        return State(self, self.state)

    def selector(self) -> Callable[[], bool]:
        """The question a patched function asks once ``entered`` is true."""
        var_get, local, refuse = self._var.get, self._local, self._refuse
        torch = sys.modules.get("torch")
        compiler = getattr(torch, "compiler", None)

        def task_state() -> bool | None:
            top = var_get()
            return None if top is None else top.state

        if compiler is None:

            def choose() -> bool:
                state = task_state()
                return refuse() if state is None else state

        else:
            compiling = compiler.is_compiling

            def choose() -> bool:
                state = local.state if compiling() else task_state()
                return refuse() if state is None else state

        return choose

    def _refuse(self) -> bool:
        raise SwitchUnsetError(self.name, threading.current_thread().name)

    def _change(self, state: bool | None, step: int) -> None:
        with self._lock:
            self._inside += step
            self.entered = self._inside > 0
        self._local.state = state

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Hold the switch while nobody is inside, for the time of an undo."""
        with self._lock:
            if self._inside:
                raise SwitchBusyError(self.name, self._inside)
            yield


class State:
    """A state of a switch as a context manager, re-enterable and usable from any thread."""

    __slots__ = ("_state", "_switch")

    def __init__(self, switch: Switch, state: bool | None) -> None:
        self._switch = switch
        self._state = state

    @property
    def exact(self) -> bool | None:
        """True exact, False stock, None unset."""
        return self._state

    def __enter__(self) -> State:
        switch = self._switch
        switch._var.set(_Frame(self._state, self, switch._local.state, switch._var.get()))
        switch._change(self._state, +1 if self._state is not None else 0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        switch = self._switch
        top = switch._var.get()
        left_here = top is not None and top.owner is self
        # The count goes down whatever happens next: a generator that is closed in another
        # context cannot take its frame off there, and must not leave the switch open.
        local = top.local if top is not None and left_here else switch._local.state
        switch._change(local, -1 if self._state is not None else 0)
        if top is None or not left_here:
            raise SwitchOrderError(switch.name)
        switch._var.set(top.below)


def _after_fork_in_child() -> None:
    """Other threads are gone, and with them what they had entered or locked."""
    for switch in list(_switches):
        depth, frame = 0, switch._var.get()
        while frame is not None:
            depth += frame.state is not None
            frame = frame.below
        switch._lock = threading.Lock()
        switch._inside = depth
        switch.entered = depth > 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
