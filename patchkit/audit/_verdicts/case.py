"""What a rule is asked: one patch, at one version."""

from __future__ import annotations

from dataclasses import dataclass

from patchkit.audit._replacements import Replacement
from patchkit.audit._sightings import Sighting
from patchkit.audit._versions import Target
from patchkit.symbols import SymbolFacts
from patchkit.symbols.drift import Finding as Fate


@dataclass(frozen=True, slots=True)
class Subject:
    """A patch, ready to be judged.

    Attributes:
        sighting: Where and how it is written.
        symbol: ``module:qualname``, or a module, or a file.
        replacement: What is written.
    """

    sighting: Sighting
    symbol: str
    replacement: Replacement


@dataclass(frozen=True, slots=True)
class Case:
    """A patch at one version.

    Attributes:
        subject: The patch.
        target: The version asked about.
        base: The version that the patch was written for, None where none is at hand or
            where it is the one asked about.
    """

    subject: Subject
    target: Target
    base: Target | None

    @property
    def sighting(self) -> Sighting:
        """Where and how the patch is written."""
        return self.subject.sighting

    @property
    def symbol(self) -> str:
        """What is patched."""
        return self.subject.symbol

    @property
    def replacement(self) -> Replacement:
        """What is written."""
        return self.subject.replacement

    @property
    def label(self) -> str:
        """How the version is named in the answer."""
        return self.target.label

    def facts(self) -> SymbolFacts | None:
        """What is patched, as it is at this version."""
        return self.target.facts(self.symbol)

    def before(self) -> SymbolFacts | None:
        """What is patched, as it was when the patch was written."""
        return self.base.facts(self.symbol) if self.base is not None else None

    def fate(self, symbol: str | None = None) -> Fate | None:
        """What became of a symbol since then, of the patched one if none is named."""
        symbol = symbol or self.symbol
        if self.base is None or ":" not in symbol:
            return None
        return self.target.fate(symbol, self.base)

    def alias_sites(self) -> tuple[str, ...]:
        """Names that keep the old object: only where a module's name is rebound."""
        if self.sighting.action not in ("replace", "wrap", "value") or ":" not in self.symbol:
            return ()
        if "." in self.symbol.partition(":")[2]:
            return ()  # a member of a class: whoever has the class sees it
        facts = self.facts()
        if facts is None:
            return ()
        return tuple(a for a in self.target.aliases(facts.defined_at) if a != self.symbol)
