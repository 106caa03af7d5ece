"""Shapes: parameters, descriptor kinds, and building what is put into a slot.

What is installed is a plain function of its own: the code of the replacement
under the target's name. Adapters' functions are never modified, and a call
costs what the replacement costs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from keyword import iskeyword
from types import CodeType, FunctionType
from typing import Any, NamedTuple
from weakref import WeakSet

from patchkit.engine import _inert as inert
from patchkit.engine._inert import MISSING

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


def passing_on(function: FunctionType) -> tuple[str, str]:
    """Source of exactly this function's parameters, and of the arguments that pass them on.

    Decorators are not looked through: what takes ``*args`` goes on to get ``*args``.
    """
    head: list[str] = []
    call: list[str] = []
    last = None
    for p in inspect.signature(function, follow_wrapped=False).parameters.values():
        if last is p.POSITIONAL_ONLY and p.kind is not p.POSITIONAL_ONLY:
            head.append("/")
        if p.kind is p.KEYWORD_ONLY and last not in (p.KEYWORD_ONLY, p.VAR_POSITIONAL):
            head.append("*")
        star = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
        head.append(f"{star}{p.name}" + ("" if p.default is p.empty else "=None"))
        call.append(f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else f"{star}{p.name}")
        last = p.kind
    if last is inspect.Parameter.POSITIONAL_ONLY:
        head.append("/")
    return ", ".join(head), ", ".join(call)


def compiled(source: str, label: str) -> dict[str, Any]:
    """Run generated source; the file name in tracebacks says what it is."""
    space: dict[str, Any] = {"__name__": "patchkit.engine.generated"}
    exec(compile(source, f"<patchkit {label}>", "exec"), space)
    return space


def handing_on(function: FunctionType, callee: str, call: str) -> str:
    """The statement that hands a call on to ``callee``, for this kind of function."""
    kind = run_kind(function)
    if kind == "coroutine function":
        return f"return await {callee}({call})"
    if kind == "generator function":
        return f"return (yield from {callee}({call}))"
    return f"return {callee}({call})"


def definition(function: FunctionType) -> str:
    return "async def" if run_kind(function) == "coroutine function" else "def"


def switched(
    stock: FunctionType, exact: FunctionType, switch: Any, choose: Callable[[], bool]
) -> FunctionType:
    """A plain function that runs one or the other, by the state of the switch."""
    head, call = passing_on(stock)
    space = compiled(
        f"def make(_pk_stock, _pk_exact, _pk_switch, _pk_choose):\n"
        f"    {definition(stock)} {_identifier(stock)}({head}):\n"
        f"        if _pk_switch.entered and _pk_choose():\n"
        f"            {handing_on(stock, '_pk_exact', call)}\n"
        f"        {handing_on(stock, '_pk_stock', call)}\n"
        f"    return {_identifier(stock)}\n",
        f"switch of {stock.__module__}:{stock.__qualname__}",
    )
    plain = space.pop("make")(stock, exact, switch, choose)
    plain.__defaults__ = stock.__defaults__
    plain.__kwdefaults__ = dict(stock.__kwdefaults__) if stock.__kwdefaults__ else None
    new = dressed(plain, stock)
    if inert.wrapped_by(stock) is not MISSING:
        new.__signature__ = inspect.signature(stock)  # type: ignore[attr-defined]
    return new


def rerouted(function: FunctionType, module: str, before: str, callee: str) -> CodeType:
    """Code for this very function object that hands its calls on to ``module.callee``.

    It has the function's parameters and number of closure variables, as the
    interpreter demands and as ``torch.compile`` (which caches parameter lists
    by function) needs. The callee is found by an import inside: neither the
    closure nor foreign globals are touched.

    Args:
        function: Whose code is going to be exchanged.
        module: A module of the engine that has the callee.
        before: The name of a function to call first, or empty.
        callee: The name of the function that does the work.
    """
    head, call = passing_on(function)
    free = [f"_pk_free{i}" for i in range(len(function.__code__.co_freevars))]
    keep = f"        if 0: ({', '.join(free)},)\n" if free else ""
    first = f"        _pk.{before}()\n" if before else ""
    space = compiled(
        f"def make({', '.join(free)}):\n"
        f"    {definition(function)} {_identifier(function)}({head}):\n"
        f"{keep}"
        f"        import {module} as _pk\n"
        f"{first}"
        f"        {handing_on(function, f'_pk.{callee}', call)}\n"
        f"    return {_identifier(function)}\n",
        f"detour of {function.__module__}:{function.__qualname__}",
    )
    return space.pop("make")(*free).__code__


def _identifier(function: FunctionType) -> str:
    name = function.__name__
    return name if name.isidentifier() and not iskeyword(name) else "patched"
