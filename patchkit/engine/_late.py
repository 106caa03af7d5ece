"""Too late is an error: code that is under way, answers that are given, and frozen objects."""

from __future__ import annotations

import sys
from types import AsyncGeneratorType, CodeType, CoroutineType, FunctionType, GeneratorType
from typing import Any

from patchkit.engine import _inert as inert
from patchkit.engine import _shape as shape
from patchkit.engine._declare import FROZEN, Patch
from patchkit.engine._frozen import frozen_objects
from patchkit.engine._owners import referrers_of
from patchkit.engine._targets import Target, resolve
from patchkit.engine.errors import violation
from patchkit.errors import PatchkitError, Violation
from patchkit.symbols import Symbol

_SUSPENDED = {
    GeneratorType: ("gi_code", "gi_frame", "a generator"),
    CoroutineType: ("cr_code", "cr_frame", "a coroutine"),
    AsyncGeneratorType: ("ag_code", "ag_frame", "an async generator"),
}

Live = list[tuple[Patch, Target, Any]]


def too_late(live: Live) -> list[Violation]:
    """Everything for which this installation comes too late."""
    return [
        *_running(live),
        *_suspended(live),
        *_frozen(live),
        *_cached(live),
        *_unclearable(live),
        *_instances(live),
    ]


def _codes(target: Target) -> set[CodeType]:
    return {f.__code__ for f in inert.layers(target.value) if type(f) is FunctionType}


def _running(live: Live) -> list[Violation]:
    wanted = {code for _, target, _ in live for code in _codes(target)}
    frames: dict[CodeType, str] = {}
    tops = sys._current_frames()
    for thread in list(tops):
        current: Any = tops.pop(thread)
        while current is not None:
            if current.f_code in wanted:
                where = f"line {current.f_lineno} of {current.f_code.co_filename}, thread {thread}"
                frames.setdefault(current.f_code, where)
            current = current.f_back  # None at the end: this frame must not hold itself
    found = []
    for patch, target, _ in live:
        for code in _codes(target) & set(frames):
            found.append(
                violation(
                    patch.symbol,
                    "too late: it is running",
                    expected="no call under way",
                    found=frames[code],
                    remedy="install before it is called, or after it has returned",
                )
            )
    return found


def _suspended(live: Live) -> list[Violation]:
    wanted: dict[CodeType, Patch] = {}
    for patch, target, _ in live:
        function = target.function
        if function is not None and any(
            shape.run_kind(f) != "plain function"
            for f in inert.layers(target.value)
            if type(f) is FunctionType
        ):
            wanted |= dict.fromkeys(_codes(target), patch)
    if not wanted:
        return []
    # A suspended frame refers to its function (from 3.11 on) or to its code.
    keys = [*wanted, *(f for _, target, _ in live for f in inert.layers(target.value))]
    found = []
    for value in referrers_of(keys):
        names = _SUSPENDED.get(type(value))
        if names is None or getattr(value, names[1]) is None:
            continue
        patch_of = wanted.get(getattr(value, names[0]))
        if patch_of is not None:
            found.append(
                violation(
                    patch_of.symbol,
                    f"too late: it is suspended, as {names[2]}",
                    expected="none under way",
                    found=f"one at line {getattr(value, names[1]).f_lineno}",
                    remedy="exhaust, await or close it first",
                )
            )
    return found


def _frozen(live: Live) -> list[Violation]:
    count = frozen_objects()
    if not count:
        return []
    return [
        violation(
            patch.symbol,
            "too late: gc.freeze() was called, holders cannot be found",
            expected="no frozen objects (an inference engine freezes them when it starts)",
            found=f"{count} objects that the collector does not show",
            remedy="install before the engine is constructed; or, if nothing frozen uses the "
            f"old object, add accepts_unreachable=({FROZEN!r},) to the patch",
        )
        for patch, target, _ in live
        if FROZEN not in patch.accepts_unreachable and target.function is not None
    ]


def _cached(live: Live) -> list[Violation]:
    """functools caches in the target's module that hold answers made by the old function."""
    found = []
    for patch, target, _ in live:
        function: Any = target.function
        if function is None:
            continue
        space = function.__globals__
        for name, value in list(space.items()):
            if type(value) is not inert.LRU_CACHE or value is target.value:
                continue
            symbol = f"{inert.home(function)}:{name}"
            inner = inert.function_of(value)
            size = value.cache_info().currsize
            if inner is None or not size or symbol in patch.caches:
                continue
            names = inner.__code__.co_names
            uses = any(space.get(n) is target.value for n in names) or (
                inert.is_class(target.owner) and target.attribute in names
            )
            if uses and inner.__globals__ is space:
                found.append(
                    violation(
                        patch.symbol,
                        "too late: answers of it are cached",
                        expected=f"an empty cache in {symbol}, or a declared one",
                        found=f"{size} cached answers",
                        remedy=f"add caches=({symbol!r},) to the patch: it is then cleared at "
                        "install and at undo",
                    )
                )
    return found


def _unclearable(live: Live) -> list[Violation]:
    """Declared caches that are none: found out at the first clearing, it would be too late."""
    found = []
    for patch, _, _ in live:
        for symbol in patch.caches:
            if inert.loaded(Symbol.parse(symbol).module) is None:
                continue
            try:
                there = resolve(symbol)
            except PatchkitError as error:
                told = str(error)
            else:
                if callable(getattr(there, "cache_clear", None)):
                    continue
                told = inert.describe(there)
            found.append(
                violation(
                    patch.symbol,
                    f"{symbol} cannot be cleared",
                    expected="a functools cache",
                    found=told,
                    remedy="correct the patch's caches",
                )
            )
    return found


_CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__"})


def _instances(live: Live) -> list[Violation]:
    """Live instances that a patch would not reach: they were built by the old code."""
    found = []
    for patch, target, _ in live:
        if target.kind == "class":
            what, instances = "instances of it exist", _built(target.value)
        elif target.kind == "cached_property":
            what = "instances have cached it"
            instances = [h for h in _built(target.owner) if target.attribute in _space(h)]
        elif inert.is_class(target.owner) and target.attribute in _CONSTRUCTORS:
            what, instances = "instances were built by the old constructor", _built(target.owner)
        else:
            continue
        if instances:
            found.append(
                violation(
                    patch.symbol,
                    f"too late: {what}",
                    expected="none",
                    found=str(len(instances)),
                    remedy="install before they are built"
                    + ("; or patch the methods in place" if target.kind == "class" else ""),
                )
            )
    return found


def _built(cls: Any) -> list[Any]:
    """Live instances of a class and its subclasses."""
    classes = [cls, *_subclasses(cls)]
    wanted = set(map(id, classes))
    return [h for h in referrers_of(classes) if id(type(h)) in wanted]


def _subclasses(cls: Any) -> list[Any]:
    found = []
    for sub in type.__subclasses__(cls):
        found += [sub, *_subclasses(sub)]
    return found


def _space(value: Any) -> dict[str, Any]:
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
