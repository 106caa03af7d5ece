"""Calls that read or set attributes, and those that find modules by name."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, TypeGuard

from patchkit.audit._handlers import Args, Handler, Kwargs
from patchkit.audit._known import (
    dotted_ref,
    is_code,
)
from patchkit.audit._values import (
    NONE,
    UNKNOWN,
    ClassOf,
    Cond,
    Const,
    DictOf,
    FilePath,
    Guard,
    Inst,
    Ref,
    Somewhere,
    Value,
    either,
    names_module,
    options,
)

if TYPE_CHECKING:
    from patchkit.audit._expressions import Frame
    from patchkit.audit._interpreter import Interpreter


class AttributeCalls:
    """Models ``setattr``, ``getattr``, ``import_module`` and their like."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self.table: dict[str, Handler] = {
            "builtins.setattr": self.setattr,
            "builtins.object.__setattr__": self.setattr,
            "builtins.type.__setattr__": self.setattr,
            "builtins.delattr": self.delattr,
            "builtins.getattr": self.getattr,
            "inspect.getattr_static": self.getattr,
            "builtins.hasattr": self.hasattr,
            "builtins.vars": lambda a, k, f, n: DictOf(a[0]) if a else UNKNOWN,
            "builtins.type": self.type_of,
            "builtins.__import__": self.import_module,
            "importlib.import_module": self.import_module,
            "importlib.util.find_spec": self.find_spec,
            "importlib.reload": lambda a, k, f, n: a[0] if a else UNKNOWN,
            "pkgutil.resolve_name": self.resolve_name,
            "pydoc.locate": self.resolve_name,
            "inspect.getmodule": self.module_of,
        }  # fmt: skip

    def setattr(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if len(args) >= 3:
            self.set_on(args[0], args[1], args[2], frame, node, "setattr", must_exist=False)
        return NONE

    def set_on(
        self,
        owner: Value,
        name: Value,
        value: Value,
        frame: Frame,
        node: ast.AST,
        form: str,
        *,
        must_exist: bool = True,
        action: str | None = None,
    ) -> None:
        for option, guards in options(name):
            before = frame.guards
            frame.guards = (*before, *guards)
            if option == NONE:
                pass  # the name that was looked for and not found
            elif isinstance(option, Const) and isinstance(option.value, str):
                target = owner
                *path, last = option.value.split(".")
                for part in path:
                    target = self._interpreter.evaluator.attribute(target, part)
                self._interpreter.writes.write(
                    target, last, value, frame, node, form, must_exist=must_exist, action=action
                )
            else:
                for target, _ in options(owner):
                    if isinstance(target, Ref) and target.root not in ("sys", "os"):
                        self._interpreter.writes.blind(
                            "dynamic name", frame, node,
                            f"the name that is set on {target.dotted} is computed at run time",
                        )  # fmt: skip
                    elif isinstance(target, ClassOf) and is_code(value):
                        self._interpreter.writes.blind(
                            "class of an object", frame, node,
                            "the class and the name that are set are known at run time only",
                        )  # fmt: skip
                    elif names_module(target) or isinstance(target, Somewhere):
                        self._interpreter.writes.blind(
                            "dynamic module", frame, node,
                            "the module and the name that are set are computed at run time",
                        )  # fmt: skip
            frame.guards = before

    def delattr(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if len(args) > 1 and isinstance(args[1], Const) and isinstance(args[1].value, str):
            for option, guards in options(args[0]):
                if isinstance(option, Ref):
                    self._interpreter.writes.emit(
                        frame, node, "delattr", "delete", option.child(args[1].value), UNKNOWN,
                        guards=guards, must_exist=True,
                    )  # fmt: skip
        return NONE

    def getattr(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if len(args) < 2:
            return UNKNOWN
        found: list[tuple[Value, tuple[Guard, ...]]] = []
        for option, guards in options(args[1]):
            if isinstance(option, Const) and isinstance(option.value, str):
                value = self._interpreter.evaluator.attribute(args[0], option.value, node)
                if len(args) > 2 and args[2] == NONE:
                    asked = {v for v, _ in options(args[0])}
                    places = (v for v, _ in options(value) if isinstance(v, Ref) and v not in asked)
                    self._interpreter.evaluator.may_be_missing.update(places)
                found.append((value, guards))
            elif any(names_module(v) or isinstance(v, Somewhere) for v, _ in options(args[0])):
                found.append((Somewhere(), guards))
            else:
                found += [
                    (Somewhere(owner.dotted) if _may_hold_classes(owner) else UNKNOWN, guards)
                    for owner in (v for v, _ in options(args[0]))
                ]
        return either(found)

    def hasattr(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if len(args) > 1:
            return Cond("hasattr", (args[0], args[1]), node)
        return UNKNOWN

    def type_of(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if len(args) != 1:
            return UNKNOWN
        value = args[0]
        if isinstance(value, Inst):
            return value.cls
        return ClassOf(value)

    def import_module(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        name = args[0] if args else kwargs.get("name", UNKNOWN)
        if isinstance(name, Const) and isinstance(name.value, str) and name.value.startswith("."):
            package = args[1] if len(args) > 1 else kwargs.get("package", UNKNOWN)
            if isinstance(package, Const) and isinstance(package.value, str):
                name = Const(package.value + name.value)
        value = self._interpreter.names.module_named(name)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "__import__":
            has_list = len(args) > 3 or "fromlist" in kwargs
            if isinstance(value, Ref) and not has_list:
                return Ref(value.root)
        return value

    def find_spec(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if args and isinstance(args[0], Const) and isinstance(args[0].value, str):
            package, *parts = args[0].value.split(".")
            if not self._interpreter.project.is_own(package):
                return Inst(
                    Ref("importlib.machinery", ("ModuleSpec",)), (FilePath(package, tuple(parts)),)
                )
        return UNKNOWN

    def resolve_name(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if args and isinstance(args[0], Const) and isinstance(args[0].value, str):
            found = dotted_ref(args[0].value)
            if found is not None and not self._interpreter.project.is_own(found.root):
                return found
        return UNKNOWN

    def module_of(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if args and isinstance(args[0], Ref) and args[0].attrs:
            return Ref(args[0].module, args[0].attrs[:-1])
        return UNKNOWN


def _may_hold_classes(value: Value) -> TypeGuard[Ref]:
    return isinstance(value, Ref) and value.root not in ("sys", "os", "builtins")
