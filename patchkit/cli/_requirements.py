"""What an adapter needs of each package, and what of it was reviewed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from patchkit.errors import ConfigurationError
from patchkit.symbols import Symbol
from patchkit.symbols.drift import Requirement

if TYPE_CHECKING:
    from patchkit.engine import Adapter

Reviewed = dict[str, dict[str, list[str]]]


def requirements(adapter: Adapter, profile: str | None = None) -> list[Requirement]:
    """Every symbol an adapter patches, depends on or relies on.

    Args:
        adapter: The adapter.
        profile: Only what this profile needs; everything where None.
    """
    found: dict[tuple[str, str, str], Requirement] = {}
    for side in ("rollout", "trainer"):
        for patch in adapter.patches(side):
            if profile is not None and patch.profiles and profile not in patch.profiles:
                continue
            if patch.action == "dispatch":
                continue  # an operator of the dispatcher has no source to compare
            label = getattr(patch, "identity", patch.symbol)
            _add(
                found,
                Requirement(
                    symbol=patch.symbol,
                    side=side,
                    versions=patch.versions,
                    label=label,
                    action=patch.action,
                ),
            )
            for needed in patch.depends_on:
                same = Symbol.parse(needed).package == Symbol.parse(patch.symbol).package
                _add(
                    found,
                    Requirement(
                        symbol=needed,
                        role="depends_on",
                        side=side,
                        # A specifier of the target's package says nothing about others.
                        versions=patch.versions if same else "",
                        label=needed,
                        patched_by=patch.symbol,
                    ),
                )
    for symbol in adapter.relies_on:
        _add(found, Requirement(symbol=symbol, role="relies_on", label=symbol))
    return list(found.values())


def _add(found: dict[tuple[str, str, str], Requirement], new: Requirement) -> None:
    found.setdefault((new.symbol, new.role, new.versions), new)


def reviewed_of(adapter: Adapter) -> Reviewed:
    """symbol -> digest -> versions, as the adapter's ``reviewed.json`` says."""
    source = adapter.reviewed
    if source is None:
        return {}
    if not isinstance(source, Path):
        return source.get("symbols", source)  # type: ignore[return-value]
    if not source.is_file():
        return {}
    from packaging.version import Version

    try:
        data = json.loads(source.read_text(encoding="utf-8"))
        symbols = data["symbols"]
        for symbol, digests in symbols.items():
            Symbol.parse(symbol)
            if not isinstance(digests, dict):
                raise ValueError(f"the entry of {symbol} is no object of digests")
            for version in (v for versions in digests.values() for v in versions):
                Version(version)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigurationError(f"{source}: not a file of reviewed digests: {error}") from error
    if data.get("schema") != 1:
        raise ConfigurationError(
            f"{source}: schema {data.get('schema')!r}, and this patchkit knows schema 1: update it"
        )
    return symbols


def reviewed_versions(reviewed: Reviewed, symbols: Iterable[str]) -> Iterator[str]:
    """The versions at which any of the symbols was reviewed."""
    for symbol in symbols:
        for versions in reviewed.get(symbol, {}).values():
            yield from versions


def accepted(entries: Iterable[str]) -> dict[str, str]:
    """``--accept SYMBOL=DIGEST`` options as a mapping."""
    found = {}
    for entry in entries:
        symbol, equals, digest = entry.rpartition("=")
        if not equals or not digest:
            raise ConfigurationError(f"--accept {entry!r}: write SYMBOL=DIGEST")
        found[str(Symbol.parse(symbol))] = digest
    return found
