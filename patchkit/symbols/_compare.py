"""What changed between two versions of one symbol.

Rules are generators that yield :class:`Change` objects; the gravest one decides the
kind. Nothing here knows where the facts came from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from patchkit.symbols._facts import (
    CALLABLE_KINDS,
    KEYWORD_ONLY,
    POSITIONAL_ONLY,
    VAR_KEYWORD,
    VAR_POSITIONAL,
    Parameter,
    SymbolFacts,
)


class Kind(str, Enum):
    """How a symbol fared, gravest first; the value is what users and files say."""

    REMOVED = "removed"
    MOVED = "moved"
    RENAMED = "renamed"
    SIGNATURE_BREAKING = "signature-breaking"
    SIGNATURE_COMPATIBLE = "signature-compatible"
    BODY_ONLY = "body-only"
    UNCHANGED = "unchanged"

    def __str__(self) -> str:
        return self.value

    @property
    def rank(self) -> int:
        """0 is the gravest."""
        return _ORDER[self]


_ORDER = {kind: index for index, kind in enumerate(Kind)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference.

    Attributes:
        what: What differs, as a short name: ``parameter``, ``kind``, ``body`` …
        kind: What it amounts to; `unchanged` marks noise.
        text: One sentence for the reader.
        name: The parameter concerned.
        old_position: Its position before, counted from 0; None where it had none.
        new_position: Its position now.
    """

    what: str
    kind: Kind
    text: str
    name: str | None = None
    old_position: int | None = None
    new_position: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """The JSON object."""
        found: dict[str, Any] = {"what": self.what, "kind": self.kind.value, "text": self.text}
        if self.name is not None:
            found |= {
                "name": self.name,
                "old_position": self.old_position,
                "new_position": self.new_position,
            }
        return found


# Decorators that decide what a call gives back, like a kind does.
_CALL_CHANGING = frozenset({"contextmanager", "asynccontextmanager"})


def compare(old: SymbolFacts, new: SymbolFacts) -> tuple[Change, ...]:
    """Every difference between two versions of a symbol, gravest first."""
    changes = list(_changes(old, new))
    if old.digest != new.digest and not any(c.kind is not Kind.UNCHANGED for c in changes):
        # The digests know more than the facts spell out: other branches, accessors.
        changes.append(Change(what="body", kind=Kind.BODY_ONLY, text=_body_text(old, new)))
    return tuple(sorted(changes, key=lambda c: c.kind.rank))


def gravest(changes: tuple[Change, ...]) -> Kind:
    """The kind that a list of differences amounts to."""
    return min((c.kind for c in changes), key=lambda k: k.rank, default=Kind.UNCHANGED)


def _changes(old: SymbolFacts, new: SymbolFacts) -> Iterator[Change]:
    yield from _kind(old, new)
    if old.kind == new.kind == "class":
        yield from _constructor(old, new)
        yield from _class(old, new)
    elif old.kind in CALLABLE_KINDS and new.kind in CALLABLE_KINDS:
        yield from _parameters(old, new)
    elif old.kind == new.kind == "attribute":
        yield from _attribute(old, new)
        return
    yield from _decorators(old, new)
    if old.body_digest != new.body_digest and old.kind == new.kind:
        yield Change(what="body", kind=Kind.BODY_ONLY, text=_body_text(old, new))
    if old.overloads != new.overloads:
        yield Change(
            what="overloads",
            kind=Kind.UNCHANGED,
            text=f"{old.overloads} overload declarations before, {new.overloads} now",
        )
    if old.returns != new.returns and old.kind == new.kind:
        yield _noise(f"return annotation {old.returns or '(none)'} → {new.returns or '(none)'}")


def _body_text(old: SymbolFacts, new: SymbolFacts) -> str:
    if old.alternatives or new.alternatives:
        return (
            f"the code changed ({old.alternatives + 1} definitions in branches before, "
            f"{new.alternatives + 1} now)"
        )
    return "the class body changed" if old.kind == "class" else "the body changed"


def _noise(text: str) -> Change:
    return Change(what="annotation", kind=Kind.UNCHANGED, text=text)


# ---- kinds -------------------------------------------------------------------------


def _kind(old: SymbolFacts, new: SymbolFacts) -> Iterator[Change]:
    def breaking(text: str) -> Change:
        return Change(what="kind", kind=Kind.SIGNATURE_BREAKING, text=text)

    if old.kind != new.kind:
        yield breaking(f"{old.kind} became {new.kind}")
    if old.is_async != new.is_async:
        yield breaking("async def became def" if old.is_async else "def became async def")
    if old.is_generator != new.is_generator:
        yield breaking(
            "it no longer yields" if old.is_generator else "it yields now: a call runs no code"
        )
    for word in sorted(_CALL_CHANGING):
        had, has = _decorated(old, word), _decorated(new, word)
        if had != has:
            yield breaking(f"@{word} was {'removed' if had else 'added'}")


