"""Manifests that are stored: those patchkit ships, and those of adapters elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from patchkit.symbols._manifest import Manifest
from patchkit.symbols.errors import ManifestConflictError


def shipped_directory() -> Path | None:
    """The folder of the manifests that patchkit ships."""
    spec = find_spec("patchkit_manifests")
    locations = spec.submodule_search_locations if spec else None
    return Path(next(iter(locations))) if locations else None


def directories(extra: Sequence[Path] = ()) -> Iterator[Path]:
    """Every folder that is searched: the shipped one first."""
    shipped = shipped_directory()
    if shipped is not None:
        yield shipped
    yield from (Path(p) for p in extra)


def public_version(version: str) -> str:
    """A version without its local label, which says how it was built."""
    return version.partition("+")[0]


def stored_versions(package: str, *, extra: Sequence[Path] = ()) -> list[str]:
    """The versions of a package of which there is a manifest, oldest first."""
    from packaging.version import InvalidVersion, Version

    found = {}
    for directory in directories(extra):
        for file in (directory / package).glob("*.json"):
            try:
                found[file.stem] = Version(file.stem)
            except InvalidVersion:  # some other file that lies there
                continue
    return sorted(found, key=found.__getitem__)


def stored_manifest(package: str, version: str, *, extra: Sequence[Path] = ()) -> Manifest | None:
    """The manifest of one version, merged out of all folders that have one.

    A local label (``+cpu``) is looked for first and then left off. Two manifests may
    add to each other; where both speak of a symbol they must agree.

    Args:
        package: The import package.
        version: Its version.
        extra: Folders beside the shipped one, each with ``<package>/<version>.json``.

    Raises:
        ManifestConflictError: Two of them disagree about a symbol.
        ManifestError: One of them cannot be used.
    """
    names = dict.fromkeys([version, public_version(version)])
    for name in names:
        files = [
            file
            for directory in directories(extra)
            if (file := directory / package / f"{name}.json").is_file()
        ]
        if files:
            return _merged([Manifest.load(file) for file in files])
    return None


def _merged(manifests: list[Manifest]) -> Manifest:
    first, *others = manifests
    if not others:
        return first
    symbols = dict(first.symbols)
    absent = set(first.absent)
    for other in others:
        conflicts = {
            name: (symbols[name].digest, other.symbols[name].digest)
            for name in other.symbols
            if name in symbols and symbols[name].digest != other.symbols[name].digest
        }
        conflicts |= {
            name: (symbols[name].digest, "absent") for name in other.absent if name in symbols
        }
        conflicts |= {
            name: ("absent", other.symbols[name].digest) for name in absent if name in other.symbols
        }
        if conflicts:
            raise ManifestConflictError(first.path, other.path, conflicts)
        symbols.update(other.symbols)
        absent |= set(other.absent)
    return Manifest(
        first.package,
        first.version,
        symbols,
        built_from=first.built_from,
        absent=absent,
        path=first.path,
    )
