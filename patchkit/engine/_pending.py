"""Waiting for imports: a finder that lets installations look at a module right after it ran.

One finder for the process, in ``sys.meta_path`` only while something is
installed. It finds nothing itself; it asks the others and puts a hook on the
loader for one execution, so that modules and specs stay as they would be.
wrapt's import hooks are not used here because they cannot be removed again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Listener = Callable[[str], None]


class ImportWatch:
    """A ``sys.meta_path`` finder that tells listeners of executed modules."""

    def __init__(self) -> None:
        self._listeners: dict[str, list[Listener]] = {}

    def add(self, modules: set[str], listener: Listener) -> None:
        for name in modules:
            self._listeners.setdefault(name, []).append(listener)
        if self._listeners and self not in sys.meta_path:
            sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def remove(self, listener: Listener) -> None:
        for name in list(self._listeners):
            kept = [known for known in self._listeners[name] if known != listener]
            if kept:
                self._listeners[name] = kept
            else:
                del self._listeners[name]
        if not self._listeners and self in sys.meta_path:
            sys.meta_path.remove(self)  # type: ignore[arg-type]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._listeners:
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec = find(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._hook(name, spec.loader)
                return spec
        return None

    def _hook(self, name: str, loader: Any) -> None:
        """Shadow ``exec_module`` on this one loader, until it has run."""
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if module.__name__ != name:  # a loader that serves several modules (zip files)
                original(module)
                return
            space = vars(loader)
            if space.get("exec_module") is exec_module:
                del space["exec_module"]
            original(module)
            for listener in list(self._listeners.get(name, ())):
                listener(name)

        vars(loader)["exec_module"] = exec_module


watch = ImportWatch()


def cannot_wait(name: str) -> str:
    """Why a module cannot be awaited; empty if it can."""
    if name in sys.builtin_module_names:
        return "a built-in module has a loader that cannot be hooked"
    return ""
