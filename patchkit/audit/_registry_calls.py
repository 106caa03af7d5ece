"""Registries and containers of others: entries added, replaced, taken out."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from patchkit.audit._handlers import Args, Kwargs
from patchkit.audit._known import (
    REGISTERING,
    is_code,
    is_setting,
    looks_like_registry,
)
from patchkit.audit._values import (
    NONE,
    UNKNOWN,
    Const,
    Map,
    Ref,
    Result,
    Seq,
    Value,
    last_name,
    options,
)

if TYPE_CHECKING:
    from patchkit.audit._expressions import Frame
    from patchkit.audit._interpreter import Interpreter


class RegistryCalls:
    """Models registrations."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter

    def register(
        self,
        registry: Ref,
        args: Args,
        kwargs: Kwargs,
        value: Value,
        frame: Frame,
        node: ast.AST,
    ) -> None:
        keys = [a for a in (*args, *kwargs.values()) if isinstance(a, Const)]
        names = [k.value for k in keys if isinstance(k.value, str)]
        key = str(names[0]) if names else last_name(value)
        self._interpreter.writes.emit(
            frame, node, "registry", "register", registry, value, key=key or None, must_exist=True
        )

    def foreign_method(
        self, base: Ref, name: str, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST
    ) -> Value | None:
        dotted = f"{base.dotted}.{name}"
        if dotted in self._interpreter.calls.table:
            return None
        if base.dotted == "sys.modules":
            if name == "get" and args:
                return self._interpreter.names.module_named(args[0])
            if name in ("values", "items"):
                one = Result(base)  # whichever is loaded
                return Seq((Seq((UNKNOWN, one)),)) if name == "items" else Seq((one,))
        if name in ("update", "setdefault", "__setitem__", "pop", "append", "insert", "extend"):
            return self._foreign_container(base, name, args, kwargs, frame, node)
        if name in ("__setattr__", "__delattr__") and len(args) > 1 and base.attrs:
            # `type.__setattr__(X, …)` came through the table; here X itself is asked.
            return None
        if REGISTERING.match(name) and looks_like_registry(base):
            code = [a for a in (*args, *kwargs.values()) if is_code(a)]
            strings = [a for a in (*args, *kwargs.values()) if isinstance(a, Const)]
            if code or len(strings) > 1:
                value = code[-1] if code else strings[-1]
                self.register(base, args, kwargs, value, frame, node)
            return Result(base.child(name), args, tuple(kwargs.items()))
        if name == "py_impl":
            return Result(base.child(name), args)
        return None

    def _foreign_container(
        self, base: Ref, name: str, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST
    ) -> Value | None:
        if base.dotted == "sys.modules":
            if name in ("setdefault", "__setitem__") and len(args) > 1:
                self._interpreter.writes.write_item(base, args[0], args[1], frame, node)
            elif name == "update" and args and isinstance(args[0], Map):
                for key, value in args[0].items:
                    self._interpreter.writes.write_item(base, key, value, frame, node)
            elif name == "pop":
                return UNKNOWN
            return NONE
        if base.dotted in ("sys.meta_path", "sys.path_hooks"):
            self._interpreter.writes.blind(
                "import hook", frame, node, "an import hook may change any module as it is loaded"
            )
            return NONE
        if base.dotted == "os.environ":
            if name in ("setdefault", "__setitem__") and len(args) > 1:
                self._interpreter.writes.setting(args[0], args[1])
            elif name == "update":
                for source in args:
                    for key, value in source.items if isinstance(source, Map) else ():
                        self._interpreter.writes.setting(key, value)
            return UNKNOWN
        if not base.attrs or base.root in ("os", "sys", "warnings", "logging"):
            return None
        last = base.attrs[-1].lstrip("_")
        if not (last.isupper() or "registry" in last.lower() or "mapping" in last.lower()):
            return None
        if is_setting(Ref(base.module, base.attrs[:-1]), base.attrs[-1], UNKNOWN):
            return UNKNOWN
        if name == "pop":
            if args and isinstance(args[0], Const):
                self._interpreter.writes.delete_item(base, args[0], frame, node)
            return UNKNOWN
        if name in ("append", "insert", "extend"):
            value = args[-1] if args else UNKNOWN
            self._interpreter.writes.emit(
                frame, node, name, "register", base, value, must_exist=True
            )
            return NONE
        self.write_entries(base, name, args, kwargs, frame, node)
        return NONE

    def write_entries(
        self, base: Value, name: str, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST
    ) -> None:
        write = self._interpreter.writes.write_item
        if name in ("setdefault", "__setitem__"):
            if len(args) > 1:
                write(base, args[0], args[1], frame, node)
            return
        for source in args:
            for option, _ in options(source):
                if isinstance(option, Map):
                    for key, value in option.items:
                        write(base, key, value, frame, node)
                else:
                    write(base, UNKNOWN, UNKNOWN, frame, node)
        for key_name, value in kwargs.items():
            write(base, Const(key_name), value, frame, node)
