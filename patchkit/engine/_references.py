"""Who holds the old object: every reference, found by identity, without running foreign code.

The collector knows which objects refer to which, so one pass over its lists
finds all holders at any depth, in C. What it can't see (C++, running frames)
is counted: a reference count above the number of references found is told.
"""

from __future__ import annotations

import gc
import inspect
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from types import (
    FrameType,
    FunctionType,
)
from typing import Any

from patchkit.engine import _inert as inert
from patchkit.engine import _shape as shape
from patchkit.engine._frozen import frozen_objects
from patchkit.engine._holding import inside
from patchkit.engine._owners import ById, Index, Private, Reference, bookkeeping, referrers_of


@dataclass(frozen=True, slots=True, eq=False)
class Scan:
    """The result of one search.

    Attributes:
        references: Every reference found, but those of the engine itself.
        unseen: Identity of an old object -> references that nothing shows.
    """

    references: tuple[Reference, ...]
    unseen: dict[int, int]


def scan(olds: Private, owners: Iterable[Any], *, ignored: Iterable[int] = ()) -> Scan:
    """Search for all references to the old objects.

    Args:
        olds: Raw attributes and the functions inside; only this list may hold them.
        owners: Classes and modules that define them, to save looking for those.
        ignored: Identities of containers of the caller.
    """
    if not olds:
        return Scan((), {})
    frozen = frozen_objects() > 0
    # Nothing can be counted against what the collector does not show.
    unseen, holders = _unseen(olds) if not frozen else ({}, _walk(olds))
    made = Private(shape.made)  # kept alive: an identity means nothing once its object is gone
    cells = {id(cell) for function in made for cell in function.__closure__ or ()}
    index = Index(cells.union(ignored))
    index.know(owners)
    by_id = ById((id(o), o) for o in olds)
    holders = Private(h for h in holders if not index.own(h) and id(h) not in by_id)
    index.learn(holders)
    found = [reference for holder in holders for reference in inside(holder, by_id, index)]
    index.owners.clear()  # no cycles: garbage would be a holder for the next scan
    return Scan(tuple(found), unseen)


bookkeeping.add(Scan)


def _walk(olds: Private) -> Private:
    """Holders reachable from loaded modules by name, for when the collector was frozen.

    One level into classes, functions and containers: less than the collector shows.
    """
    wanted = set(map(id, olds))
    found: dict[int, Any] = {id(h): h for h in referrers_of(olds)}

    def look(holder: Any, inside: Iterable[Any]) -> None:
        if any(id(value) in wanted for value in inside):
            found[id(holder)] = holder

    for module in list(sys.modules.values()):
        if not inert.is_module(module):
            continue
        space = inert.namespace(module)
        look(space, list(space.values()))
        for value in list(space.values()):
            kind = type(value)
            if inert.is_class(value):
                look(value, list(inert.namespace(value).values()))
            elif kind is dict:
                look(value, [*value.values(), *value])
            elif kind in (list, tuple, set, frozenset):
                look(value, value)
            elif kind is partial:
                look(value, (value.func, *value.args))
            elif kind is FunctionType:
                look(value.__defaults__, value.__defaults__ or ())
                look(value.__kwdefaults__, (value.__kwdefaults__ or {}).values())
                for cell in value.__closure__ or ():
                    look(cell, gc.get_referents(cell))
    return Private(found.values())


def _unseen(olds: Private) -> tuple[dict[int, int], Private]:
    """References that neither the collector nor a frame shows, per object, and all holders.

    C++ registries hold objects without telling the collector. Local variables
    of running frames do too, and are counted apart: a variable is no caller.
    """
    excess, holders = _count(olds)
    for attempt in (0, 1, 2):
        if not excess:
            break
        del holders
        time.sleep(0.002 * attempt)  # other threads may just be calling it
        excess, holders = _count(olds)
        for identity in _in_local_variables(excess):
            excess[identity] -= 1
        excess = {key: count for key, count in excess.items() if count > 0}
    return excess, holders


def _count(olds: Private) -> tuple[dict[int, int], Private]:
    seen = dict.fromkeys(map(id, olds), 0)
    holders = referrers_of(olds)
    for i in range(len(holders)):
        if id(holders[i]) in seen:  # one old object holds another; now this list holds it too
            seen[id(holders[i])] += 1
        if type(holders[i]) is not FrameType:
            for identity in map(id, gc.get_referents(holders[i])):
                if identity in seen:
                    seen[identity] += 1
    excess = {
        # One for the list of arguments of getrefcount itself.
        id(olds[i]): sys.getrefcount(olds[i]) - 1 - seen[id(olds[i])]
        for i in range(len(olds))
    }
    return {key: count for key, count in excess.items() if count > 0}, holders


def _in_local_variables(wanted: dict[int, int]) -> list[int]:
    """Identities of the wanted objects that local variables hold, once per variable."""
    found = []
    tops = sys._current_frames()
    for thread in list(tops):
        frame: FrameType | None = tops.pop(thread)  # this frame must not hold itself
        while frame is not None:
            code = frame.f_code
            own = str(frame.f_globals.get("__name__")).startswith("patchkit.engine.")
            if code.co_flags & inspect.CO_OPTIMIZED and not own:  # not a module or class body
                plain = set(code.co_varnames) - set(code.co_cellvars)
                values = frame.f_locals
                found += [
                    id(value)
                    for name, value in values.items()
                    if name in plain and id(value) in wanted
                ]
                if type(values) is dict:
                    # Before 3.13 this is a copy that the frame keeps: it would hold on to
                    # everything (tensors!) for as long as the function runs.
                    values.clear()
            frame = frame.f_back
    return found
