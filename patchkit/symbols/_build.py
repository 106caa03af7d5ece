"""Building manifests out of sources."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from patchkit.symbols._drift import diff
from patchkit.symbols._facts import Record
from patchkit.symbols._manifest import LazyFacts, Manifest
from patchkit.symbols._match import Match, owner_of
from patchkit.symbols._resolver import Resolver
from patchkit.symbols._scan import Progress, collector_paused
from patchkit.symbols._sources import Source, module_of
from patchkit.symbols._store import public_version
from patchkit.symbols._symbol import Symbol
from patchkit.symbols._views import SourceView

_MOST_ALIASES = 60
_ENVIRONMENT = re.compile(r"\benvs\.([A-Z][A-Z0-9_]+)")
_REGISTERS = re.compile(r"(?i)\bregister")


def build_whole(source: Source, *, progress: Progress | None = None) -> Manifest:
    """A manifest of every symbol of a package, with alias sites and references."""
    view = SourceView(source)
    with collector_paused():
        records = dict(view.everything(progress))
        references = _references(source)
        for definition, sites in _alias_sites(source, references).items():
            if definition in records:
                records[definition] = {**records[definition], "aliases": sites}
        return Manifest(
            source.package,
            public_version(source.version),
            LazyFacts(records, source.label),
            built_from=_built_from(source, len(source.modules())),
            references=references,
            unreadable=source.unreadable,
            whole=True,
        )


def build_manifest(
    source: Source,
    symbols: Iterable[str],
    *,
    depends_on: Mapping[str, Sequence[str]] | None = None,
    lineage: Mapping[str, Match] | None = None,
    lineage_from: str = "",
    progress: Progress | None = None,
) -> Manifest:
    """A manifest of selected symbols, with everything that has to be known about them.

    Args:
        source: The package.
        symbols: What goes in; with each method its class.
        depends_on: Symbol -> the symbols whose digests are recorded with it.
        lineage: What a comparison with the version before found out.
        lineage_from: That version.
        progress: Called with (done, total) while sources are read.
    """
    view = SourceView(source)
    view.read_all(progress)  # alias sites may be anywhere
    sites = _alias_sites(source, _references(source))
    wanted = set(symbols)
    wanted |= {owner for s in wanted if (owner := owner_of(s))}
    for needed in (depends_on or {}).values():
        wanted |= {s for s in needed if Symbol.parse(s).package == source.package}
    records: dict[str, Record] = {}
    absent = []
    for symbol in sorted(wanted):
        facts = view.facts(symbol)
        if facts is None:
            absent.append(symbol)
            continue
        record = facts.as_record()
        aliases = sites.get(facts.defined_at)
        if aliases and "." not in facts.defined_at.partition(":")[2]:
            record["aliases"] = [a for a in aliases if a != symbol]
        digests = {
            d: found.digest
            for d in (depends_on or {}).get(symbol, ())
            if (found := view.facts(d)) is not None
        }
        if digests:
            record["depends_on"] = digests
        selectors = _selectors(symbol, view)
        if selectors:
            record["selectors"] = selectors
        records[symbol] = record
    modules = {Symbol.parse(s).module for s in wanted}
    return Manifest(
        source.package,
        public_version(source.version),
        LazyFacts(records, source.label),
        built_from=_built_from(source, len(source.modules())),
        absent=absent,
        # Test files of a newer syntax and the like say nothing about these symbols, and
        # would make the manifest depend on the Python that built it.
        unreadable={f: why for f, why in source.unreadable.items() if _module(f) in modules},
        lineage={k: v for k, v in (lineage or {}).items() if k in wanted or k in absent},
        lineage_from=lineage_from,
    )


def _module(file: str) -> str:
    return module_of(file) or ""


def trace(
    old: Source, new: Source, symbols: Iterable[str], *, progress: Progress | None = None
) -> dict[str, Match]:
    """Where symbols of one version are in another, out of both whole packages."""
    before, after = SourceView(old), SourceView(new)
    before.read_all(progress)
    after.read_all(progress)
    found = {}
    for finding in diff(before, after, symbols).findings:
        if finding.new_symbol is not None:
            found[finding.symbol] = Match(
                symbol=finding.new_symbol,
                confidence=finding.confidence,
                evidence=finding.evidence,
            )
    return found


def _built_from(source: Source, files: int) -> dict[str, Any]:
    return {"kind": source.kind, "name": source.label, "files": files}


# ---- alias sites -------------------------------------------------------------------


def _references(source: Source) -> dict[str, str]:
    """Every name that a module of the package takes from another one of it."""
    package = source.package
    inside = (f"{package}.", f"{package}:")
    found = {}
    for module in source.modules():
        raw = source.raw(module)
        if raw is None:
            continue
        for name, target in raw.references.items():
            if target.startswith(inside) and ":" in target:
                found[f"{module}:{name}"] = target
    return found


def _alias_sites(source: Source, references: Mapping[str, str]) -> dict[str, list[str]]:
    """Definition -> the names elsewhere that hold it, re-exports followed."""
    resolver = Resolver(source)
    sites: dict[str, list[str]] = {}
    for site, target in references.items():
        seen = {site}
        while target in references and target not in seen:
            seen.add(target)
            target = references[target]
        module, _, name = target.partition(":")
        raw = source.raw(module)
        if raw is not None and name not in raw.records:
            found = resolver.find(Symbol(module, name))
            if found is not None:
                target = str(found.symbol)
        sites.setdefault(target, []).append(site)
    return {definition: sorted(names)[:_MOST_ALIASES] for definition, names in sites.items()}


# ---- selectors -----------------------------------------------------------------------


def _selectors(symbol: str, view: SourceView) -> dict[str, str]:
    """What decides whether the symbol runs: how it is registered, which variables it reads."""
    found: dict[str, str] = {}
    name = Symbol.parse(symbol)
    for holder in (symbol, f"{name.module}:{name.owner}" if name.owner else ""):
        facts = view.facts(holder) if holder else None
        for decorator in facts.decorators if facts else ():
            if _REGISTERS.search(decorator):
                found["registered"] = decorator
    facts = view.facts(symbol)
    if facts is None or facts.kind == "attribute":
        return found
    for variable in sorted(set(_ENVIRONMENT.findall(_text(view, facts.file, facts.line)))):
        value = view.facts(f"{name.package}.envs:{variable}")
        if value is not None and value.value is not None:
            found[f"env {variable}"] = value.value
    return found


def _text(view: SourceView, file: str, line: int) -> str:
    """The lines of one definition: up to the next one that is indented as little."""
    lines = view.source.text(file).decode("utf-8", "replace").splitlines()[line - 1 :]
    if not lines:
        return ""
    indent = len(lines[0]) - len(lines[0].lstrip())
    taken = [lines[0]]
    for text in lines[1:]:
        stripped = text.lstrip()
        if stripped and len(text) - len(stripped) <= indent and not stripped.startswith((")", "]")):
            break
        taken.append(text)
    return "\n".join(taken)
