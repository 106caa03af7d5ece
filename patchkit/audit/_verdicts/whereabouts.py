"""What became of a symbol that is not where the patch looks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from patchkit.audit._findings import Verdict, VerdictKind
from patchkit.audit._known import BROUGHT_BY_OTHERS
from patchkit.audit._values import Ref, last_name
from patchkit.audit._verdicts.case import Case
from patchkit.audit._versions import Target, Versions
from patchkit.symbols import SymbolFacts
from patchkit.symbols.drift import Finding as Fate
from patchkit.symbols.drift import Kind

# Attributes that every class has, of `object` or as soon as one is set.
_OF_EVERY_CLASS = frozenset(dir(object)) | {"__post_init__"}


def moved(case: Case, fate: Fate) -> Verdict:
    """A symbol that was found again elsewhere."""
    also = f"; {fate.also}" if fate.also else ""
    return Verdict(
        version=case.label,
        kind=_how(fate),
        text=f"it is {fate.new_symbol} there ({fate.evidence}{also})",
        new_symbol=fate.new_symbol,
        confidence=fate.confidence,
    )


def _how(fate: Fate) -> VerdictKind:
    return VerdictKind.MOVED if fate.kind is Kind.MOVED else VerdictKind.RENAMED


class Whereabouts:
    """Tells what is lost from what never was there, and from what cannot be told.

    Args:
        versions: All versions at hand: a member may come from another package.
        uses: Whether the project itself means a name, and so may be adding it.
        mentions: Whether the project's own name is in a name.
    """

    def __init__(
        self,
        versions: Versions,
        uses: Callable[[str], bool],
        mentions: Callable[[str], bool],
    ) -> None:
        self._versions = versions
        self._uses = uses
        self._mentions = mentions

    def missing(self, case: Case, fate: Fate | None) -> Iterator[Verdict]:
        """The verdict on a symbol that is not there."""
        target, base, symbol = case.target, case.base, case.symbol
        if not target.view.known(symbol):
            return
        if fate is not None:
            if fate.new_symbol is not None:
                yield moved(case, fate)
            else:
                yield Verdict(
                    version=case.label,
                    kind=VerdictKind.GONE,
                    text=f"{base.label if base else 'before'} has it; {fate.evidence}",
                )
            return
        module, _, name = symbol.partition(":")
        owner, _, last = name.rpartition(".")
        place = f"{module}:{owner}" if owner else module
        owner_there = target.facts(place) if owner else target.is_module(module)
        if not owner_there:
            yield _owner_gone(case, place, last)
            return
        raw = target.source.source.raw(module) if target.source is not None else None
        if raw is not None and raw.dynamic and not owner:
            return  # the module makes names as they are asked for
        if not owner and target.imported(module, last):
            return  # it has the name from another package
        if owner and last in _OF_EVERY_CLASS and _is_class(owner_there):
            return  # from `object`, or made by a decorator of the class
        if not _must_exist(case):
            yield from _unread(case, place, last)
            return
        yield from self._lost(case, place, last)

    def _lost(self, case: Case, place: str, last: str) -> Iterator[Verdict]:
        """A name that was meant to be there, as far as one can say without `--from`."""
        inherited, why = self._from_elsewhere(case.target, place, last)
        if inherited:
            return
        if why:
            yield Verdict(version=case.label, kind=VerdictKind.UNKNOWN, text=why)
            return
        sure = case.sighting.must_exist or case.replacement.keeps_original
        if not sure and (_adds_a_name(case, last) or self._mentions(last)):
            return
        if not sure and case.base is None:
            user = ""
            if self._uses(last):
                user = "project uses the name itself"
            elif case.replacement.kind == "unknown" and case.target.files_with(last):
                user = "package looks for the name elsewhere"
            if user:
                yield Verdict(
                    version=case.label,
                    kind=VerdictKind.UNKNOWN,
                    text=f"{place} has no {last}; the {user}, and the patch may be adding it: "
                    "name the version that it is written for with --from",
                )
                return
        yield Verdict(
            version=case.label,
            kind=VerdictKind.GONE,
            text=f"{place} has no {last}",
            confidence=1.0 if sure else 0.8,
        )

    def _from_elsewhere(self, target: Target, place: str, name: str) -> tuple[bool, str]:
        """Whether a class has a member from a base elsewhere; why that cannot be told."""
        facts = target.facts(place) if ":" in place else None
        if facts is None:
            return False, ""
        if facts.kind == "attribute":
            return False, f"{place} is an object: what it has is not in the source"
        for base in target.foreign_bases(facts.defined_at):
            package = base.partition(":")[0].partition(".")[0]
            if package in ("typing", "abc", "typing_extensions", "builtins", "object"):
                continue
            elsewhere = self._versions.installed(package) if package != target.package else None
            if elsewhere is not None:
                # `nn.Module` of an imported `nn` is written as torch:nn.Module
                home = elsewhere.split(Ref(package, tuple(base.replace(":", ".").split(".")[1:])))
                base = ":".join(home) if home is not None else base
            known = elsewhere.facts(base) if elsewhere is not None and ":" in base else None
            if known is None or elsewhere is None:
                return False, f"{name} may come from {base}, of which there is no source at hand"
            if elsewhere.facts(f"{base}.{name}") is not None:
                return True, ""
        return False, ""


def _owner_gone(case: Case, place: str, last: str) -> Verdict:
    """The verdict where not even the class or the module is there."""
    fate = case.fate(place)
    if fate is not None and fate.new_symbol is not None:
        return Verdict(
            version=case.label,
            kind=_how(fate),
            text=f"{place} is {fate.new_symbol} there ({fate.evidence})",
            new_symbol=f"{fate.new_symbol}.{last}",
            confidence=fate.confidence,
        )
    what = "class" if ":" in place else "module"
    package, _, rest = place.replace(":", ".").partition(".")
    part = rest.partition(".")[0]
    if part in BROUGHT_BY_OTHERS.get(package, ()):
        return Verdict(
            version=case.label,
            kind=VerdictKind.UNKNOWN,
            text=f"{package}.{part} is brought by an extension of {package}",
        )
    maker = case.target.made_when_asked(place)
    if maker:
        return Verdict(
            version=case.label,
            kind=VerdictKind.UNKNOWN,
            text=f"{maker} makes this name when it is asked for it",
        )
    return Verdict(version=case.label, kind=VerdictKind.GONE, text=f"there is no {what} {place}")


def _must_exist(case: Case) -> bool:
    """Whether a name that is not there was meant to be there."""
    if case.sighting.must_exist or case.replacement.keeps_original:
        return True
    if case.sighting.action in ("register", "delete", "class-swap"):
        return True
    if case.base is not None and case.base.view.known(case.symbol):
        return False  # not there before either: the project adds it
    return case.sighting.action == "replace"


def _unread(case: Case, place: str, last: str) -> Iterator[Verdict]:
    """A plain value under a new name that nothing there reads."""
    if case.sighting.action != "value" or case.target.source is None:
        return
    if not case.target.files_with(last):
        yield Verdict(
            version=case.label,
            kind=VerdictKind.GONE,
            text=f"{place} has no {last}, and nothing in the package reads it",
            confidence=0.8,
        )


def _adds_a_name(case: Case, name: str) -> bool:
    """Whether a name of a third package is made known where it was not."""
    value, target = case.sighting.replacement, case.sighting.target
    return (
        isinstance(value, Ref)
        and isinstance(target, Ref)
        and value.root != target.root
        and last_name(value) == name
    )


def _is_class(facts: object) -> bool:
    return isinstance(facts, SymbolFacts) and facts.kind == "class"
