"""Names of the audited project and what they are bound to, branch by branch."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path

from patchkit.audit._values import Func, Guard, Value


@dataclass(frozen=True, slots=True)
class LazyName:
    """A name imported from a module of the project; resolved when it is looked up."""

    module: str
    name: str


@dataclass(slots=True)
class Binding:
    """One assignment of a name, and the guards it stands under."""

    value: Value | LazyName
    guards: tuple[Guard, ...] = ()


@dataclass(slots=True, eq=False)
class Scope:
    """A module, class or function scope."""

    kind: str
    parent: Scope | None
    names: dict[str, list[Binding]] = field(default_factory=dict)
    outer: set[str] = field(default_factory=set)
    stars: list[tuple[str, tuple[Guard, ...]]] = field(default_factory=list)

    def bind(self, name: str, value: Value | LazyName, guards: tuple[Guard, ...]) -> None:
        """Assign; what stands under the same guards, or more of them, is overwritten."""
        target = self
        if name in self.outer and self.kind == "function":
            target = self.parent or self
            while target.parent is not None and (
                target.kind == "class" or name not in target.names
            ):
                target = target.parent
        depth = len(guards)
        kept = [b for b in target.names.get(name, ()) if b.guards[:depth] != guards]
        kept.append(Binding(value, guards))
        target.names[name] = kept


@dataclass(slots=True, eq=False)
class ModuleState:
    """One module of the project.

    Attributes:
        name: Its dotted name.
        path: Its file.
        file: The file relative to the audited folder, with forward slashes.
        package: The package that relative imports start from.
        tree: Its syntax tree.
        scope: What its names are bound to once it has been walked.
        functions: All of its functions, in the order in which they were met.
        state: "new", "walking" or "done".
    """

    name: str
    path: Path
    file: str
    package: str
    tree: ast.Module
    source: str
    scope: Scope
    functions: list[Func] = field(default_factory=list)
    state: str = "new"

    def line_text(self, line: int) -> str:
        """One line of its source, for messages."""
        lines = self.source.splitlines()
        return lines[line - 1].strip()[:160] if 0 < line <= len(lines) else ""