def _decorated(facts: SymbolFacts, word: str) -> bool:
    return any(d.partition("(")[0].rpartition(".")[2] == word for d in facts.decorators)


def _decorators(old: SymbolFacts, new: SymbolFacts) -> Iterator[Change]:
    if old.decorators == new.decorators or old.kind != new.kind:
        return
    gone = [d for d in old.decorators if d not in new.decorators]
    come = [d for d in new.decorators if d not in old.decorators]
    pieces = [f"@{d} removed" for d in gone] + [f"@{d} added" for d in come]
    text = "; ".join(pieces) or "the order of the decorators changed"
    yield Change(what="decorators", kind=Kind.BODY_ONLY, text=text)


# ---- classes and attributes ----------------------------------------------------------


def _class(old: SymbolFacts, new: SymbolFacts) -> Iterator[Change]:
    if _bare(old.bases) != _bare(new.bases):
        text = f"bases ({', '.join(old.bases)}) → ({', '.join(new.bases)})"
        yield Change(what="bases", kind=Kind.BODY_ONLY, text=text)
    elif old.bases != new.bases:
        yield Change(what="bases", kind=Kind.BODY_ONLY, text="a base is imported from elsewhere")


def _bare(bases: tuple[str, ...]) -> list[str]:
    return [b.rpartition(":")[2] for b in bases]


def _constructor(old: SymbolFacts, new: SymbolFacts) -> Iterator[Change]:
    if bool(old.parameters) == bool(new.parameters):
        yield from _parameters(old, new)
    elif new.parameters:
        # An inherited constructor before (not known here), or none at all.
        if any(p.required for p in new.parameters):
            names = ", ".join(p.name for p in new.parameters if p.required)
            yield Change(
                what="parameter",
                kind=Kind.SIGNATURE_BREAKING,
                text=f"it has a constructor of its own now, which requires {names}",
            )
        else:
            yield Change(
                what="parameter",
                kind=Kind.SIGNATURE_COMPATIBLE,
                text="it has a constructor of its own now",
            )
    else:
        yield Change(
            what="parameter",
            kind=Kind.SIGNATURE_BREAKING,
            text=f"its constructor is gone, which took ({_names(old.parameters)})",
        )


def _names(parameters: tuple[Parameter, ...]) -> str:
    return ", ".join(p.name for p in parameters)


def _attribute(old: SymbolFacts, new: SymbolFacts) -> Iterator[Change]:
    if old.body_digest != new.body_digest:
        yield Change(
            what="value",
            kind=Kind.BODY_ONLY,
            text=f"value {old.value or '(unset)'} → {new.value or '(unset)'}",
        )
    if old.returns != new.returns:
        # In a class an annotation makes a field: the digest says whether it counts.
        counts = old.digest != new.digest and old.body_digest == new.body_digest
        yield Change(
            what="annotation",
            kind=Kind.SIGNATURE_COMPATIBLE if counts else Kind.UNCHANGED,
            text=f"annotation {old.returns or '(none)'} → {new.returns or '(none)'}",
        )


# ---- parameters --------------------------------------------------------------------


def _parameters(old: SymbolFacts, new: SymbolFacts) -> Iterator[Change]:
    """How calls that bound before bind now, and how a replacement written before fits."""
    before, after = old.parameters, new.parameters
    before, after, lost = _without_receivers(old, before, new, after)
    if lost is not None:
        yield lost
    places_before = {p.name: i for i, p in enumerate(before)}
    places_after = {p.name: i for i, p in enumerate(after)}

    def change(kind: Kind, name: str, text: str) -> Change:
        return Change(
            what="parameter",
            kind=kind,
            text=text,
            name=name,
            old_position=places_before.get(name),
            new_position=places_after.get(name),
        )

    breaking, compatible = Kind.SIGNATURE_BREAKING, Kind.SIGNATURE_COMPATIBLE
    by_name = {p.name: p for p in after}
    renamed = _renamed_positional_only(before, after)
    for parameter in before:
        name = parameter.name
        if name in renamed:
            yield change(compatible, name, f"{name} is called {renamed[name]} now (by position)")
        elif name not in by_name and _star(parameter, after):
            yield change(compatible, name, f"{parameter} is called otherwise now")
        elif name not in by_name:
            yield change(breaking, name, f"{_stars(parameter)}{name} was removed")
        else:
            yield from _one(parameter, by_name[name], change)
    for place, parameter in enumerate(after):
        name = parameter.name
        if name in places_before or name in renamed.values():
            continue
        if _star(parameter, before):
            continue  # said above, under its old name
        if parameter.kind in (VAR_POSITIONAL, VAR_KEYWORD):
            yield change(compatible, name, f"{parameter} was added")
        elif parameter.required:
            yield change(breaking, name, f"{name} was added and is required")
        elif parameter.positional and (
            _anything_behind(after[place + 1 :], places_before)
            or any(p.kind == VAR_POSITIONAL for p in before)
        ):
            yield change(breaking, name, f"{name} was inserted before others, at {place}")
        else:
            yield change(
                compatible, name, f"{name} was added at the end, default {parameter.default}"
            )
    yield from _order(before, after, change)


