"""Conditions: what they say about one version, in words, and as version ranges."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion
from packaging.version import Version as Parsed

from patchkit.audit._sightings import CallEdge
from patchkit.audit._values import (
    Cond,
    Const,
    Either,
    Func,
    Guard,
    ParsedVersion,
    Ref,
    Seq,
    Specifiers,
    Value,
    Version,
    VersionPart,
    options,
)

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le,
    ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_NEGATED = {"==": "!=", "!=": "==", "<": ">=", "<=": ">", ">": "<=", ">=": "<"}
_SWAPPED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}


class World(Protocol):
    """What is known about the packages while conditions are evaluated."""

    def version(self, package: str) -> str | None:
        """The version of a package, None where nobody says."""

    def has(self, place: Ref) -> bool | None:
        """Whether a module or a name exists, None where that is not known."""

    def holds_code(self, place: Ref) -> bool | None:
        """Whether a name is a module, a class or a function, None where that is not known."""


def truth(value: Value, world: World) -> bool | None:
    """Whether a condition holds; None where it cannot be told."""
    if isinstance(value, Const):
        return bool(value.value)
    if not isinstance(value, Cond):
        answers = {truth(v, world) for v, _ in options(value) if v is not value}
        return answers.pop() if len(answers) == 1 else None
    if value.op == "not":
        inner = truth(value.args[0], world)
        return None if inner is None else not inner
    if value.op in ("and", "or"):
        return _joined(value.op, (truth(a, world) for a in value.args))
    if value.op == "importable":
        return _joined("and", (world.has(a) if isinstance(a, Ref) else None for a in value.args))
    if value.op == "hasattr":
        return _hasattr(value, world)
    if value.op == "held":
        return _held(value, world)
    return _compared(value, world)


def all_true(guards: Iterable[Guard], world: World) -> bool | None:
    """Whether all tests on the way to a place hold."""
    return _joined("and", (truth(g.cond, world) for g in guards))


def _joined(op: str, answers: Iterable[bool | None]) -> bool | None:
    decisive = op == "or"
    unknown = False
    for answer in answers:
        if answer is decisive:
            return decisive
        unknown = unknown or answer is None
    return None if unknown else not decisive


def _hasattr(cond: Cond, world: World) -> bool | None:
    owner, name = cond.args
    if not isinstance(name, Const) or not isinstance(name.value, str):
        return None
    answers = {
        world.has(v.child(name.value)) if isinstance(v, Ref) else None for v, _ in options(owner)
    }
    return answers.pop() if len(answers) == 1 else None


def _held(cond: Cond, world: World) -> bool | None:
    """What ``getattr(place, name, None)`` found: there, and not None itself."""
    answers: set[bool | None] = set()
    for value, _ in options(cond.args[0]):
        there = world.has(value) if isinstance(value, Ref) else False
        if there and isinstance(value, Ref):
            there = world.holds_code(value) or None
        answers.add(there)
    return answers.pop() if len(answers) == 1 else None


def _compared(cond: Cond, world: World) -> bool | None:
    left, right = cond.args[0], cond.args[-1]
    if cond.op == "startswith":
        text = _python(left, world)
        prefixes = right.items if isinstance(right, Seq) else (right,)
        if isinstance(text, str) and all(isinstance(p, Const) for p in prefixes):
            return text.startswith(tuple(str(p.value) for p in prefixes))  # type: ignore[union-attr]
        return None
    if cond.op in ("in", "not in"):
        return _contained(cond, left, right, world)
    compare = _COMPARE.get(cond.op)
    if compare is None:
        return None
    a, b = _python(left, world), _python(right, world)
    if a is None or b is None:
        return None
    if isinstance(a, Parsed) and isinstance(b, str):
        b = _parsed(b)
    if isinstance(b, Parsed) and isinstance(a, str):
        a = _parsed(a)
    if isinstance(a, tuple) and isinstance(b, tuple):
        a, b = _alike(a, b)
    try:
        return bool(compare(a, b))
    except TypeError:
        return None


def _contained(cond: Cond, left: Value, right: Value, world: World) -> bool | None:
    inside: bool | None = None
    item = _python(left, world)
    if item is None:
        return None
    if isinstance(right, Specifiers):
        try:
            inside = SpecifierSet(right.text).contains(str(item), prereleases=True)
        except InvalidSpecifier:
            return None
    elif isinstance(right, Seq):
        items = [_python(v, world) for v in right.items]
        if any(i is None for i in items):
            return None
        inside = item in items
    elif isinstance(right, (Version, Const)) and isinstance(item, str):
        whole = _python(right, world)
        if not isinstance(whole, str):
            return None
        inside = item in whole
    if inside is None:
        return None
    return inside if cond.op == "in" else not inside


def _python(value: Value, world: World) -> Any:
    """The Python object that a value would be at this version, None where unknown."""
    if isinstance(value, Either):
        found = [_python(v, world) for v, _ in options(value)]
        return found[0] if all(f == found[0] for f in found) else None
    if isinstance(value, Const):
        return value.value
    if isinstance(value, Seq):
        items = tuple(_python(v, world) for v in value.items)
        return None if any(i is None for i in items) else items
    if isinstance(value, ParsedVersion):
        return _parsed(value.text)
    if isinstance(value, Version):
        text = world.version(value.package)
        if text is None:
            return None
        parsed = _parsed(text)
        if value.form == "version":
            return parsed
        if value.form == "tuple":
            return parsed.release if parsed is not None else None
        return parsed.public if parsed is not None else text
    if isinstance(value, VersionPart):
        whole = world.version(value.of.package)
        return _part(_parsed(whole), value.part) if whole is not None else None
    return None


def _part(version: Parsed | None, part: str) -> Any:
    if version is None:
        return None
    if part in ("major", "minor", "micro"):
        return getattr(version, part)
    if part.startswith("[:") and part.endswith("]"):
        return version.release[: int(part[2:-1])]
    if part.startswith("[") and part[1:-1].lstrip("-").isdigit():
        try:
            return version.release[int(part[1:-1])]
        except IndexError:
            return None
    return None


def _alike(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """``"0.30".split(".")`` gives strings, a release gives numbers."""

    def numbers(items: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(int(i) if isinstance(i, str) and i.isdigit() else i for i in items)

    return numbers(a), numbers(b)


def _parsed(text: str | None) -> Parsed | None:
    try:
        return Parsed(text) if text else None
    except InvalidVersion:
        return None


# ---- ways to a place -----------------------------------------------------------------


@dataclass
class Ways:
    """How the functions of a project are reached, and under which tests."""

    edges: list[CallEdge]

    def __post_init__(self) -> None:
        self._callers: dict[int, list[CallEdge]] = {}
        for edge in self.edges:
            self._callers.setdefault(id(edge.callee.node), []).append(edge)

    def reached(self, function: Func | None, world: World) -> bool | None:
        """Whether some call leads to a function at this version."""
        return self._reached(function, world, frozenset())

    def _reached(self, function: Func | None, world: World, seen: frozenset[int]) -> bool | None:
        if function is None:
            return True
        mark = id(function.node)
        if mark in seen:
            return False
        edges = self._callers.get(mark)
        if not edges:
            return True
        seen = seen | {mark}
        return _joined(
            "or",
            (
                _joined(
                    "and",
                    (all_true(e.guards, world), self._reached(e.caller, world, seen)),
                )
                for e in edges
            ),
        )

    def conditions(self, function: Func | None) -> list[tuple[Guard, ...]]:
        """The tests of each direct call of a function; empty where it is called freely."""
        edges = self._callers.get(id(function.node), []) if function is not None else []
        found = [e.guards for e in edges]
        return [] if any(not g for g in found) else found


# ---- words and ranges ------------------------------------------------------------------


def describe(guards: Iterable[Guard]) -> list[str]:
    """The tests in words, without those that say nothing."""
    return list(dict.fromkeys(g.text for g in guards if g.text))


def spoken(guards: tuple[Guard, ...], before_call: int | None) -> tuple[Guard, ...]:
    """The guards that say when a patch applies: a helper's own checks do not, as a rule."""
    if before_call is None:
        return guards
    inside = tuple(g for g in guards[before_call:] if _about_versions(g.cond))
    return (*guards[:before_call], *inside)


