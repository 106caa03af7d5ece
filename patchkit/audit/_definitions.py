"""Functions and classes of the project, and the parameters of functions nobody calls."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from patchkit.audit._expressions import Frame
from patchkit.audit._scopes import Scope
from patchkit.audit._values import (
    Const,
    Func,
    Guard,
    Inst,
    Klass,
    Map,
    Param,
    Ref,
    Seq,
    Value,
    either,
)

if TYPE_CHECKING:
    from patchkit.audit._interpreter import Interpreter


class Definitions:
    """Defines functions and classes."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self.def_guards: dict[Func, tuple[Guard, ...]] = {}
        self.class_scopes: dict[Klass, Scope] = {}
        self.classes_open: list[Klass] = []

    def new_function(
        self,
        frame: Frame,
        node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
        qualname: str,
        owner: Klass | None,
        decorators: tuple[Value, ...],
        *,
        queue: bool,
    ) -> Func:
        """A function of the project; queued when it is to be walked by itself."""
        func = Func(frame.module, qualname, node, frame.scope, owner, decorators)
        self.def_guards[func] = frame.guards
        if queue and frame.call is None:
            frame.module.functions.append(func)
        return func

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, frame: Frame) -> None:
        owner = self.classes_open[-1] if frame.scope.kind == "class" else None
        if owner is not None:
            qualname = f"{owner.qualname}.{node.name}"
        elif frame.function is not None:
            qualname = f"{frame.function.qualname}.<locals>.{node.name}"
        else:
            qualname = node.name
        decorators = tuple(self._interpreter.evaluator.value(d, frame) for d in node.decorator_list)
        func = self.new_function(frame, node, qualname, owner, decorators, queue=True)
        frame.scope.bind(node.name, func, frame.guards)
        for value, syntax in zip(reversed(decorators), reversed(node.decorator_list), strict=True):
            self._interpreter.calls.decorate(value, func, frame, syntax)
            self._interpreter.calls.libraries.when_loaded(func, frame, syntax)

    def klass(self, node: ast.ClassDef, frame: Frame) -> None:
        prefix = ""
        if frame.scope.kind == "class":
            prefix = f"{self.classes_open[-1].qualname}."
        elif frame.function is not None:
            prefix = f"{frame.function.qualname}.<locals>."
        bases = tuple(self._interpreter.evaluator.value(b, frame) for b in node.bases)
        for keyword in node.keywords:
            self._interpreter.evaluator.value(keyword.value, frame)
        outer = frame.scope
        scope = Scope("class", outer)
        klass = Klass(frame.module, prefix + node.name, node, outer, bases)
        self.class_scopes[klass] = scope
        decorators = [self._interpreter.evaluator.value(d, frame) for d in node.decorator_list]
        frame.scope = scope
        self.classes_open.append(klass)
        try:
            self._interpreter.statements.body(node.body, frame)
        finally:
            self.classes_open.pop()
            frame.scope = outer
        outer.bind(node.name, klass, frame.guards)
        for value, syntax in zip(reversed(decorators), reversed(node.decorator_list), strict=True):
            self._interpreter.calls.decorate(value, klass, frame, syntax)

    def bind_unknown(self, func: Func, scope: Scope, frame: Frame) -> None:
        args = func.node.args
        positional = [*args.posonlyargs, *args.args]
        defaults: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults))
        defaults += args.defaults
        pairs = [
            *zip(positional, defaults, strict=True),
            *zip(args.kwonlyargs, args.kw_defaults, strict=True),
        ]
        outside = Frame(func.module, func.scope, None, frame.guards)
        for index, (arg, default) in enumerate(pairs):
            if index == 0 and func.owner is not None and self._has_self(func):
                scope.bind(arg.arg, self._self_of(func), ())
                continue
            annotation = None
            if arg.annotation is not None:
                annotation = self._interpreter.evaluator.value(arg.annotation, outside)
                if isinstance(annotation, Const) and isinstance(annotation.value, str):
                    annotation = None
            value: Value = Param(arg.arg, annotation if isinstance(annotation, Ref) else None)
            if default is not None:
                known = self._interpreter.evaluator.value(default, outside)
                if isinstance(known, (Ref, Func, Klass, Seq, Map)) or (
                    isinstance(known, Const) and isinstance(known.value, str)
                ):
                    value = either([(value, ()), (known, ())])
            scope.bind(arg.arg, value, ())
        for rest in (args.vararg, args.kwarg):
            if rest is not None:
                scope.bind(rest.arg, Param(rest.arg), ())

    @staticmethod
    def _has_self(func: Func) -> bool:
        return "staticmethod" not in func.last_decorators()

    @staticmethod
    def _self_of(func: Func) -> Value:
        assert func.owner is not None
        if "classmethod" in func.last_decorators() or func.qualname.endswith(
            ("__new__", "__init_subclass__")
        ):
            return func.owner
        return Inst(func.owner)
