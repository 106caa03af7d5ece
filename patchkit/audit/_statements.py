"""Statements: assignments, and the flow of control with the tests that it passes."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING

from patchkit.audit._expressions import UNROLL, Frame, rebind
from patchkit.audit._inlining import MAX_STEPS
from patchkit.audit._sightings import BlindSpot
from patchkit.audit._values import (
    UNKNOWN,
    Cond,
    Const,
    Func,
    Guard,
    Klass,
    Map,
    OwnModule,
    Ref,
    Result,
    Seq,
    Value,
    options,
)

if TYPE_CHECKING:
    from patchkit.audit._interpreter import Interpreter

_IMPORT_ERRORS = frozenset({
    "ImportError", "ModuleNotFoundError", "Exception", "BaseException", "AttributeError",
})  # fmt: skip
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Statements:
    """Walks statements."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self._handlers: dict[type, Callable[..., None]] = {
            ast.Expr: self._expr,
            ast.Assign: self._assign,
            ast.AnnAssign: self._ann_assign,
            ast.AugAssign: self._aug_assign,
            ast.Delete: self._delete,
            ast.If: self._if,
            ast.Assert: self._assert,
            ast.For: self._for,
            ast.AsyncFor: self._for,
            ast.While: self._while,
            ast.With: self._with,
            ast.AsyncWith: self._with,
            ast.Try: self._try,
            ast.Match: self._match,
            ast.Return: self._return,
            ast.Global: self._outer,
            ast.Nonlocal: self._outer,
            ast.Import: interpreter.imports.plain,
            ast.ImportFrom: interpreter.imports.from_module,
            ast.FunctionDef: interpreter.definitions.function,
            ast.AsyncFunctionDef: interpreter.definitions.function,
            ast.ClassDef: interpreter.definitions.klass,
        }
        if hasattr(ast, "TryStar"):
            self._handlers[ast.TryStar] = self._try

    def body(self, body: list[ast.stmt], frame: Frame) -> None:
        before = frame.guards
        for statement in body:
            try:
                self._statement(statement, frame)
            except RecursionError:  # tables and chains that a program wrote
                self._interpreter.writes.blind(
                    "deep code", frame, statement, "it nests too deeply to be followed"
                )
        frame.guards = before

    def _statement(self, node: ast.stmt, frame: Frame) -> None:
        kind = node.__class__
        if frame.call is not None:
            self._interpreter.inlining.steps += 1
            if self._interpreter.inlining.steps > MAX_STEPS:
                if self._interpreter.inlining.steps == MAX_STEPS + 1:
                    self._cut(frame)
                return
        if kind in _FUNCTIONS:
            self._interpreter.definitions.function(node, frame)  # type: ignore[arg-type]
            return
        handler = self._handlers.get(kind)
        if handler is not None:
            handler(node, frame)

    def _cut(self, frame: Frame) -> None:
        """Note a call that is not followed to its end."""
        assert frame.call is not None
        module = frame.caller_module or frame.module
        spot = BlindSpot(
            "long call", frame.call, module.line_text(frame.call.line),
            f"what it is given was followed through {MAX_STEPS} statements, and no further",
        )  # fmt: skip
        if spot not in self._interpreter.found.blind_spots:
            self._interpreter.found.blind_spots.append(spot)

    def _expr(self, node: ast.Expr, frame: Frame) -> None:
        if node.value.__class__ is not ast.Constant:
            self._interpreter.evaluator.value(node.value, frame)

    def _assign(self, node: ast.Assign, frame: Frame) -> None:
        value = self._interpreter.evaluator.value(node.value, frame)
        for target in node.targets:
            self.assign(target, value, frame, node)

    def _ann_assign(self, node: ast.AnnAssign, frame: Frame) -> None:
        if node.value is not None:
            self.assign(
                node.target, self._interpreter.evaluator.value(node.value, frame), frame, node
            )

    def _aug_assign(self, node: ast.AugAssign, frame: Frame) -> None:
        added = self._interpreter.evaluator.value(node.value, frame)
        if isinstance(node.target, ast.Name):
            joined = self._interpreter.evaluator.value(
                ast.copy_location(
                    ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value), node
                ),
                frame,
            )
            frame.scope.bind(node.target.id, joined, frame.guards)
            return
        self.assign(node.target, Result(Ref("operator", ("iadd",)), (added,)), frame, node)

    def assign(self, target: ast.expr, value: Value, frame: Frame, node: ast.stmt | None) -> None:
        """Bind a name, or write to an attribute or an entry."""
        if isinstance(target, ast.Name):
            frame.scope.bind(target.id, value, frame.guards)
        elif isinstance(target, (ast.Tuple, ast.List)):
            self._unpack(target, value, frame, node)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, UNKNOWN, frame, node)
        elif isinstance(target, ast.Attribute):
            owner = self._interpreter.evaluator.value(target.value, frame)
            self._interpreter.writes.write(
                owner, target.attr, value, frame, node or target, "assignment"
            )
        elif isinstance(target, ast.Subscript):
            owner = self._interpreter.evaluator.value(target.value, frame)
            if isinstance(target.slice, ast.Slice):
                return
            index = self._interpreter.evaluator.value(target.slice, frame)
            if isinstance(owner, Map) and isinstance(target.value, ast.Name):
                if isinstance(index, Const) and len(owner.items) < UNROLL:
                    kept = tuple(pair for pair in owner.items if pair[0] != index)
                    rebind(target.value.id, Map((*kept, (index, value))), frame)
            self._interpreter.writes.write_item(
                owner, index, value, frame, node or target, target.value
            )

    def _unpack(
        self, target: ast.Tuple | ast.List, value: Value, frame: Frame, node: ast.stmt | None
    ) -> None:
        count = len(target.elts)
        for option, guards in options(value):
            items: list[Value] = [UNKNOWN] * count
            if isinstance(option, Seq):
                star = next(
                    (i for i, e in enumerate(target.elts) if isinstance(e, ast.Starred)), None
                )
                if star is None and len(option.items) == count:
                    items = list(option.items)
                elif star is not None and len(option.items) >= count - 1:
                    after = count - star - 1
                    items = list(option.items[:star])
                    items.append(Seq(option.items[star : len(option.items) - after]))
                    items += option.items[len(option.items) - after :] if after else ()
            before = frame.guards
            frame.guards = (*before, *guards)
            for element, item in zip(target.elts, items, strict=True):
                inner = element.value if isinstance(element, ast.Starred) else element
                self.assign(inner, item, frame, node)
            frame.guards = before

    def _delete(self, node: ast.Delete, frame: Frame) -> None:
        for target in node.targets:
            if isinstance(target, ast.Attribute):
                owner = self._interpreter.evaluator.value(target.value, frame)
                for option, guards in options(owner):
                    if isinstance(option, Ref):
                        self._interpreter.writes.emit(
                            frame, node, "del", "delete", option.child(target.attr), UNKNOWN,
                            guards=guards, must_exist=True,
                        )  # fmt: skip
            elif isinstance(target, ast.Subscript):
                owner = self._interpreter.evaluator.value(target.value, frame)
                index = self._interpreter.evaluator.value(target.slice, frame)
                self._interpreter.writes.delete_item(owner, index, frame, node)

    def branches(
        self, node: ast.AST, test: ast.expr, frame: Frame
    ) -> tuple[tuple[Guard, ...] | None, tuple[Guard, ...] | None]:
        """The guards of both branches of a test; None for one that never runs."""
        evaluator = self._interpreter.evaluator
        cond = evaluator.tested(evaluator.value(test, frame), test)
        known = _static_truth(test, cond)
        if known is True:
            return (), None
        if known is False:
            return None, ()
        line, file = getattr(test, "lineno", 0), frame.module.file
        yes = Guard(cond, id(node), 0, test, line, file)
        no = Guard(Cond("not", (cond,)), id(node), 1, test, line, file, negated=True)
        return (yes,), (no,)

    def _if(self, node: ast.If, frame: Frame) -> None:
        yes, no = self.branches(node, node.test, frame)
        before = frame.guards
        if yes is not None:
            frame.guards = (*before, *yes)
            self.body(node.body, frame)
        if no is not None:
            frame.guards = (*before, *no)
            self.body(node.orelse, frame)
        frame.guards = before
        # What follows a branch that leaves runs only when the branch was not taken.
        if yes is not None and no is not None:
            if _leaves(node.body):
                frame.guards = (*before, *no)
            elif node.orelse and _leaves(node.orelse):
                frame.guards = (*before, *yes)

    def _assert(self, node: ast.Assert, frame: Frame) -> None:
        yes, _ = self.branches(node, node.test, frame)
        if yes:
            frame.guards = (*frame.guards, *yes)

    def _for(self, node: ast.For | ast.AsyncFor, frame: Frame) -> None:
        items, _ = self._interpreter.evaluator.iterate(
            self._interpreter.evaluator.value(node.iter, frame)
        )
        before = frame.guards
        for item, guards in items[:UNROLL]:
            frame.guards = (*before, *guards)
            self.assign(node.target, item, frame, None)
            self.body(node.body, frame)
        frame.guards = before
        self.body(node.orelse, frame)

    def _while(self, node: ast.While, frame: Frame) -> None:
        self._interpreter.evaluator.value(node.test, frame)
        self.body(node.body, frame)
        self.body(node.orelse, frame)

    def _with(self, node: ast.With | ast.AsyncWith, frame: Frame) -> None:
        before = frame.guards
        for item in node.items:
            value = self._interpreter.evaluator.value(item.context_expr, frame)
            entered = self._interpreter.calls.enter(value)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, entered, frame, node)
            if (
                isinstance(value, Result)
                and isinstance(value.func, Ref)
                and value.func.dotted == "contextlib.suppress"
            ):
                names = {_error_name(a) for a in value.args}
                frame.guards = (*frame.guards, *self._try_guard(node, names, frame)[0])
        self.body(node.body, frame)
        frame.guards = before

    def _try(self, node: ast.Try, frame: Frame) -> None:
        names: set[str] = set()
        for handler in node.handlers:
            names |= self._caught(handler, frame)
        inside, outside = self._try_guard(node, names, frame)
        before = frame.guards
        frame.guards = (*before, *inside)
        self.body(node.body, frame)
        frame.guards = (*before, *inside)
        self.body(node.orelse, frame)
        leaves = bool(node.handlers)
        for index, handler in enumerate(node.handlers):
            cond = outside if self._caught(handler, frame) & _IMPORT_ERRORS else UNKNOWN
            text = cond.text if isinstance(cond, Cond) else f"except at line {handler.lineno}"
            guard = Guard(
                cond, id(node), index + 1, text, handler.lineno, frame.module.file, kind="except"
            )
            frame.guards = (*before, guard)
            if handler.name:
                frame.scope.bind(handler.name, UNKNOWN, frame.guards)
            self.body(handler.body, frame)
            leaves = leaves and _leaves(handler.body)
        frame.guards = before
        self.body(node.finalbody, frame)
        if leaves:
            frame.guards = (*before, *inside)  # whoever comes here came through the body

    def _caught(self, handler: ast.ExceptHandler, frame: Frame) -> set[str]:
        if handler.type is None:
            return {"BaseException"}
        value = self._interpreter.evaluator.value(handler.type, frame)
        items = value.items if isinstance(value, Seq) else (value,)
        return {_error_name(v) for v in items}

    def _try_guard(
        self, node: ast.AST, caught: set[str], frame: Frame
    ) -> tuple[tuple[Guard, ...], Value]:
        """The guard of a try's body, and the condition under which its handlers run."""
        wanted: list[Value] = []
        if caught & _IMPORT_ERRORS:
            for statement in getattr(node, "body", ()):
                wanted += self._interpreter.imports.imported(statement, frame)
        line, file = getattr(node, "lineno", 0), frame.module.file
        if not wanted:
            return (Guard(UNKNOWN, id(node), 0, "", line, file, kind="try"),), UNKNOWN
        text = ", ".join(v.dotted for v in wanted if isinstance(v, Ref))
        inside = Cond("importable", tuple(wanted), f"{text} can be imported")
        outside = Cond("not", (inside,), f"{text} cannot be imported")
        return (Guard(inside, id(node), 0, inside.text, line, file, kind="try"),), outside

    def _match(self, node: ast.Match, frame: Frame) -> None:
        self._interpreter.evaluator.value(node.subject, frame)
        before = frame.guards
        for index, case in enumerate(node.cases):
            guard = Guard(
                UNKNOWN, id(node), index, f"case {ast.unparse(case.pattern)}", node.lineno,
                frame.module.file,
            )  # fmt: skip
            frame.guards = (*before, guard)
            self.body(case.body, frame)
        frame.guards = before

    def _return(self, node: ast.Return, frame: Frame) -> None:
        if node.value is not None:
            value = self._interpreter.evaluator.value(node.value, frame)
            frame.returns.append((value, frame.guards))

    def _outer(self, node: ast.Global | ast.Nonlocal, frame: Frame) -> None:
        frame.scope.outer.update(node.names)