def _about_versions(value: Value) -> bool:
    if isinstance(value, (Version, VersionPart)):
        return True
    if isinstance(value, Cond):
        return value.op in ("hasattr", "held", "importable") or any(
            map(_about_versions, value.args)
        )
    return any(_about_versions(v) for v, _ in options(value) if v is not value)


def specifiers(guards: Iterable[Guard], package: str) -> tuple[str, list[str]]:
    """The version range that the guards come to, and the tests that are no range.

    Returns:
        A PEP 440 specifier set, empty where there is none, and what is not in it.
    """
    parts: list[str] = []
    left: list[str] = []
    for guard in guards:
        found = _specifiers(guard.cond, package, negated=False)
        if found is None:
            if guard.text:
                left.append(guard.text)
        else:
            parts += found
    return ",".join(dict.fromkeys(parts)), left


def _specifiers(value: Value, package: str, *, negated: bool) -> list[str] | None:
    if not isinstance(value, Cond):
        return None
    if value.op == "not":
        return _specifiers(value.args[0], package, negated=not negated)
    if value.op == ("or" if negated else "and"):
        found: list[str] = []
        for part in value.args:
            inner = _specifiers(part, package, negated=negated)
            if inner is None:
                return None
            found += inner
        return found
    if value.op in ("in", "startswith") and isinstance(value.args[0], Version):
        return _written(value, package, negated=negated)
    if value.op not in _COMPARE or len(value.args) != 2:
        return None
    left, right = value.args
    op = value.op
    if _is_version(right, package) and not _is_version(left, package):
        left, right, op = right, left, _SWAPPED[op]
    if not _is_version(left, package):
        return None
    text = _text_of(right)
    if text is None:
        return None
    op = _NEGATED[op] if negated else op
    if isinstance(left, VersionPart) and op in ("==", "!="):
        return [f"{op}{text}.*"]
    if isinstance(left, VersionPart) and op in ("<=", ">"):
        # Of the first parts alone: 0.30 stands for all of 0.30.x.
        bumped = _bumped(text)
        return [f"{'<' if op == '<=' else '>='}{bumped}"] if bumped else None
    return [f"{op}{text}"]


