"""Names of the project: of its modules, its classes and its instances."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable
from typing import TYPE_CHECKING

from patchkit.audit._expressions import Frame
from patchkit.audit._scopes import LazyName, Scope
from patchkit.audit._values import (
    NONE,
    UNKNOWN,
    Const,
    Func,
    Guard,
    Klass,
    OwnModule,
    Ref,
    Result,
    Unknown,
    Value,
    either,
    options,
)

if TYPE_CHECKING:
    from patchkit.audit._interpreter import Interpreter


class Names:
    """Looks names up."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self.instance_values: dict[tuple[Klass, str], Value] = {}
        self.instances_read: set[Klass] = set()

    def own_name(self, lazy: LazyName) -> Value:
        """A name of one of the project's modules."""
        state = self._interpreter.module(lazy.module)
        if state is not None:
            bindings = state.scope.names.get(lazy.name)
            if bindings:
                found = []
                for binding in bindings:
                    value = binding.value
                    if isinstance(value, LazyName):
                        if value == lazy:
                            continue
                        value = self.own_name(value)
                    found.append((value, binding.guards))
                if found:
                    return either(found)
            submodule = f"{lazy.module}.{lazy.name}"
            if self._interpreter.project.find(submodule) is not None:
                return OwnModule(submodule)
            for module, _ in state.scope.stars:
                starred = self.star_name(module, lazy.name)
                if starred is not None:
                    return starred
            return Unknown(lazy.name)
        submodule = f"{lazy.module}.{lazy.name}"
        if self._interpreter.project.find(submodule) is not None or self._is_folder(submodule):
            return OwnModule(submodule)
        return Unknown(lazy.name)

    def _is_folder(self, module: str) -> bool:
        start = module + "."
        return any(name.startswith(start) for name in self._interpreter.project.by_module)

    def star_name(self, module: str, name: str) -> Value | None:
        """A name that ``from module import *`` may have brought."""
        if name.startswith("__"):
            return None
        if self._interpreter.project.is_own(module):
            state = self._interpreter.module(module)
            if state is None or (name not in state.scope.names and not state.scope.stars):
                return None
            value = self.own_name(LazyName(module, name))
            return None if isinstance(value, Unknown) else value
        return None if hasattr(builtins, name) else Ref(module, (name,))

    def member(self, klass: Klass, name: str, depth: int = 0) -> Value:
        """A member of one of the project's classes, or of its bases."""
        scope = self._interpreter.definitions.class_scopes.get(klass)
        if scope is not None and name in scope.names:
            found = []
            for binding in scope.names[name]:
                value = binding.value
                found.append(
                    (self.own_name(value) if isinstance(value, LazyName) else value, binding.guards)
                )
            return either(found)
        if depth < 12:
            for base in klass.bases:
                for option, _ in options(base):
                    if isinstance(option, Klass):
                        value = self.member(option, name, depth + 1)
                        if not isinstance(value, Unknown):
                            return value
        return UNKNOWN

    def instance_value(self, klass: Klass, name: str) -> Value:
        """What a class stores under ``self.name``, where one method does, and simply."""
        if klass not in self.instances_read:
            self.instances_read.add(klass)
            self._read_instance(klass)
        return self.instance_values.get((klass, name), UNKNOWN)

    def _read_instance(self, klass: Klass) -> None:
        stored: dict[str, list[Value]] = {}
        methods = dict(self.class_members(klass))
        methods.setdefault("__init__", self.member(klass, "__init__"))
        for method in methods.values():
            if not isinstance(method, Func) or isinstance(method.node, ast.Lambda):
                continue
            args = [*method.node.args.posonlyargs, *method.node.args.args]
            if not args or method.owner is None:
                continue
            frame = Frame(method.module, Scope("function", method.scope), method)
            self._interpreter.definitions.bind_unknown(method, frame.scope, frame)
            for statement in method.node.body:
                if isinstance(statement, (ast.Import, ast.ImportFrom)):
                    self._interpreter.statements.body([statement], frame)
                elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                    target = statement.targets[0]
                    if (
                        isinstance(target, ast.Attribute)
                        and isinstance(target.value, ast.Name)
                        and target.value.id == args[0].arg
                    ):
                        simple = isinstance(
                            statement.value, (ast.Name, ast.Attribute, ast.Constant)
                        )
                        stored.setdefault(target.attr, []).append(
                            self._interpreter.evaluator.value(statement.value, frame)
                            if simple
                            else UNKNOWN
                        )
        for name, values in stored.items():
            # None stands there until something does.
            kept = [v for v in values if v != NONE] or values
            if all(v == kept[0] for v in kept):
                self.instance_values[klass, name] = kept[0]

    def class_members(self, klass: Klass) -> Iterable[tuple[str, Value]]:
        """The names that a class body binds."""
        scope = self._interpreter.definitions.class_scopes.get(klass)
        for name, bindings in scope.names.items() if scope else ():
            value = bindings[-1].value
            if not isinstance(value, LazyName):
                yield name, value

    def module_named(self, name: Value) -> Value:
        """What ``sys.modules[name]`` or ``import_module(name)`` gives."""
        found: list[tuple[Value, tuple[Guard, ...]]] = []
        for option, guards in options(name):
            if isinstance(option, Unknown) and option.text == "__name__":
                found.append((OwnModule("__name__"), guards))
            elif isinstance(option, Const) and isinstance(option.value, str):
                text = option.value
                if self._interpreter.project.is_own(text):
                    found.append((OwnModule(text), guards))
                else:
                    self._interpreter.known_modules.add(text)
                    found.append((Ref(text), guards))
            else:
                found.append((Result(Ref("importlib", ("import_module",)), (option,)), guards))
        return either(found)

    def peek(self, node: ast.expr, frame: Frame) -> Value:
        """The value of a name or a chain of attributes; of nothing that would be called."""
        if isinstance(node, ast.Name):
            return self._interpreter.evaluator.lookup(node.id, frame.scope, ())
        if isinstance(node, ast.Attribute):
            return self._interpreter.evaluator.attribute(self.peek(node.value, frame), node.attr)
        return UNKNOWN