def _static_truth(test: ast.expr, cond: Value) -> bool | None:
    if isinstance(cond, Const):
        return bool(cond.value)
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)
    if name == "TYPE_CHECKING":
        return False
    if isinstance(cond, Cond) and cond.op == "not" and isinstance(test, ast.UnaryOp):
        inner = _static_truth(test.operand, cond.args[0])
        return None if inner is None else not inner
    if isinstance(cond, Cond) and cond.op in ("==", "!=", "is", "is not", "in", "not in"):
        left, right = cond.args
        positive = cond.op in ("==", "is", "in")
        if isinstance(left, Const) and isinstance(right, Const) and "in" not in cond.op.split():
            return (left.value == right.value) is positive
        if (
            isinstance(left, Const)
            and isinstance(right, Seq)
            and "in" in cond.op.split()
            and all(isinstance(v, Const) for v in right.items)
        ):
            return (left in right.items) is positive
        if (
            cond.op in ("is", "is not")
            and right == Const(None)
            and isinstance(left, (Func, Klass, Seq, Map, OwnModule))
        ):
            return cond.op == "is not"
    return None


def _leaves(body: list[ast.stmt]) -> bool:
    """Whether a block never runs through to its end."""
    if not body:
        return False
    last = body[-1]
    if isinstance(last, (ast.Return, ast.Raise, ast.Continue, ast.Break)):
        return True
    if isinstance(last, ast.If):
        return _leaves(last.body) and _leaves(last.orelse)
    if isinstance(last, (ast.With, ast.AsyncWith)):
        return _leaves(last.body)
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        return ast.unparse(last.value.func) in ("sys.exit", "exit", "os._exit", "pytest.skip")
    return False


def _error_name(value: Value) -> str:
    if isinstance(value, Ref):
        return value.attrs[-1] if value.attrs else value.module
    if isinstance(value, Klass):
        return value.node.name
    return ""
