"""Shapes: parameters, descriptor kinds, and building what is put into a slot.

What is installed is a plain function of its own: the code of the replacement
under the target's name. Adapters' functions are never modified, and a call
costs what the replacement costs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakSet

from patchkit.engine import _inert as inert

KIND_NAMES = {
    inspect.Parameter.POSITIONAL_ONLY: "positional-only",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional-or-keyword",
    inspect.Parameter.VAR_POSITIONAL: "var-positional",
    inspect.Parameter.KEYWORD_ONLY: "keyword-only",
    inspect.Parameter.VAR_KEYWORD: "var-keyword",
}
_FLAGS = (
    (inspect.CO_ASYNC_GENERATOR, "async generator function"),
    (inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE, "coroutine function"),
    (inspect.CO_GENERATOR, "generator function"),
)

# Every function this module ever made and that is still alive: their closures
# may hold originals, which the reference scan must not take for users.
made: WeakSet[FunctionType] = WeakSet()


class Param(NamedTuple):
    """What callers can tell of a parameter."""

    name: str
    kind: str
    required: bool

    def __str__(self) -> str:
        star = {"var-positional": "*", "var-keyword": "**"}.get(self.kind, "")
        suffix = {"positional-only": " [positional-only]", "keyword-only": " [keyword-only]"}
        return f"{star}{self.name}{'' if self.required else '=…'}{suffix.get(self.kind, '')}"


def params(function: Callable[..., Any]) -> tuple[Param, ...]:
    """The parameters as callers see them, decorators that say ``__wrapped__`` looked through."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(
        Param(p.name, KIND_NAMES[p.kind], p.default is p.empty and p.kind not in variadic)
        for p in inspect.signature(function).parameters.values()
    )


def static_params(parameters: Iterable[Any]) -> tuple[Param, ...]:
    """The same of a manifest's parameters."""
    return tuple(
        Param(p.name, p.kind, p.default is None and not p.kind.startswith("var-"))
        for p in parameters
    )


def difference(old: tuple[Param, ...], new: tuple[Param, ...], *, bound: bool) -> str:
    """What a caller written for ``old`` would trip over in ``new``; empty if nothing.

    The name of ``self`` or ``cls`` is nobody's business.
    """
    if bound and old and new and old[0].kind == new[0].kind == "positional-or-keyword":
        old, new = old[1:], new[1:]
    if old == new:
        return ""
    before, after = {p.name: p for p in old}, {p.name: p for p in new}
    told = [f"lacks {p}" for p in old if p.name not in after]
    told += [f"adds {p}" for p in new if p.name not in before]
    told += [
        f"has {after[p.name]} instead of {p}" for p in old if p.name in after and after[p.name] != p
    ]
    common = [p.name for p in old if p.name in after]
    if common != [p.name for p in new if p.name in before]:
        told.append("has another order: " + ", ".join(p.name for p in new))
    return "; ".join(told)


def show(parameters: tuple[Param, ...]) -> str:
    return f"({', '.join(map(str, parameters))})"


def run_kind(function: FunctionType) -> str:
    """Plain, generator, coroutine or async generator function."""
    flags = function.__code__.co_flags
    return next((name for flag, name in _FLAGS if flags & flag), "plain function")


def changed_defaults(old: FunctionType, new: FunctionType) -> str:
    """Defaults that are constants in both and differ, as text."""

    def constants(function: FunctionType) -> dict[str, Any]:
        parameters = inspect.signature(function).parameters.values()
        return {p.name: p.default for p in parameters if type(p.default) in inert.ATOM_TYPES}

    ours, theirs = constants(new), constants(old)
    return "; ".join(
        f"{name}={ours[name]!r} where the target has {value!r}"
        for name, value in theirs.items()
        if name in ours and (type(ours[name]) is not type(value) or ours[name] != value)
    )


def dressed(function: FunctionType, target: FunctionType) -> FunctionType:
    """A copy of a function that passes for the target: names, docs, annotations."""
    new = FunctionType(
        function.__code__,
        function.__globals__,
        target.__name__,
        function.__defaults__,
        function.__closure__,
    )
    if function.__kwdefaults__:
        new.__kwdefaults__ = dict(function.__kwdefaults__)
    # Flags such as __isabstractmethod__ or _torchdynamo_disable belong to the shape;
    # objects (what is wrapped, what is registered) belong to the old function.
    flags = {k: v for k, v in target.__dict__.items() if type(v) in inert.ATOM_TYPES}
    new.__dict__.update(flags)
    new.__dict__.update(function.__dict__)
    new.__module__ = target.__module__
    new.__qualname__ = target.__qualname__
    new.__doc__ = target.__doc__
    new.__annotations__ = dict(target.__annotations__)
    made.add(new)
    return new


def twin(function: FunctionType) -> FunctionType:
    """The same function again, under an identity of its own."""
    return dressed(function, function)


def redescribed(value: Any, make: Callable[[FunctionType], FunctionType], part: Any = None) -> Any:
    """The raw attribute again, in the same descriptor type, with its functions made over.

    Args:
        value: What the slot holds.
        make: From old function to new.
        part: For properties: which of the three functions to make over; None is all.
    """
    kind: Any = type(value)
    if kind is FunctionType:
        return make(value)
    if issubclass(kind, (staticmethod, classmethod)):
        return kind(redescribed(value.__func__, make))
    if issubclass(kind, property):
        parts = [
            make(f) if type(f) is FunctionType and part in (None, name) else f
            for name, f in (("fget", value.fget), ("fset", value.fset), ("fdel", value.fdel))
        ]
        return kind(*parts, value.__doc__)
    if issubclass(kind, functools.cached_property):
        new = kind(make(value.func))
        new.__set_name__(None, value.attrname)
        new.__doc__ = value.__doc__
        return new
    if kind is inert.LRU_CACHE:
        settings = value.cache_parameters()
        return functools.lru_cache(**settings)(make(value.__wrapped__))
    raise TypeError(f"{inert.describe(value)} has no function inside")
