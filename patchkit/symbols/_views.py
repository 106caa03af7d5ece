"""One version of a package, as a comparison sees it: facts by name, candidates by content.

A view is made of a manifest or of source text. What it can answer differs (a manifest
of selected symbols knows no others), how it is asked does not.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from patchkit.symbols._facts import Record, SymbolFacts, facts_of
from patchkit.symbols._manifest import Manifest
from patchkit.symbols._match import Index, last_name
from patchkit.symbols._resolver import Resolver
from patchkit.symbols._scan import Progress, scan
from patchkit.symbols._sources import Source
from patchkit.symbols._symbol import Symbol
from patchkit.symbols.errors import SourceUnreadableError


class View:
    """One version of a package.

    Attributes:
        package: The import package.
        version: Its version.
        label: What the user named.
        kind: ``manifest``, ``wheel``, ``installed`` or ``tree``.
        unreadable: File -> why it could not be read.
    """

    package: str
    version: str
    label: str
    kind: str
    unreadable: Mapping[str, str]

    def facts(self, symbol: str) -> SymbolFacts | None:
        """Facts under a name, re-exports and inheritance followed."""
        raise NotImplementedError

    def known(self, symbol: str) -> bool:
        """Whether this view can say that a symbol does not exist."""
        raise NotImplementedError

    def members(self, symbol: str) -> dict[str, Record]:
        """The methods that a class defines itself, as far as this view has them."""
        raise NotImplementedError

    def everything(self, progress: Progress | None = None) -> Mapping[str, Record]:
        """The records of all symbols that this view has."""
        raise NotImplementedError

    def index(self) -> Index:
        """All of it, by content."""
        raise NotImplementedError

    def index_near(self, symbol: str, hints: Callable[[], Iterable[str]]) -> Index | None:
        """A part in which a lost symbol is likely to be, None where there is no such part."""
        return None


class ManifestView(View):
    """What a manifest knows."""

    kind = "manifest"

    def __init__(self, manifest: Manifest, label: str = "") -> None:
        self.manifest = manifest
        self.package = manifest.package
        self.version = manifest.version
        self.label = label or f"{manifest.package}@{manifest.version}"
        self.unreadable = manifest.unreadable
        self._index: Index | None = None

    def facts(self, symbol: str) -> SymbolFacts | None:
        facts = self.manifest.symbols.get(symbol)
        if facts is not None or not self.manifest.whole:
            return facts
        return self._followed(symbol)

    def _followed(self, symbol: str) -> SymbolFacts | None:
        """In a whole manifest re-exports and bases are followed as they are in sources."""
        seen = {symbol}
        queue = [(symbol, False)]
        while queue:
            name, inherited = queue.pop(0)
            record = self.manifest.records.get(name)
            if record is not None:
                facts = facts_of(symbol, record)
                if inherited:
                    return replace(facts, inherited_from=name)
                return replace(facts, reexport_of=name)
            module, _, qualname = name.partition(":")
            steps: list[tuple[str, bool]] = []
            target = self.manifest.references.get(name)
            if target is not None:
                steps.append((target, inherited))
            head, _, rest = qualname.partition(".")
            imported = self.manifest.references.get(f"{module}:{head}")
            if rest and imported is not None:
                steps.append((f"{imported}.{rest}", inherited))
            owner, _, last = qualname.rpartition(".")
            cls = self.manifest.records.get(f"{module}:{owner}") if owner else None
            for base in cls.get("bases", ()) if cls else ():
                text = base.partition("[")[0]
                steps.append((f"{text if ':' in text else f'{module}:{text}'}.{last}", True))
            for step in steps:
                if step[0] not in seen:
                    seen.add(step[0])
                    queue.append(step)
        return None

    def known(self, symbol: str) -> bool:
        return (
            self.manifest.whole or symbol in self.manifest.symbols or symbol in self.manifest.absent
        )

    def members(self, symbol: str) -> dict[str, Record]:
        return _members(self.manifest.records, f"{symbol}.")

    def everything(self, progress: Progress | None = None) -> Mapping[str, Record]:
        return self.manifest.records

    def index(self) -> Index:
        if self._index is None:
            self._index = Index(
                (name, record)
                for name, record in self.manifest.records.items()
                if "inherited_from" not in record and "reexport_of" not in record
            )
        return self._index


class SourceView(View):
    """What source text says; read as far as the questions need it."""

    def __init__(self, source: Source, label: str = "") -> None:
        self.source = source
        self.package = source.package
        self.version = source.version
        self.label = label or source.label
        self.kind = source.kind
        self.unreadable = source.unreadable
        self.resolver = Resolver(source)
        self.trees: dict[str, ast.Module] = {}
        self.functions: dict[str, dict[str, list[str]]] = {}
        self._complete = False
        self._named: dict[str, list[str]] | None = None
        self._index: Index | None = None

    def facts(self, symbol: str) -> SymbolFacts | None:
        return self.resolver.facts(Symbol.parse(symbol))

    def known(self, symbol: str) -> bool:
        return True

    def members(self, symbol: str) -> dict[str, Record]:
        name = Symbol.parse(symbol)
        raw = self.source.raw(name.module)
        return _members(raw.records, f"{name.qualname}.") if raw else {}

    def holders(self, name: str) -> list[str]:
        """Modules that define or import a name; those that spell it, where not all are read."""
        if self._complete:
            if self._named is None:
                self._named = {}
                for module in self.source.modules():
                    raw = self.source.raw(module)
                    for known in (*raw.references, *raw.records) if raw else ():
                        self._named.setdefault(known, []).append(module)
            return self._named.get(name, [])
        wanted = name.encode()
        found = []
        for module, file in self.source.modules().items():
            try:
                if wanted in self.source.text(file):
                    found.append(module)
            except SourceUnreadableError:
                continue
        return found

    def read_all(self, progress: Progress | None = None) -> None:
        """Read every module, if that has not happened."""
        if not self._complete:
            missing = [m for m in self.source.modules() if m not in self.source._raws]
            scan(self.source, missing, progress=progress)
            self._complete = True

    def everything(self, progress: Progress | None = None) -> Mapping[str, Record]:
        self.read_all(progress)
        return self._records(self.source.modules())

    def index(self) -> Index:
        if self._index is None:
            self._index = Index(self.everything().items())
        return self._index

    def _records(self, modules: Iterable[str]) -> dict[str, Record]:
        found = {}
        for module in modules:
            raw = self.source.raw(module)
            if raw is not None:
                for name, record in raw.records.items():
                    found[f"{module}:{name}"] = record
        return found

    def index_near(self, symbol: str, hints: Callable[[], Iterable[str]]) -> Index | None:
        """The modules that define the name, or hold most of the rarest of `hints`."""
        if self._complete:
            return None
        name = last_name(symbol).encode()
        definitions = (b"def " + name + b"(", b"class " + name, name + b" =", name + b":")
        rare = [h.encode() for h in hints()]
        holders: dict[bytes, set[str]] = {h: set() for h in rare}
        chosen = {symbol.partition(":")[0]} & set(self.source.modules())
        for module, file in self.source.modules().items():
            try:
                text = self.source.text(file)
            except SourceUnreadableError:
                continue
            if any(d in text for d in definitions):
                chosen.add(module)
            for hint in rare:
                if hint in text:
                    holders[hint].add(module)
        scores: dict[str, float] = {}
        for modules in holders.values():
            for module in modules:
                scores[module] = scores.get(module, 0.0) + 1 / (3 + len(modules))
        chosen.update(sorted(scores, key=lambda m: (-scores[m], m))[:6])
        return Index(self._records(sorted(chosen)[:400]).items())


def _members(records: Mapping[str, Record], prefix: str) -> dict[str, Record]:
    return {
        name[len(prefix) :]: record
        for name, record in records.items()
        if name.startswith(prefix)
        and "." not in name[len(prefix) :]
        and record["kind"] != "attribute"
        and "inherited_from" not in record
    }
