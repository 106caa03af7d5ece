"""Import statements, of the project's modules and of others."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from patchkit.audit._project import SourceFile
from patchkit.audit._scopes import LazyName
from patchkit.audit._values import (
    OwnModule,
    Ref,
    Value,
)

if TYPE_CHECKING:
    from patchkit.audit._expressions import Frame
    from patchkit.audit._interpreter import Interpreter


class Imports:
    """Binds what is imported."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter

    def _file(self, frame: Frame) -> SourceFile | None:
        return self._interpreter.project.by_path.get(frame.module.path)

    def _base(self, node: ast.ImportFrom, frame: Frame) -> str:
        if not node.level:
            return node.module or ""
        parts = frame.module.package.split(".") if frame.module.package else []
        if node.level > 1:
            parts = parts[: 1 - node.level]
        return ".".join([*parts, node.module] if node.module else parts)

    def plain(self, node: ast.Import, frame: Frame) -> None:
        file = self._file(frame)
        for alias in node.names:
            own = self._interpreter.project.find(alias.name, file)
            if own is not None:
                self._note_import(frame, own.module)
                if alias.asname:
                    frame.scope.bind(alias.asname, OwnModule(own.module), frame.guards)
                else:
                    top, dot, _ = alias.name.partition(".")
                    frame.scope.bind(top, OwnModule(top if dot else own.module), frame.guards)
                continue
            top = alias.name.partition(".")[0]
            if self._interpreter.project.is_own(top, file):
                frame.scope.bind(alias.asname or top, OwnModule(top), frame.guards)
                continue
            self._interpreter.known_modules.add(alias.name)
            if alias.asname:
                frame.scope.bind(alias.asname, Ref(alias.name), frame.guards)
            else:
                frame.scope.bind(top, Ref(top), frame.guards)

    def from_module(self, node: ast.ImportFrom, frame: Frame) -> None:
        base = self._base(node, frame)
        if not base:
            return
        file = self._file(frame)
        own = self._interpreter.project.find(base, file)
        is_own = node.level > 0 or own is not None or self._interpreter.project.is_own(base, file)
        name_of_base = own.module if own is not None else base
        if own is not None:
            self._note_import(frame, own.module)
        elif not is_own:
            self._interpreter.known_modules.add(base)
        for alias in node.names:
            local = alias.asname or alias.name
            if alias.name == "*":
                frame.scope.stars.append((name_of_base, frame.guards))
            elif is_own:
                submodule = self._interpreter.project.find(f"{name_of_base}.{alias.name}")
                if submodule is not None:
                    self._note_import(frame, submodule.module)
                frame.scope.bind(local, LazyName(name_of_base, alias.name), frame.guards)
            else:
                frame.scope.bind(local, Ref(base, (alias.name,)), frame.guards)

    def _note_import(self, frame: Frame, module: str) -> None:
        if frame.call is None:
            source = frame.function.reference if frame.function else frame.module.name
            self._interpreter.found.imports.add((source, module))

    def imported(self, node: ast.stmt, frame: Frame) -> list[Value]:
        if isinstance(node, ast.Import):
            return [
                Ref(a.name)
                for a in node.names
                if not self._interpreter.project.is_own(a.name, self._file(frame))
            ]
        if isinstance(node, ast.ImportFrom):
            base = self._base(node, frame)
            if not base or self._interpreter.project.is_own(base, self._file(frame)):
                return []
            return [Ref(base) if a.name == "*" else Ref(base, (a.name,)) for a in node.names]
        return []
