"""Who else is on a target: wrappers and replacements that are not upstream's own.

Upstream's decorators are in the source (``@torch.no_grad()``), so the reviewed
digest covers them. Whatever else lies around the defined function was put there
at run time by somebody, and gets named.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from patchkit.engine import _inert as inert
from patchkit.engine._targets import Target

_DEFINED = ("function", "method", "staticmethod", "classmethod", "property", "cached_property")


def others(target: Target, facts: Any | None, ours: Any = None) -> list[str]:
    """Descriptions of foreign layers on a target, outermost first.

    Args:
        target: The located target.
        facts: The static facts, None where no source can be read.
        ours: ``ours(object)`` says whether another installation of this engine made it.
    """
    if target.kind == "class" or target.kind == "operator":
        return []
    if target.kind == "value" and (facts is None or facts.kind not in _DEFINED):
        return []  # an object that the module made itself
    allowed = {target.defined_in.package}
    allowed |= _decorator_homes(target, facts)
    chain = inert.layers(target.value)
    found: list[str] = []
    for index, layer in enumerate(chain):
        if ours is not None and ours(layer):
            return found
        function = inert.function_of(layer)
        if function is None:
            made_by = inert.class_name(type(layer)).partition(":")[0].partition(".")[0]
            if made_by not in allowed or facts is None or not facts.decorators:
                found.append(_of_type(layer))
        elif type(layer) is FunctionType:
            top = inert.home(function).partition(".")[0]
            last = index == len(chain) - 1
            if top not in allowed or (last and facts is not None and not _defined(function, facts)):
                found.append(inert.describe(function) + f", code of {inert.home(function)}")
    return found


def other_class(target: Target) -> list[str]:
    """A class of another package under a class's name."""
    if target.kind != "class":
        return []
    home = inert.class_name(target.value).partition(".")[0].partition(":")[0]
    return [] if home == target.symbol.package else [inert.describe(target.value)]


def _of_type(layer: Any) -> str:
    """A wrapper object; wrapt's say who wraps."""
    try:
        wrapper = object.__getattribute__(layer, "_self_wrapper")
    except AttributeError:
        return inert.describe(layer)
    return f"{inert.describe(layer)} calling {inert.describe(wrapper)}"


def _defined(function: FunctionType, facts: Any) -> bool:
    """Whether the code is one of the definitions that the source shows."""
    code = function.__code__
    file = inert.short_file(code.co_filename, facts.file.partition("/")[0].removesuffix(".py"))
    if file != facts.file:
        return False
    lines = [line for *_, line in code.co_lines() if line is not None]
    first, last = code.co_firstlineno, max(lines, default=code.co_firstlineno)
    return any(first <= line <= last for line in (facts.lines or (facts.line,)))


def _decorator_homes(target: Target, facts: Any | None) -> set[str]:
    """Top-level packages of the decorators that stand in the source."""
    function = inert.layers(target.value)[-1]
    if facts is None or type(function) is not FunctionType:
        return set()
    homes = set()
    for text in facts.decorators:
        value: Any = None
        for index, part in enumerate(text.partition("(")[0].split(".")):
            space = function.__globals__ if index == 0 else _namespace(value)
            value = space.get(part) if space is not None else None
        if value is None:
            continue
        inner = inert.function_of(value)
        if inner is not None:
            homes.add(inert.home(inner).partition(".")[0])
        elif inert.is_class(value):
            homes.add(inert.class_name(value).partition(":")[0].partition(".")[0])
    return homes | ({"functools", "contextlib"} if facts.decorators else set())


def _namespace(value: Any) -> Any:
    return inert.namespace(value) if inert.is_module(value) or inert.is_class(value) else None