def _written(value: Cond, package: str, *, negated: bool) -> list[str] | None:
    """Conditions that are written as ranges, or nearly."""
    version, right = value.args[0], value.args[1]
    if not isinstance(version, Version) or version.package != package:
        return None
    if value.op == "in":
        if isinstance(right, Specifiers) and not negated:
            return [s.strip() for s in right.text.split(",")]
        return None
    prefix = str(right.value).rstrip(".") if isinstance(right, Const) else ""
    return [f"{'!=' if negated else '=='}{prefix}.*"] if _parsed(prefix) else None


def _is_version(value: Value, package: str) -> bool:
    if isinstance(value, VersionPart):
        return value.of.package == package and value.part.startswith("[:")
    return isinstance(value, Version) and value.package == package


def _text_of(value: Value) -> str | None:
    if isinstance(value, ParsedVersion):
        return value.text if _parsed(value.text) else None
    if isinstance(value, Const) and isinstance(value.value, str):
        return value.value if _parsed(value.value) else None
    if isinstance(value, Seq) and all(isinstance(v, Const) for v in value.items):
        return ".".join(str(v.value) for v in value.items)  # type: ignore[union-attr]
    return None


def _bumped(text: str) -> str | None:
    parts = text.split(".")
    if not all(p.isdigit() for p in parts):
        return None
    parts[-1] = str(int(parts[-1]) + 1)
    return ".".join(parts)
