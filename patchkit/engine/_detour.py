"""Generated functions: the switch's dispatcher, and detours for functions that exist already.

They have exactly the parameters of the function they stand for, positional and
keyword alike, so that a call costs no packing and unpacking, and tools that
look at code objects see what they expect.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from keyword import iskeyword
from types import CodeType, FunctionType
from typing import Any

from patchkit.engine import _inert as inert
from patchkit.engine import _shape as shape
from patchkit.engine._inert import MISSING


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


_ASYNC_KINDS = ("coroutine function", "async generator function")
_ASYNC_GENERATOR = """\
_pk_inner = {callee}({call})
try:
    _pk_value = await _pk_inner.__anext__()
    while True:
        try:
            _pk_sent = yield _pk_value
        except GeneratorExit:
            await _pk_inner.aclose()
            raise
        except BaseException as _pk_error:
            _pk_value = await _pk_inner.athrow(_pk_error)
        else:
            _pk_value = await _pk_inner.asend(_pk_sent)
except StopAsyncIteration:
    return"""


def handing_on(function: FunctionType, callee: str, call: str, indent: int) -> str:
    """The statements that hand a call on to ``callee``, for this kind of function."""
    kind = shape.run_kind(function)
    if kind == "async generator function":
        text = _ASYNC_GENERATOR.format(callee=callee, call=call)
    elif kind == "coroutine function":
        text = f"return await {callee}({call})"
    elif kind == "generator function":
        text = f"return (yield from {callee}({call}))"
    else:
        text = f"return {callee}({call})"
    return textwrap.indent(text, " " * indent) + "\n"


def definition(function: FunctionType) -> str:
    return "async def" if shape.run_kind(function) in _ASYNC_KINDS else "def"


def switched(
    stock: FunctionType, exact: FunctionType, switch: Any, choose: Callable[[], bool]
) -> FunctionType:
    """A plain function that runs one or the other, by the state of the switch."""
    head, call = passing_on(stock)
    space = compiled(
        f"def make(_pk_stock, _pk_exact, _pk_switch, _pk_choose):\n"
        f"    {definition(stock)} {_identifier(stock)}({head}):\n"
        f"        if _pk_switch.entered and _pk_choose():\n"
        f"{handing_on(stock, '_pk_exact', call, 12)}"
        f"{handing_on(stock, '_pk_stock', call, 8)}"
        f"    return {_identifier(stock)}\n",
        f"switch of {stock.__module__}:{stock.__qualname__}",
    )
    plain = space.pop("make")(stock, exact, switch, choose)
    plain.__defaults__ = stock.__defaults__
    plain.__kwdefaults__ = dict(stock.__kwdefaults__) if stock.__kwdefaults__ else None
    new = shape.dressed(plain, stock)
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
        f"{handing_on(function, f'_pk.{callee}', call, 8)}"
        f"    return {_identifier(function)}\n",
        f"detour of {function.__module__}:{function.__qualname__}",
    )
    return space.pop("make")(*free).__code__


def _identifier(function: FunctionType) -> str:
    name = function.__name__
    return name if name.isidentifier() and not iskeyword(name) else "patched"