def _without_receivers(
    old: SymbolFacts,
    before: tuple[Parameter, ...],
    new: SymbolFacts,
    after: tuple[Parameter, ...],
) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...], Change | None]:
    """Leave out `self` and `cls`, and notice where one was lost or came in."""
    had, has = _takes_receiver(old), _takes_receiver(new)
    lost = None
    if old.kind == new.kind == "method":
        if had and (not has or _took_its_place(before, after)):
            has = False
            text = f"{before[0].name} was dropped: the first argument arrives as another one"
            lost = _receiver_change(text, before[0].name, old=0)
        elif has and (not had or _took_its_place(after, before)):
            had = False
            lost = _receiver_change(f"{after[0].name} came in as receiver", after[0].name, new=0)
    return before[1:] if had else before, after[1:] if has else after, lost


def _receiver_change(
    text: str, name: str, *, old: int | None = None, new: int | None = None
) -> Change:
    return Change(
        what="parameter",
        kind=Kind.SIGNATURE_BREAKING,
        text=text,
        name=name,
        old_position=old,
        new_position=new,
    )


def _takes_receiver(facts: SymbolFacts) -> bool:
    if facts.kind == "staticmethod":
        return facts.symbol.endswith(".__new__")
    bound = facts.kind in ("method", "classmethod")
    return bound and bool(facts.parameters) and facts.parameters[0].positional


def _took_its_place(one: tuple[Parameter, ...], other: tuple[Parameter, ...]) -> bool:
    """Whether `other` begins with what came second or later in `one`."""
    first = other[0].name
    return first != one[0].name and first in {p.name for p in one[1:]}


def _renamed_positional_only(
    before: tuple[Parameter, ...], after: tuple[Parameter, ...]
) -> dict[str, str]:
    """Positional-only parameters that only changed their name: no call can notice."""
    names_after = {p.name for p in after}
    names_before = {p.name for p in before}
    return {
        a.name: b.name
        for a, b in zip(before, after, strict=False)
        if a.kind == b.kind == POSITIONAL_ONLY
        and a.name not in names_after
        and b.name not in names_before
    }


def _star(parameter: Parameter, others: tuple[Parameter, ...]) -> bool:
    """Whether `*args` or `**kwargs` is among the others under any name."""
    return parameter.kind in (VAR_POSITIONAL, VAR_KEYWORD) and any(
        p.kind == parameter.kind for p in others
    )


def _stars(parameter: Parameter) -> str:
    return {VAR_POSITIONAL: "*", VAR_KEYWORD: "**"}.get(parameter.kind, "")


def _anything_behind(rest: tuple[Parameter, ...], known: dict[str, int]) -> bool:
    return any(p.positional and p.name in known for p in rest)


def _one(old: Parameter, new: Parameter, change: Any) -> Iterator[Change]:
    """One parameter that is still there."""
    name = old.name
    if old.kind != new.kind:
        widened = new.kind not in (POSITIONAL_ONLY, KEYWORD_ONLY, VAR_POSITIONAL, VAR_KEYWORD)
        fits = widened and old.kind in (POSITIONAL_ONLY, KEYWORD_ONLY)
        kind = Kind.SIGNATURE_COMPATIBLE if fits else Kind.SIGNATURE_BREAKING
        yield change(kind, name, f"{name} was {old.kind} and is {new.kind}")
    if old.default != new.default:
        if new.default is None:
            yield change(Kind.SIGNATURE_BREAKING, name, f"{name} has no default any more")
        elif old.default is None:
            text = f"{name} has a default now: {new.default}"
            yield change(Kind.SIGNATURE_COMPATIBLE, name, text)
        else:
            text = f"the default of {name} changed: {old.default} → {new.default}"
            yield change(Kind.SIGNATURE_COMPATIBLE, name, text)
    if old.annotation != new.annotation:
        text = f"annotation of {name}: {old.annotation or '(none)'} → {new.annotation or '(none)'}"
        meaningful = "constexpr" in f"{old.annotation}{new.annotation}"
        yield Change(
            what="annotation",
            kind=Kind.BODY_ONLY if meaningful else Kind.UNCHANGED,
            text=text,
            name=name,
        )


def _order(
    before: tuple[Parameter, ...], after: tuple[Parameter, ...], change: Any
) -> Iterator[Change]:
    """Positional parameters that changed places among each other."""
    old_order = [p.name for p in before if p.positional]
    new_order = [p.name for p in after if p.positional]
    common = set(old_order) & set(new_order)
    for name, other in zip(
        [n for n in old_order if n in common], [n for n in new_order if n in common], strict=True
    ):
        if name != other:
            yield change(Kind.SIGNATURE_BREAKING, name, f"{name} changed places with others")
