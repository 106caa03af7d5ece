"""What can be said about a symbol without importing it: version, source, reviewed digests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from patchkit.engine._declare import Adapter, Patch
from patchkit.engine.errors import DeclarationError, violation
from patchkit.errors import ConfigurationError, PatchkitError, Violation
from patchkit.symbols import Symbol, SymbolFacts, find_facts, installed_version


class Review:
    """The static half of a preflight: facts and verdicts, each looked up once.

    Attributes:
        violations: Everything found wrong so far.
        unreviewed: symbol -> digest, of what was let through without a review.
        versions: package -> installed version, as far as asked for.
    """

    def __init__(self, adapter: Adapter, accept: Mapping[str, str]) -> None:
        if not isinstance(accept, Mapping):
            raise ConfigurationError(
                f"accept: expected symbol -> digest, found {type(accept).__name__} {accept!r:.200}"
            )
        self.adapter = adapter
        self.accept = dict(accept)
        self.violations: list[Violation] = []
        self.unreviewed: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        self._reviewed = load_reviewed(adapter)
        self._facts: dict[str, SymbolFacts | None] = {}

    def applies(self, patch: Patch) -> bool:
        """Whether the patch is meant for the installed version of its target."""
        if not patch.versions:
            return True
        from packaging.specifiers import SpecifierSet

        version = self.version(Symbol.parse(patch.symbol).package)
        if not version:
            self.violations.append(
                violation(
                    patch.symbol,
                    "version unknown",
                    expected=patch.versions,
                    found="no installed distribution provides this package",
                    remedy="install the package, or leave versions out for code that has none",
                )
            )
            return True
        return SpecifierSet(patch.versions).contains(version, prereleases=True)

    def version(self, package: str) -> str:
        """The installed version, or the empty string."""
        if package not in self.versions:
            try:
                self.versions[package] = installed_version(package)
            except ConfigurationError:
                self.versions[package] = ""
        return self.versions[package]

    def facts(self, symbol: str) -> SymbolFacts | None:
        """Static facts; unreadable source is a violation, missing source is None."""
        if symbol not in self._facts:
            try:
                self._facts[symbol] = find_facts(symbol)
            except PatchkitError as error:
                self._facts[symbol] = None
                self.violations.append(
                    violation(
                        symbol,
                        "its source cannot be read",
                        expected="readable Python source",
                        found=str(error),
                        remedy="reinstall the package with its sources",
                    )
                )
        return self._facts[symbol]

    def judge(self, symbol: str, *, live: bool = False) -> SymbolFacts | None:
        """Compare a symbol's digest with the reviewed ones; returns its facts.

        Args:
            symbol: The symbol.
            live: It was found among the loaded modules, so lacking source is
                not yet proof of its absence.
        """
        before = len(self.violations)
        facts = self.facts(symbol)
        if len(self.violations) > before:
            return None
        if facts is None and not live:
            self.violations.append(
                violation(
                    symbol,
                    "not there",
                    expected="a definition in the installed source",
                    found="none" + self._at(symbol),
                    remedy="`patchkit diff` finds where an upgrade moved it",
                )
            )
            return None
        digest = facts.digest if facts is not None else ""
        if self._reviewed is None:
            self.unreviewed[symbol] = digest
            return facts
        known = self._reviewed.get(symbol, {})
        if digest and digest in known:
            return facts
        if digest and self.accept.get(symbol) == digest:
            self.unreviewed[symbol] = digest
            return facts
        self.violations.append(self._drift(symbol, digest, known))
        return facts

    def _drift(self, symbol: str, digest: str, known: Mapping[str, Any]) -> Violation:
        if not digest:
            return violation(
                symbol,
                "no source to review",
                expected="Python source with a reviewed digest",
                found="an object without readable source",
                remedy="patch something that has source, or declare an adapter without reviews",
            )
        listing = "; ".join(f"{d} ({', '.join(map(str, v))})" for d, v in known.items())
        problem = "its code changed since it was reviewed" if known else "it was never reviewed"
        if symbol in self.accept:
            problem += f", and the digest accepted for it ({self.accept[symbol]}) is another one"
        return violation(
            symbol,
            problem,
            expected=listing or "a reviewed digest",
            found=digest + self._at(symbol),
            remedy=f"read the change (`patchkit diff`), then record it with `patchkit adapt "
            f"{self.adapter.name}`; for one run, unreviewed: --accept '{symbol}={digest}'",
        )

    def _at(self, symbol: str) -> str:
        package = symbol.partition(":")[0].partition(".")[0]
        version = self.version(package)
        return f" at {package} {version}" if version else ""


def load_reviewed(adapter: Adapter) -> Mapping[str, Mapping[str, Any]] | None:
    """symbol -> digest -> versions, or None for an adapter without reviews."""
    source = adapter.reviewed
    if source is None:
        return None
    if isinstance(source, Path):
        try:
            source = json.loads(source.read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise DeclarationError(
                f"adapter {adapter.name!r}",
                [f"its reviewed digests cannot be read: {error}; `patchkit adapt` writes them"],
            ) from error
    if not isinstance(source, Mapping) or source.get("schema") != 1:
        raise DeclarationError(
            f"adapter {adapter.name!r}",
            ['its reviewed digests are not of schema 1: {"schema": 1, "symbols": {…}}'],
        )
    symbols = source.get("symbols", {})
    if not isinstance(symbols, Mapping):
        raise DeclarationError(f"adapter {adapter.name!r}", ["'symbols' is no table"])
    if problems := [
        f"reviewed digests of {symbol}: expected a table of digests, each with a list of versions"
        for symbol, digests in symbols.items()
        if not isinstance(digests, Mapping)
        or not all(isinstance(versions, (list, tuple)) for versions in digests.values())
    ]:
        raise DeclarationError(f"adapter {adapter.name!r}", problems)
    return symbols
