"""A call of one of the project's functions: its body is walked for that call."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import TYPE_CHECKING

from patchkit.audit._expressions import Frame
from patchkit.audit._prescan import GIVEN, look
from patchkit.audit._scopes import Scope
from patchkit.audit._sightings import CallEdge
from patchkit.audit._values import (
    UNKNOWN,
    Bound,
    ClassOf,
    Cond,
    Const,
    DictOf,
    FilePath,
    Func,
    Handle,
    Inst,
    Item,
    Klass,
    Map,
    OwnModule,
    Param,
    Ref,
    Result,
    Seq,
    Somewhere,
    Source,
    Unknown,
    Value,
    beyond,
    either,
    options,
)

if TYPE_CHECKING:
    from patchkit.audit._interpreter import Interpreter

MAX_DEPTH = 6
# So deep are calls followed for what they return alone.
MAX_GIVING_DEPTH = 3
# Statements walked for one call of a project's function, calls inside of it included. A
# helper that patches is short; what is longer is an interpreter or a compiler.
MAX_STEPS = 600


class Inlining:
    """Walks functions for their calls."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self.memo: dict[object, tuple[Value, tuple[Value, ...], dict[str, Value]]] = {}
        self.steps = 0

    def inline(
        self,
        func: Func,
        args: tuple[Value, ...],
        kwargs: dict[str, Value],
        frame: Frame,
        node: ast.AST,
        *,
        effects_only: bool = False,
    ) -> Value:
        """Walk a function of the project for one call of it; what it returns."""
        if frame.call is None:
            self._interpreter.found.edges.append(
                CallEdge(frame.function, frame.module, func, frame.guards)
            )
        if func.node in frame.stack or len(frame.stack) > MAX_DEPTH:
            return UNKNOWN
        looked = look(func.node)
        given = (*args, *kwargs.values())
        roots = self._foreign_roots(given)
        if frame.call is not None:
            # What does not come from the outermost call is met when the function is
            # walked by itself.
            roots &= frame.given
        foreign = bool(roots)
        handed_on = not self._interpreter.helper_names.isdisjoint(looked.passed)
        patches = (foreign and (looked.when_called or handed_on)) or (
            (foreign or (frame.call is None and any(map(_is_definite, given))))
            and any(self._interpreter.possible(func.module, root) for root in looked.alone)
        )
        gives = not effects_only and (
            not self._interpreter.giver_names.isdisjoint(looked.gives)
            or (foreign and GIVEN in looked.gives)
        )
        if not patches and not (gives and len(frame.stack) <= MAX_GIVING_DEPTH):
            return UNKNOWN
        place = frame.call or self._interpreter.writes.place(frame, node)
        key = (
            id(func.node), id(func.scope), tuple(map(_mark, args)),
            tuple((name, _mark(value)) for name, value in sorted(kwargs.items())),
            (place, frame.guards) if patches else None,
        )  # fmt: skip
        if key in self.memo:
            return self.memo[key][0]
        if frame.call is None:
            self.steps = 0
        elif self.steps > MAX_STEPS:
            return UNKNOWN
        # The arguments are kept alive: some of them are remembered by their identity.
        self.memo[key] = (UNKNOWN, args, kwargs)
        scope = Scope("function", func.scope)
        around = self._interpreter.definitions.def_guards.get(func, ())
        inner = Frame(
            func.module, scope, func, (*frame.guards, *beyond(around, frame.guards)),
            call=place,
            caller=frame.caller if frame.call else frame.function,
            caller_module=frame.caller_module or frame.module,
            before_call=frame.before_call if frame.call else len(frame.guards),
            given=frame.given if frame.call else frozenset(roots),
            stack=(*frame.stack, func.node),
        )  # fmt: skip
        self._bind_call(func, args, kwargs, scope, inner)
        depth = len(inner.guards)
        if isinstance(func.node, ast.Lambda):
            result = self._interpreter.evaluator.value(func.node.body, inner)
        else:
            self._interpreter.statements.body(func.node.body, inner)
            if inner.yields and "contextmanager" in func.last_decorators():
                result = Result(Ref("contextlib", ("contextmanager",)), (inner.yields[0],))
            else:
                result = either([(v, g[depth:]) for v, g in inner.returns])
        self.memo[key] = (result, args, kwargs)
        return result

    def _foreign_roots(self, values: Iterable[Value], depth: int = 0) -> set[str]:
        """The packages that arguments are of, or name; paths and classes count as any."""
        found: set[str] = set()
        for value in values:
            for option, _ in options(value):
                if isinstance(option, Ref):
                    found.add(option.root)
                elif isinstance(option, Item):
                    found.add(option.owner.root)
                elif isinstance(option, (DictOf, ClassOf)):
                    found |= self._foreign_roots((option.owner,), depth + 1) or {""}
                elif isinstance(option, (FilePath, Source, Handle, Somewhere)):
                    found.add("")
                elif isinstance(option, Const) and isinstance(option.value, str):
                    root, dot, _rest = option.value.replace(":", ".").partition(".")
                    if dot and root in self._interpreter.foreign_names:
                        found.add(root)
                elif isinstance(option, Inst) and isinstance(option.cls, Ref):
                    if option.cls.dotted == "importlib.machinery.ModuleSpec":
                        found.add("")
                elif depth < 3 and isinstance(option, Seq):
                    found |= self._foreign_roots(option.items[:40], depth + 1)
                elif depth < 3 and isinstance(option, Map):
                    pairs = (v for pair in option.items[:40] for v in pair)
                    found |= self._foreign_roots(pairs, depth + 1)
                elif isinstance(option, Bound):
                    found |= self._foreign_roots((option.self,), depth + 1)
        return found

    def _bind_call(
        self,
        func: Func,
        args: tuple[Value, ...],
        kwargs: dict[str, Value],
        scope: Scope,
        frame: Frame,
    ) -> None:
        spec = func.node.args
        positional = [*spec.posonlyargs, *spec.args]
        outside = Frame(func.module, func.scope, None, frame.guards, call=frame.call)
        defaults: list[ast.expr | None] = [None] * (len(positional) - len(spec.defaults))
        defaults += spec.defaults
        left = dict(kwargs)
        for index, (arg, default) in enumerate(zip(positional, defaults, strict=True)):
            if index < len(args):
                value = args[index]
            elif arg.arg in left:
                value = left.pop(arg.arg)
            else:
                value = self._interpreter.evaluator.value(default, outside)
            scope.bind(arg.arg, value, ())
        for arg, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
            value = (
                left.pop(arg.arg)
                if arg.arg in left
                else self._interpreter.evaluator.value(default, outside)
            )
            scope.bind(arg.arg, value, ())
        if spec.vararg:
            scope.bind(spec.vararg.arg, Seq(args[len(positional) :]), ())
        if spec.kwarg:
            rest = tuple((Const(k), v) for k, v in left.items())
            scope.bind(spec.kwarg.arg, Map(rest), ())


def _is_definite(value: Value) -> bool:
    return isinstance(value, (Const, Func, Klass))


def _mark(value: Value) -> object:
    """Something hashable that stands for a value: itself where that is cheap."""
    if isinstance(value, (Const, Ref, Func, Klass, OwnModule)):
        return value
    if isinstance(value, (Unknown, Param, Result, Cond)):
        return None
    return id(value)
