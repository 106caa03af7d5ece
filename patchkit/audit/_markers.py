"""Notes that a project leaves on foreign objects: its own names, and originals kept beside."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from patchkit.audit._project import WELL_KNOWN
from patchkit.audit._sightings import Sighting
from patchkit.audit._values import Item, Ref, Result, Source, Value, options

# Top-level folders that say nothing about the project they are in.
_ANYBODYS = frozenset({
    "src", "lib", "test", "tests", "testing", "script", "scripts", "example", "examples", "docs",
    "tools", "tool", "core", "utils", "util", "bench", "benchmark", "benchmarks", "setup",
    "conftest", "model", "models", "train", "trainer", "common", "config", "configs", "main",
    "engine", "runtime", "plugin", "plugins", "patch", "patches", "python", "server", "package",
})  # fmt: skip
# How names begin, or end, under which an original is kept.
_KEPT = re.compile(
    r"(?:^|_)(?:orig|origin|original|old|prev|previous|saved|kept|stock|native|unpatched"
    r"|upstream|backup|real|raw|vanilla|stashed)s?(?:_|$)",
    re.IGNORECASE,
)


class OwnNames:
    """What a name has in it that says whose it is."""

    def __init__(self, roots: Iterable[str]) -> None:
        words: set[str] = set()
        for root in roots:
            if root.lower() in _ANYBODYS:
                continue
            parts = [p for p in root.lower().split("_") if p]
            words.add("_".join(parts))
            words.update(
                p for p in parts if len(p) > 4 and p not in _ANYBODYS and p not in WELL_KNOWN
            )
        self._words = {w for w in words if len(w) > 2 and w not in WELL_KNOWN}

    def owns(self, name: str) -> bool:
        """Whether a name that begins with an underscore has the project's own name in it."""
        return name.startswith("_") and self.mentions(name)

    def mentions(self, name: str) -> bool:
        """Whether a name, of a function or a namespace of operators, has it."""
        inside = f"_{name.strip('_').lower()}_"
        return any(f"_{word}_" in inside for word in self._words)

    def in_path(self, target: Ref) -> bool:
        """Whether what is written to is, or hangs on, something of the project's own name."""
        return any(self.owns(part) for part in target.attrs)


def out_of_a_stash(node: ast.AST) -> bool:
    """Whether what a statement writes comes out of a container of originals, by its name."""
    if isinstance(node, ast.Assign):
        value: ast.AST = node.value
    elif isinstance(node, ast.Call) and len(node.args) > 2:
        value = node.args[2]
    else:
        return False
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        if value.func.attr not in ("pop", "get", "popleft", "setdefault"):
            return False
        value = value.func.value
    elif isinstance(value, ast.Subscript):
        value = value.value
    else:
        return False
    name = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")
    return _KEPT.search(name) is not None


def keeps_another(sighting: Sighting) -> bool:
    """Whether what is written is another member of what it is written to, or its source."""
    target = sighting.target
    if not isinstance(target, Ref):
        return False
    owner = target.dotted.rpartition(".")[0]
    found = [_kept(v) for v, _ in options(sighting.replacement)]
    return bool(found) and all(
        isinstance(v.origin if isinstance(v, Source) else v, Ref)
        and (v.origin if isinstance(v, Source) else v).dotted.rpartition(".")[0] == owner  # type: ignore[union-attr]
        for v in found
    )


def _kept(value: Value) -> Value:
    """What is kept: ``compiled(Engine.run)`` keeps ``Engine.run``."""
    if isinstance(value, Result):
        places = [v for arg in value.args for v, _ in options(arg) if isinstance(v, Ref)]
        return places[0] if len(places) == 1 else value
    return value


def is_stash(sighting: Sighting) -> bool:
    """Whether an original is kept beside its place: ``Engine.run_origin = Engine.run``."""
    if not keeps_another(sighting) or not isinstance(sighting.target, Ref):
        return False
    last = sighting.target.attrs[-1] if sighting.target.attrs else ""
    if any(isinstance(v, Result) for v, _ in options(sighting.replacement)):
        return last.startswith("_") and _KEPT.search(last) is not None
    return last.startswith("_") or _KEPT.search(last) is not None


class Stashes:
    """Where a project keeps originals, and what it does with them afterwards."""

    def __init__(self, sightings: Iterable[Sighting]) -> None:
        self._kept: dict[str, set[str]] = {}
        for sighting in sightings:
            if is_stash(sighting) and isinstance(sighting.target, Ref):
                kept = self._kept.setdefault(sighting.target.dotted, set())
                kept.update(
                    v.dotted for v, _ in options(sighting.replacement) if isinstance(v, Ref)
                )

    def concerns(self, sighting: Sighting) -> bool:
        """Whether a write only puts an original back, or throws a stash away."""
        target = sighting.target
        if isinstance(target, Item):
            return False
        if not isinstance(target, Ref):
            return False
        if sighting.action == "delete":
            return target.dotted in self._kept
        found = [v for v, _ in options(sighting.replacement)]
        return bool(found) and all(
            isinstance(v, Ref) and target.dotted in self._kept.get(v.dotted, ()) for v in found
        )
