"""Calls: what known functions do to names, and what a call of the project's own does."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from patchkit.audit._attribute_calls import AttributeCalls
from patchkit.audit._expressions import UNROLL, rebind
from patchkit.audit._handlers import Args, Handler, Kwargs
from patchkit.audit._known import (
    DOORS,
    WRAPPER_CLASSES,
    WRAPPING_CALLS,
    WRAPPING_LIBRARIES,
    dotted_ref,
    is_code,
)
from patchkit.audit._library_calls import LibraryCalls
from patchkit.audit._mock_calls import MockCalls
from patchkit.audit._operator_calls import OperatorCalls
from patchkit.audit._plain_calls import PlainCalls
from patchkit.audit._registry_calls import RegistryCalls
from patchkit.audit._sightings import Door
from patchkit.audit._sources import SourceCalls
from patchkit.audit._values import (
    NONE,
    UNKNOWN,
    Bound,
    Cond,
    Const,
    DictOf,
    Func,
    Inst,
    Klass,
    Map,
    Param,
    Ref,
    Result,
    Seq,
    Specifiers,
    Value,
    Version,
    either,
    first_of,
    last_name,
    options,
)
from patchkit.audit._version_calls import VERSION_TESTS, VersionCalls

if TYPE_CHECKING:
    from patchkit.audit._expressions import Frame
    from patchkit.audit._interpreter import Interpreter


_MANAGER = re.compile(r"^(?:register_patch(?:es)?|add_patch|apply_patch|patch_attr\w*)$")

_GROWING = frozenset({"append", "add", "extend", "update"})


class Calls:
    """Models of calls."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self.sources = SourceCalls(interpreter)
        self.plain = PlainCalls(interpreter)
        self.attributes = AttributeCalls(interpreter)
        self.versions = VersionCalls(interpreter)
        self.mocks = MockCalls(interpreter)
        self.libraries = LibraryCalls(interpreter)
        self.operators = OperatorCalls(interpreter)
        self.registries = RegistryCalls(interpreter)
        self.table: dict[str, Handler] = {
            "builtins.exec": self._exec,
            "os.environ.setdefault": self._environ,
            "os.putenv": self._environ,
        }
        for part in (
            self.plain, self.attributes, self.versions, self.mocks, self.libraries,
            self.operators, self.sources,
        ):  # fmt: skip
            self.table.update(part.table)

    def call(self, node: ast.Call, frame: Frame) -> Value:
        """The value of a call, and whatever it writes."""
        evaluate = self._interpreter.evaluator.value
        base: Value | None = None
        name = ""
        if isinstance(node.func, ast.Attribute):
            base, name = evaluate(node.func.value, frame), node.func.attr
        args: list[Value] = []
        for argument in node.args:
            value = evaluate(argument, frame)
            if isinstance(argument, ast.Starred):
                if isinstance(value, Seq):
                    args += value.items
                else:
                    args.append(UNKNOWN)
            else:
                args.append(value)
        kwargs: Kwargs = {}
        for keyword in node.keywords:
            value = evaluate(keyword.value, frame)
            if keyword.arg is None:
                if isinstance(value, Map):
                    for key, inner in value.items:
                        if isinstance(key, Const) and isinstance(key.value, str):
                            kwargs[key.value] = inner
            else:
                kwargs[keyword.arg] = value
                if keyword.arg in DOORS:
                    self.door(keyword.arg, value, frame, node)
        arguments = tuple(args)
        if base is not None and name in _GROWING and isinstance(node.func, ast.Attribute):
            grown = Map(tuple((Const(k), v) for k, v in kwargs.items()))
            self._grow(node.func, base, arguments or (grown,), frame)
        if base is not None:
            found = []
            for option, guards in options(base):
                before = frame.guards
                frame.guards = (*before, *guards)
                result = self._method(option, name, arguments, kwargs, frame, node)
                if result is None:
                    func = self._interpreter.evaluator.attribute(option, name, node.func)
                    result = self.apply(func, arguments, kwargs, frame, node)
                frame.guards = before
                found.append((result, guards))
            result = either(found)
        else:
            result = self.apply(evaluate(node.func, frame), arguments, kwargs, frame, node)
        self._manager_call(node, arguments, kwargs, frame)
        return result

    def _grow(self, func: ast.Attribute, base: Value, args: Args, frame: Frame) -> None:
        """``table.append(row)`` and its like on a table that the project makes here."""
        if not isinstance(func.value, ast.Name):
            return
        found = [(_grown(v, func.attr, args[0]), v, guards) for v, guards in options(base)]
        if any(new is not None for new, _, _ in found):
            rebind(
                func.value.id,
                either([(old if new is None else new, guards) for new, old, guards in found]),
                frame,
            )

    def apply(self, func: Value, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        """``func(*args, **kwargs)``."""
        found = []
        for option, guards in options(func):
            before = frame.guards
            frame.guards = (*before, *guards)
            found.append((self._apply(option, args, kwargs, frame, node), guards))
            frame.guards = before
        return either(found)

    def _apply(self, func: Value, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if isinstance(func, Ref):
            return self._foreign(func, args, kwargs, frame, node)
        if isinstance(func, Func):
            return self._interpreter.inlining.inline(func, args, kwargs, frame, node)
        if isinstance(func, Bound):
            return self._interpreter.inlining.inline(
                func.func, (func.self, *args), kwargs, frame, node
            )
        if isinstance(func, Klass):
            made = Inst(func, args, tuple(kwargs.items()))
            init = self._interpreter.names.member(func, "__init__")
            if isinstance(init, Func):
                self._interpreter.inlining.inline(
                    init, (made, *args), kwargs, frame, node, effects_only=True
                )
            return made
        if isinstance(func, Inst) and isinstance(func.cls, Klass):
            method = self._interpreter.names.member(func.cls, "__call__")
            if isinstance(method, Func):
                return self._interpreter.inlining.inline(method, (func, *args), kwargs, frame, node)
        if isinstance(func, Result):
            return self._apply_result(func, args, kwargs, frame, node)
        return UNKNOWN

    def _apply_result(
        self, func: Result, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST
    ) -> Value:
        """Calling what a call returned: decorators with arguments, partials."""
        inner = func.func
        name = last_name(inner)
        if name in ("wraps", "update_wrapper"):
            return args[0] if args else UNKNOWN
        if name in ("partial", "partialmethod") and func.args:
            merged = {**dict(func.kwargs), **kwargs}
            return self.apply(func.args[0], (*func.args[1:], *args), merged, frame, node)
        if name == "attrgetter" and func.args and args and isinstance(func.args[0], Const):
            value = args[0]
            for part in str(func.args[0].value).split("."):
                value = self._interpreter.evaluator.attribute(value, part)
            return value
        if args:
            for definition in args[:1]:
                self.decorate(func, definition, frame, node)
        return Result(inner, (*args, *func.args), func.kwargs)

    def decorate(self, decorator: Value, definition: Value, frame: Frame, node: ast.AST) -> None:
        """``@decorator`` above a function or a class: what it writes."""
        for option, _ in options(decorator):
            if isinstance(option, Func):
                self._interpreter.inlining.inline(
                    option, (definition,), {}, frame, node, effects_only=True
                )
            elif isinstance(option, Bound):
                self._interpreter.inlining.inline(
                    option.func, (option.self, definition), {}, frame, node, effects_only=True
                )
            elif isinstance(option, Inst) and isinstance(option.cls, Klass):
                method = self._interpreter.names.member(option.cls, "__call__")
                if isinstance(method, Func):
                    self._interpreter.inlining.inline(
                        method, (option, definition), {}, frame, node, effects_only=True
                    )
            elif isinstance(option, Result) and isinstance(option.func, Ref):
                self.libraries.foreign_decorator(option, option.func, definition, frame, node)
            elif isinstance(option, Ref):
                self.libraries.plain_decorator(option, definition, frame, node)

    def enter(self, value: Value) -> Value:
        """What ``with value as name`` binds."""
        if isinstance(value, Result) and isinstance(value.func, Ref):
            if value.func.dotted == "contextlib.contextmanager" and value.args:
                return value.args[0]
            return UNKNOWN
        return value

    def _foreign(self, func: Ref, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        handler = self.table.get(func.dotted)
        if handler is not None:
            return handler(args, kwargs, frame, node)
        name = last_name(func)
        if name in VERSION_TESTS:
            return self.versions.version_test(name, args, node)
        if name in WRAPPING_CALLS and func.root in WRAPPING_LIBRARIES:
            return self.libraries.wrapping(func, name, args, kwargs, frame, node)
        if name == "apply_patch" and func.root == "wrapt" and len(args) > 2:
            self.attributes.set_on(
                args[0], args[1], args[2], frame, node, "wrapt", must_exist=False
            )
            return UNKNOWN
        if name in WRAPPER_CLASSES and func.root == "wrapt":
            return Result(func, args, tuple(kwargs.items()))
        if name[:1].isupper() and name not in ("Patch",):
            return Inst(func, args, tuple(kwargs.items()))
        return Result(func, args, tuple(kwargs.items()))

    def _method(
        self, base: Value, name: str, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST
    ) -> Value | None:
        """A method call whose effect is known; None where it is not."""
        found = self.sources.method(base, name, args, kwargs, frame, node)
        if found is not None:
            return found
        if isinstance(base, Ref):
            return self.registries.foreign_method(base, name, args, kwargs, frame, node)
        if isinstance(base, DictOf) and name in ("update", "__setitem__", "setdefault"):
            self.registries.write_entries(base, name, args, kwargs, frame, node)
            return NONE
        if isinstance(base, Inst) and isinstance(base.cls, Ref):
            if base.cls.dotted == "torch.library.Library":
                return self.operators.library_method(base, name, args, kwargs, frame, node)
            if name == "contains" and base.cls.attrs[-1:] == ("SpecifierSet",):
                return UNKNOWN
        if isinstance(base, Specifiers) and name == "contains" and args:
            return Cond("in", (args[0], base), node)
        if isinstance(base, Map):
            return self.plain.map_method(base, name, args)
        if isinstance(base, Version):
            return self.versions.version_method(base, name, args, node)
        if isinstance(base, Param) and base.name == "monkeypatch":
            return self.mocks.monkeypatch(name, args, kwargs, frame, node)
        if isinstance(base, Const) and isinstance(base.value, str):
            return self.plain.string_method(base.value, name, args)
        if isinstance(base, Func) and name == "__get__":
            return base
        if isinstance(base, Seq) and name in ("copy",):
            return base
        return None

    def _manager_call(self, node: ast.Call, args: Args, kwargs: Kwargs, frame: Frame) -> None:
        """A patch manager's ``register_patch("package.module.name", function)``."""
        func = node.func
        name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
        if not _MANAGER.match(name) or len(args) < 2 or not is_code(args[1]):
            return
        if isinstance(args[0], Const) and isinstance(args[0].value, str):
            found = dotted_ref(args[0].value)
            if found is not None and found.attrs:
                owner = Ref(found.module, found.attrs[:-1])
                self._interpreter.writes.write(
                    owner, found.attrs[-1], args[1], frame, node, "patch manager"
                )

    def door(self, name: str, value: Value, frame: Frame, node: ast.AST) -> None:
        """A hook that Ray or vLLM calls in each of its workers."""
        found: list[Value] = []
        for option, _ in options(value):
            found += option.items if isinstance(option, Seq) else (option,)
        for option in found:
            target = ""
            if isinstance(option, (Func, Klass)):
                target = option.reference
            elif isinstance(option, Const) and isinstance(option.value, str):
                target = option.value
                if ":" not in target:
                    module, _, last = target.rpartition(".")
                    target = f"{module}:{last}" if module else target
            if target:
                entry = Door(name, "", target, self._interpreter.writes.place(frame, node))
                if entry not in self._interpreter.found.doors:
                    self._interpreter.found.doors.append(entry)

    def _environ(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if len(args) > 1:
            self._interpreter.writes.setting(args[0], args[1])
        return UNKNOWN

    def _exec(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if args and self.sources.executed(args[0], frame, node):
            return NONE
        namespace = args[1] if len(args) > 1 else UNKNOWN
        foreign = first_of(namespace, DictOf)
        reason = "code that is built at run time is executed"
        if isinstance(foreign, DictOf) and isinstance(foreign.owner, Ref):
            reason += f" in the namespace of {foreign.owner.dotted}"
        self._interpreter.writes.blind("exec", frame, node, reason)
        return NONE


def _grown(base: Value, name: str, added: Value) -> Value | None:
    """A table after a call of one of its methods; None where it is none, or stays."""
    if isinstance(base, Seq) and len(base.items) < UNROLL:
        if name in ("append", "add"):
            return Seq((*base.items, added))
        if name == "extend" and isinstance(added, Seq):
            return Seq((*base.items, *added.items))
    if isinstance(base, Map) and name == "update" and isinstance(added, Map):
        new = {id(k) if not isinstance(k, Const) else k: (k, v) for k, v in base.items}
        new.update({k if isinstance(k, Const) else id(k): (k, v) for k, v in added.items})
        return Map(tuple(new.values()))
    return None
