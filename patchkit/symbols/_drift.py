"""How the symbols of one version fare in another."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from patchkit.symbols._compare import Change, Kind, compare, gravest
from patchkit.symbols._facts import Record, SymbolFacts
from patchkit.symbols._manifest import Manifest
from patchkit.symbols._match import Index, Match, find_again, last_name, owner_of
from patchkit.symbols._module import parse_source
from patchkit.symbols._normalform import tokens
from patchkit.symbols._scan import Progress
from patchkit.symbols._usage import replaced_at_uses
from patchkit.symbols._views import ManifestView, SourceView, View
from patchkit.symbols.errors import SourceUnreadableError

_SURE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """How one symbol fared.

    Attributes:
        symbol: The symbol, as the old version has it.
        kind: How it fared.
        new_symbol: Where it is now, for what moved or was renamed.
        confidence: How sure that is, from 0 to 1.
        evidence: Why, for what moved, was renamed or is gone.
        changes: Everything that differs, gravest first; of what moved, too.
        old: Its facts before.
        new: Its facts now, None for what is gone.
    """

    symbol: str
    kind: Kind
    new_symbol: str | None = None
    confidence: float = 1.0
    evidence: str = ""
    changes: tuple[Change, ...] = ()
    old: SymbolFacts
    new: SymbolFacts | None = None

    @property
    def noise(self) -> tuple[Change, ...]:
        """What differs and changes nothing."""
        return tuple(c for c in self.changes if c.kind is Kind.UNCHANGED)

    @property
    def also(self) -> Kind | None:
        """What else happened to a symbol that moved or was renamed."""
        if self.new_symbol is None:
            return None
        kind = gravest(self.changes)
        return None if kind is Kind.UNCHANGED else kind

    @property
    def selectors(self) -> dict[str, list[str | None]]:
        """What decides whether it runs, and differs: name -> before and now."""
        old, new = self.old.selectors, self.new.selectors if self.new else {}
        return {
            name: [old.get(name), new.get(name)]
            for name in sorted({*old, *new})
            if self.new is not None and old.get(name) != new.get(name)
        }

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of one finding."""
        details: dict[str, Any] = {
            "changes": [c.as_dict() for c in self.changes if c.kind is not Kind.UNCHANGED],
            "noise": [c.as_dict() for c in self.noise],
            "evidence": self.evidence,
            "also": self.also.value if self.also else None,
            "aliases": _sets(self.old.aliases, self.new.aliases if self.new else ()),
            "selectors": self.selectors,
            "old": _place(self.old),
            "new": _place(self.new) if self.new else None,
        }
        return {
            "symbol": self.symbol,
            "kind": self.kind.value,
            "new_symbol": self.new_symbol,
            "confidence": self.confidence,
            "details": details,
        }


def _sets(old: Iterable[str], new: Iterable[str]) -> dict[str, list[str]]:
    return {"added": sorted(set(new) - set(old)), "removed": sorted(set(old) - set(new))}


def _place(facts: SymbolFacts) -> dict[str, Any]:
    found: dict[str, Any] = {
        "defined_at": facts.defined_at,
        "kind": facts.kind,
        "file": facts.file,
        "line": facts.line,
        "digest": facts.digest,
    }
    if facts.kind != "attribute":
        found["signature"] = facts.signature
    elif facts.value is not None:
        found["value"] = facts.value
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """The answer of a comparison.

    Attributes:
        package: The import package.
        old: The label of the old version.
        new: The label of the new one.
        findings: One per symbol, in the order asked for.
        only_new: Symbols asked for that only the new version has.
        unknown: Symbols asked for that neither has, or that a manifest does not cover.
        unreadable: File -> why it could not be read, in either.
    """

    package: str
    old: str
    new: str
    findings: tuple[Finding, ...]
    only_new: tuple[str, ...] = ()
    unknown: Mapping[str, str] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)

    def count(self) -> dict[str, int]:
        """Kind -> number of findings, all kinds, gravest first."""
        counted = Counter(f.kind for f in self.findings)
        return {kind.value: counted[kind] for kind in Kind}


def diff(
    old: View,
    new: View,
    symbols: Iterable[str] | None = None,
    *,
    between: Sequence[Manifest] = (),
    progress: Progress | None = None,
) -> Drift:
    """Compare two versions of a package.

    Args:
        old: The version that the symbols are known from.
        new: The version that is asked about.
        symbols: What to compare; everything where None.
        between: Stored manifests of the versions in between, in the order from old to
            new, the new one included: a symbol that changed its place twice is followed
            step by step.
        progress: Called with (done, total) while sources are read.
    """
    return _Comparison(old, new, between, progress).run(symbols)


