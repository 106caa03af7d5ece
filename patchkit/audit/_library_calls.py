"""Libraries that patch: wrapt and its like, gorilla, mpat, forbiddenfruit, patchy."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from patchkit.audit._handlers import Args, Handler, Kwargs
from patchkit.audit._known import (
    REGISTERING,
    WRAPPING_CALLS,
    dotted_ref,
    looks_like_registry,
)
from patchkit.audit._operator_calls import dispatch_key
from patchkit.audit._values import (
    UNKNOWN,
    Const,
    Func,
    Klass,
    OwnModule,
    Param,
    Ref,
    Result,
    Unknown,
    Value,
    last_name,
)

if TYPE_CHECKING:
    from patchkit.audit._expressions import Frame
    from patchkit.audit._interpreter import Interpreter


class LibraryCalls:
    """Models patching libraries."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self.table: dict[str, Handler] = {
            "gorilla.Patch": self.gorilla,
            "forbiddenfruit.curse": self.curse,
            "patchy.patch": self.patchy,
            "patchy.api.patch": self.patchy,
            "wrapt.register_post_import_hook": self.post_import,
            "wrapt.importer.register_post_import_hook": self.post_import,
        }  # fmt: skip

    def wrapping(
        self, func: Ref, name: str, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST
    ) -> Value:
        where, what, how = WRAPPING_CALLS[name]

        def pick(index: int, *names: str) -> Value:
            if index < len(args):
                return args[index]
            return next((kwargs[n] for n in names if n in kwargs), UNKNOWN)

        target = self._as_module(pick(where, "target", "module", "parent"))
        attribute = pick(what, "name", "attribute")
        wrapper = pick(how, "wrapper", "factory")
        if isinstance(target, Unknown) or not isinstance(attribute, Const):
            if not isinstance(target, (Param, OwnModule)) or isinstance(attribute, Const):
                self._interpreter.writes.blind(
                    "dynamic name", frame, node, f"what {name}() wraps is computed at run time"
                )
            return UNKNOWN
        form = "wrapt" if func.root == "wrapt" else func.root
        self._interpreter.calls.attributes.set_on(
            target, attribute, wrapper, frame, node, form, action="wrap"
        )
        return UNKNOWN

    def _as_module(self, value: Value) -> Value:
        if isinstance(value, Const) and isinstance(value.value, str):
            return self._interpreter.names.module_named(value)
        return value

    def foreign_decorator(
        self, value: Result, func: Ref, definition: Value, frame: Frame, node: ast.AST
    ) -> None:
        """A decorator with arguments, out of a library."""
        name, args, kwargs = last_name(func), value.args, dict(value.kwargs)
        if func.root == "wrapt" and name == "patch_function_wrapper" and len(args) > 1:
            self._interpreter.calls.attributes.set_on(
                self._as_module(args[0]), args[1], definition, frame, node, "wrapt", action="wrap"
            )
        elif func.root == "wrapt" and name == "when_imported" and args:
            module = self._as_module(args[0])
            if isinstance(module, Ref):
                self._interpreter.calls.apply(definition, (module,), {}, frame, node)
        elif func.root == "gorilla" and name == "patch" and args:
            named = kwargs.get("name", Const(last_name(definition)))
            self._interpreter.calls.attributes.set_on(
                args[0], named, definition, frame, node, "gorilla", must_exist=False
            )
        elif func.root == "gorilla" and name == "patches" and args:
            self._gorilla_class(args[0], definition, frame, node)
        elif func.root == "mpat" and name == "patch" and args:
            found = dotted_ref(str(args[0].value)) if isinstance(args[0], Const) else None
            if found is not None and found.attrs:
                owner = Ref(found.module, found.attrs[:-1])
                self._interpreter.calls.attributes.set_on(
                    owner, Const(found.attrs[-1]), definition, frame, node, "mpat", action="wrap"
                )
        elif func.dotted in ("torch.library.impl", "torch.library.register_kernel"):
            self._interpreter.calls.operators.dispatch(args, kwargs, definition, frame, node)
        elif name == "py_impl" and "ops" in func.attrs:
            operator = Ref(func.module, func.attrs[:-1])
            self._interpreter.calls.operators.operator(
                operator, definition, dispatch_key(args), frame, node
            )
        elif REGISTERING.match(name) and looks_like_registry(Ref(func.module, func.attrs[:-1])):
            self._interpreter.calls.registries.register(
                Ref(func.module, func.attrs[:-1]), args, kwargs, definition, frame, node
            )

    def plain_decorator(self, func: Ref, definition: Value, frame: Frame, node: ast.AST) -> None:
        name = last_name(func)
        if REGISTERING.match(name) and looks_like_registry(Ref(func.module, func.attrs[:-1])):
            self._interpreter.calls.registries.register(
                Ref(func.module, func.attrs[:-1]), (), {}, definition, frame, node
            )

    def gorilla(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if len(args) > 2:
            self._interpreter.calls.attributes.set_on(
                args[0], args[1], args[2], frame, node, "gorilla", must_exist=False
            )
        return UNKNOWN

    def _gorilla_class(self, target: Value, definition: Value, frame: Frame, node: ast.AST) -> None:
        if isinstance(definition, Klass):
            for name, value in self._interpreter.names.class_members(definition):
                if not name.startswith("__"):
                    self._interpreter.calls.attributes.set_on(
                        target, Const(name), value, frame, node, "gorilla", must_exist=False
                    )

    def curse(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if len(args) > 2:
            self._interpreter.calls.attributes.set_on(
                args[0], args[1], args[2], frame, node, "forbiddenfruit", must_exist=False
            )
        return UNKNOWN

    def patchy(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if args and isinstance(args[0], Ref):
            anchors = self._interpreter.calls.sources.diff_anchors(
                args[1] if len(args) > 1 else UNKNOWN
            )
            self._interpreter.writes.emit(
                frame, node, "patchy", "rewrite", args[0], UNKNOWN, edits=anchors, must_exist=True
            )
        return UNKNOWN

    def post_import(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if len(args) > 1:
            module = self._as_module(args[1])
            if isinstance(module, Ref):
                self._interpreter.calls.apply(args[0], (module,), {}, frame, node)
        return UNKNOWN

    def when_loaded(self, func: Func, frame: Frame, node: ast.expr) -> None:
        """``@patch_for("package.module")`` above a function that takes that module.

        Projects register such functions, and call them once the module is loaded.
        """
        if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
            return
        named = node.args[0]
        if not isinstance(named, ast.Constant) or not isinstance(named.value, str):
            return
        spec = func.node.args
        if len([*spec.posonlyargs, *spec.args]) != 1 or spec.kwonlyargs or frame.call is not None:
            return
        place = dotted_ref(named.value)
        if place is None or not place.attrs or "." not in named.value or func.owner is not None:
            return
        interpreter = self._interpreter
        made = interpreter.names.peek(node.func, frame)
        if place.root not in interpreter.foreign_names or isinstance(made, Ref):
            return
        interpreter.inlining.inline(
            func, (interpreter.names.module_named(Const(named.value)),), {}, frame, node,
            effects_only=True,
        )  # fmt: skip
