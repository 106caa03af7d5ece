"""What is put in place of a foreign name: its function, its signature, what it keeps."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from patchkit.audit._expressions import Frame
from patchkit.audit._scopes import Scope
from patchkit.audit._signatures import parameters_of
from patchkit.audit._values import (
    Bound,
    Const,
    Func,
    Inst,
    Item,
    Klass,
    Map,
    Param,
    Ref,
    Result,
    Seq,
    Value,
    last_name,
    options,
)
from patchkit.symbols import Parameter
from patchkit.symbols._facts import render_parameters

if TYPE_CHECKING:
    from patchkit.audit._interpreter import Interpreter

_DESCRIPTORS = {
    "staticmethod": "staticmethod", "classmethod": "classmethod", "property": "property",
    "cached_property": "cached_property",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Replacement:
    """What is written.

    Attributes:
        reference: ``module:qualname`` where an import reaches it, else its source.
        kind: "function", "class", "value", "foreign", "wrapper", "unknown".
        function: The function, where there is one.
        klass: The class, where it is one.
        parameters: The function's parameters, None where they are not known.
        descriptor: "staticmethod", "classmethod", "property" …, or the empty string.
        importable: Whether the reference can be resolved by importing it.
        original_calls: Calls of the original inside of it.
        keeps_original: Whether it keeps the original and, as a rule, calls it.
        value: The value, where it is a constant.
        is_async: Whether it is an ``async def``.
    """

    reference: str
    kind: str
    function: Func | None = None
    klass: Klass | None = None
    parameters: tuple[Parameter, ...] | None = None
    descriptor: str = ""
    importable: bool = False
    original_calls: tuple[ast.Call, ...] = field(default=(), compare=False)
    keeps_original: bool = False
    value: object = None
    is_async: bool = False

    @property
    def signature(self) -> str:
        """The signature as source text, empty where it is not known."""
        if self.parameters is None:
            return ""
        return f"({render_parameters(self.parameters)})"


def describe_replacement(value: Value, target: Ref | Item, interpreter: Interpreter) -> Replacement:
    """What a written value is."""
    found = [v for v, _ in options(value) if not isinstance(v, Param)]
    best = next((v for v in found if isinstance(_core(v), (Func, Klass))), None)
    value = best if best is not None else (found[0] if found else value)
    descriptor = ""
    if isinstance(value, Result):
        descriptor = _DESCRIPTORS.get(last_name(value), "")
    wrapped_partial = isinstance(value, Result) and last_name(value) in (
        "partial", "partialmethod",
    )  # fmt: skip
    core = _core(value)
    if isinstance(core, Func):
        return _function(core, value, descriptor, wrapped_partial, target, interpreter)
    if isinstance(core, Klass):
        init = interpreter.names.member(core, "__init__")
        parameters = None
        if isinstance(init, Func):
            parameters = parameters_of(init.node.args)[1:]
        return Replacement(
            core.reference, "class", klass=core, parameters=parameters,
            importable=not core.local, keeps_original=_derives(core, target),
        )  # fmt: skip
    if isinstance(core, Ref):
        return Replacement(
            core.dotted, "foreign", importable=True, keeps_original=_same(core, target)
        )
    if isinstance(core, Const):
        return Replacement(repr(core.value), "value", value=core.value)
    if isinstance(core, (Seq, Map)):
        return Replacement("a literal", "value", value=_literal(core))
    if isinstance(core, Inst):
        return Replacement(f"an instance of {last_name(core.cls)}", "object")
    if isinstance(core, Result):
        return Replacement(f"what {last_name(core) or 'a call'}() returns", "unknown")
    return Replacement("unknown", "unknown")


def _core(value: Value) -> Value:
    """The function inside of decorators and descriptors."""
    if isinstance(value, Bound):
        return value.func
    if isinstance(value, Result):
        for argument in value.args:
            for option, _ in options(argument):
                inner = _core(option)
                if isinstance(inner, (Func, Klass)):
                    return inner
        if last_name(value) in _DESCRIPTORS and value.args:
            return _core(value.args[0])
    if isinstance(value, Inst) and isinstance(value.cls, Ref):
        for argument in value.args:
            inner = _core(argument)
            if isinstance(inner, Func):
                return inner
    return value


def _function(
    func: Func,
    value: Value,
    descriptor: str,
    partial: bool,
    target: Ref | Item,
    interpreter: Interpreter,
) -> Replacement:
    decorators = func.last_decorators()
    if not descriptor and func.owner is None:
        descriptor = next((_DESCRIPTORS[d] for d in _DESCRIPTORS if d in decorators), "")
    parameters: tuple[Parameter, ...] | None = parameters_of(func.node.args)
    if isinstance(value, Bound) and parameters:
        parameters = parameters[1:]
    if partial:
        parameters = None
    calls = original_calls(func, target, interpreter) if isinstance(target, Ref) else ()
    wraps = any(
        isinstance(d, Result) and last_name(d) == "wraps" and any(_same(a, target) for a in d.args)
        for d in func.decorators
    )
    return Replacement(
        func.reference,
        "function",
        function=func,
        parameters=parameters,
        descriptor=descriptor,
        importable=not func.local,
        original_calls=calls,
        keeps_original=bool(calls) or wraps or _captures(func, target, interpreter),
        is_async=isinstance(func.node, ast.AsyncFunctionDef),
    )


def original_calls(
    func: Func, target: Ref | Item, interpreter: Interpreter
) -> tuple[ast.Call, ...]:
    """Calls of the original inside a replacement: it was kept under some name."""
    frame = _inside(func)
    found = []
    for node in ast.walk(func.node):
        if isinstance(node, ast.Call) and _may_be_original(node.func):
            value = interpreter.names.peek(node.func, frame)
            if any(_same(v, target) for v, _ in options(value)):
                found.append(node)
    return tuple(found)


def _captures(func: Func, target: Ref | Item, interpreter: Interpreter) -> bool:
    frame = _inside(func)
    for node in ast.walk(func.node):
        if (
            isinstance(node, (ast.Name, ast.Attribute))
            and isinstance(node.ctx, ast.Load)
            and any(_same(v, target) for v, _ in options(interpreter.names.peek(node, frame)))
        ):
            return True
    return False


def _inside(func: Func) -> Frame:
    scope = Scope("function", func.scope)
    args = func.node.args
    for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs):
        scope.bind(arg.arg, Param(arg.arg), ())
    return Frame(func.module, scope, func)


def _may_be_original(node: ast.expr) -> bool:
    return isinstance(node, (ast.Name, ast.Attribute, ast.Call))


def _same(value: Value, target: Ref | Item) -> bool:
    return isinstance(value, Ref) and isinstance(target, Ref) and value.dotted == target.dotted


def _derives(klass: Klass, target: Ref | Item, depth: int = 0) -> bool:
    for base in klass.bases:
        for option, _ in options(base):
            if _same(option, target):
                return True
            if (
                isinstance(option, Ref)
                and isinstance(target, Ref)
                and option.attrs[-1:] == (target.attrs[-1:])
            ):
                return True
            if isinstance(option, Klass) and depth < 6 and _derives(option, target, depth + 1):
                return True
    return False


def _literal(value: Value) -> object:
    if isinstance(value, Const):
        return value.value
    if isinstance(value, Seq):
        return [_literal(v) for v in value.items]
    if isinstance(value, Map):
        return {repr(_literal(k)): _literal(v) for k, v in value.items}
    return None