class _Comparison:
    def __init__(
        self, old: View, new: View, between: Sequence[Manifest], progress: Progress | None
    ) -> None:
        self._old = old
        self._new = new
        self._between = between
        self._progress = progress
        self._moved: dict[str, Match | None] = {}
        self._hinted: dict[str, list[str]] = {}

    def run(self, symbols: Iterable[str] | None) -> Drift:
        old, new = self._old, self._new
        if symbols is None:
            wanted = list(old.everything(self._progress))
            new.everything(self._progress)
        else:
            wanted = list(dict.fromkeys(symbols))
        findings, only_new, unknown = [], [], {}
        for symbol in wanted:
            before = old.facts(symbol)
            if before is not None:
                if new.known(symbol) or self._traceable(symbol):
                    findings.append(self._one(symbol, before))
                else:
                    unknown[symbol] = f"{new.label} says nothing about it"
            elif new.facts(symbol) is not None:
                only_new.append(symbol)
            elif old.known(symbol):
                unknown[symbol] = f"neither {old.label} nor {new.label} has it"
            else:
                unknown[symbol] = f"{old.label} says nothing about it"
        return Drift(
            package=old.package,
            old=old.label,
            new=new.label,
            findings=tuple(findings),
            only_new=tuple(only_new),
            unknown=unknown,
            unreadable={**old.unreadable, **new.unreadable},
        )

    def _traceable(self, symbol: str) -> bool:
        """Whether a manifest without the symbol may still know where it went."""
        return not isinstance(self._new, ManifestView) or self._step_back(symbol) is not None

    def _one(self, symbol: str, before: SymbolFacts) -> Finding:
        after = self._new.facts(symbol)
        if after is not None:
            if after.defined_at == symbol or before.defined_at != symbol:
                # In its old place; or it was only a way to somewhere else all along.
                changes = compare(before, after)
                return Finding(
                    symbol=symbol, kind=gravest(changes), changes=changes, old=before, new=after
                )
            how = "inherited now" if after.inherited_from else "the old path re-exports it"
            return self._gone(
                symbol, before, Match(symbol=after.defined_at, confidence=1.0, evidence=how)
            )
        match = self._find(symbol, before)
        if match is None:
            return Finding(
                symbol=symbol,
                kind=Kind.REMOVED,
                evidence="nothing in the new version resembles it",
                old=before,
            )
        return self._gone(symbol, before, match)

    def _gone(self, symbol: str, before: SymbolFacts, match: Match) -> Finding:
        after = self._new.facts(match.symbol)
        kept = last_name(symbol) == last_name(match.symbol)
        return Finding(
            symbol=symbol,
            kind=Kind.MOVED if kept else Kind.RENAMED,
            new_symbol=match.symbol,
            confidence=match.confidence,
            evidence=match.evidence,
            changes=compare(before, after) if after else (),
            old=before,
            new=after,
        )

    # ---- where it went ---------------------------------------------------------------

    def _find(self, symbol: str, before: SymbolFacts) -> Match | None:
        if symbol not in self._moved:
            self._moved[symbol] = None  # a class inside itself ends here
            self._moved[symbol] = self._search(symbol, before)
        return self._moved[symbol]

    def _search(self, symbol: str, before: SymbolFacts) -> Match | None:
        if before.defined_at != symbol:
            # It was imported or inherited: what it led to may still be there.
            after = self._new.facts(before.defined_at)
            if after is not None:
                return Match(
                    symbol=after.defined_at,
                    confidence=0.95,
                    evidence="what it led to is still there",
                )
            found = self._old.facts(before.defined_at)
            if found is not None and found.defined_at == before.defined_at:
                match = self._find(before.defined_at, found)
                if match is not None:
                    return match
        stepped = self._step_back(symbol)
        if stepped is not None:
            return stepped
        owner = self._owner(symbol)
        record = before.as_record()
        if owner is not None:
            target = f"{owner.symbol}.{last_name(symbol)}"
            after = self._new.facts(target)
            if after is not None and after.kind != "attribute":
                return self._with_its_class(target, before, after, owner)
        if isinstance(self._new, SourceView):
            near = self._new.index_near(symbol, lambda: self._hints(symbol, before))
            if near is not None:
                match = self._in(symbol, record, near, owner, self._old_near(symbol, before))
                if match is not None and match.confidence >= _SURE:
                    return match
                match = match or replaced_at_uses(symbol, self._old, self._new)
                if match is not None or self._old.kind != "manifest":
                    return match
        match = self._in(symbol, record, self._new.index(), owner, self._old_near(symbol, before))
        return match or replaced_at_uses(symbol, self._old, self._new)

    def _with_its_class(
        self, target: str, before: SymbolFacts, after: SymbolFacts, owner: Match
    ) -> Match:
        same = before.body_digest == after.body_digest
        confidence = max(owner.confidence, 0.95 if same else 0.0)
        evidence = f"its class is {owner.symbol} now" + (", same body" if same else "")
        # Inherited there: the definition is what a patch has to name.
        return Match(symbol=after.defined_at, confidence=confidence, evidence=evidence)

    def _old_near(self, symbol: str, before: SymbolFacts) -> Index:
        """The old version by content, as far as it costs little."""
        near = self._old.index_near(symbol, lambda: self._hints(symbol, before))
        return near if near is not None else self._old.index()

    def _in(
        self, symbol: str, record: Record, index: Index, owner: Match | None, earlier: Index
    ) -> Match | None:
        return find_again(
            symbol,
            record,
            index,
            before=_Before(self._old),
            earlier=earlier,
            moved_owner=owner.symbol if owner else None,
            members=self._old.members(symbol) if record["kind"] == "class" else None,
        )

    def _owner(self, symbol: str) -> Match | None:
        """Where the class of a method went."""
        owner = owner_of(symbol)
        if not owner or self._new.facts(owner) is not None:
            after = self._new.facts(owner) if owner else None
            if after is not None and after.defined_at != owner:
                return Match(symbol=after.defined_at, confidence=0.95, evidence="re-exported")
            return None
        before = self._old.facts(owner)
        return self._find(owner, before) if before is not None else None

    def _step_back(self, symbol: str) -> Match | None:
        """Follow the symbol through the stored versions in between."""
        place, confidence, notes = symbol, 1.0, []
        for manifest in self._between:
            if place in manifest.symbols and manifest.symbols[place].defined_at == place:
                continue
            move = manifest.lineage.get(place)
            if move is None:
                if place in manifest.symbols:
                    continue
                return None
            place = move.symbol
            confidence *= move.confidence
            notes.append(f"in {manifest.version}: {move.evidence}")
        if place == symbol or self._new.facts(place) is None:
            return None
        return Match(symbol=place, confidence=round(confidence, 2), evidence="; ".join(notes))

    def _hints(self, symbol: str, before: SymbolFacts) -> list[str]:
        """Long identifiers of the old code, by which its new file can be told."""
        if symbol not in self._hinted:
            self._hinted[symbol] = self._identifiers(before)
        return self._hinted[symbol]

    def _identifiers(self, before: SymbolFacts) -> list[str]:
        found = {p.name for p in before.parameters}
        if isinstance(self._old, SourceView):
            node = definition(self._old, before)
            if node is not None:
                found |= {t[1:] for t in tokens([node]) if t[0] in "n." and t[1:].isidentifier()}
        names = sorted((n for n in found if len(n) > 5), key=lambda n: (-len(n), n))
        return names[:16]


class _Before(Mapping[str, Record]):
    """The old version as a mapping, without reading all of it."""

    def __init__(self, view: View) -> None:
        self._view = view

    def __getitem__(self, symbol: str) -> Record:
        facts = self._view.facts(symbol)
        if facts is None or facts.defined_at != symbol:
            raise KeyError(symbol)
        return {"body_digest": facts.body_digest}

    def get(self, symbol, default=None):  # type: ignore[no-untyped-def]
        try:
            return self[symbol]
        except KeyError:
            return default

    def __iter__(self):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError


def definition(view: SourceView, facts: SymbolFacts) -> Any:
    """The syntax tree of a definition, None where it cannot be had."""
    if facts.file not in view.trees:
        try:
            view.trees[facts.file] = parse_source(view.source.text(facts.file), facts.file)
        except (SourceUnreadableError, KeyError):
            return None
    tree = view.trees[facts.file]
    for node in ast.walk(tree):
        if getattr(node, "lineno", None) == facts.line and isinstance(
            node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
        ):
            return node
    return None


__all__ = ["Drift", "Finding", "definition", "diff"]
