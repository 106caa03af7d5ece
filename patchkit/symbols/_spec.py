"""What a user names as OLD or NEW: a stored version, a manifest, a wheel or a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from patchkit.symbols._installed import installed_version
from patchkit.symbols._manifest import Manifest
from patchkit.symbols._sources import InstalledSource, Source, TreeSource, WheelSource
from patchkit.symbols._store import public_version, stored_manifest, stored_versions
from patchkit.symbols._views import ManifestView, SourceView, View
from patchkit.symbols.errors import PackageNotInstalledError, SourceNotFoundError

INSTALLED = "installed"


def open_view(
    text: str,
    *,
    package: str | None = None,
    extra: Sequence[Path] = (),
    whole: bool = False,
) -> View:
    """Open what a user named.

    Args:
        text: ``vllm@0.26.0``, ``vllm@installed``, or the path of a manifest, a wheel or
            a folder that contains the package.
        package: The import package that is meant, where a wheel or folder has several.
        extra: Further folders of manifests.
        whole: Symbols that a stored manifest may not cover are asked for: an installed
            copy of that version is read instead, where there is one.

    Raises:
        SourceNotFoundError: It names nothing.
        ManifestError: It is a manifest that cannot be used.
    """
    path = Path(text)
    if text.endswith(".json"):
        return ManifestView(Manifest.load(path), path.name)
    if text.endswith(".whl"):
        return SourceView(WheelSource(path, package), path.name)
    if path.is_dir():
        return SourceView(open_tree(path, package), text)
    name, at, version = text.partition("@")
    if not at or not name.isidentifier() or not version:
        raise SourceNotFoundError(
            text,
            "it is none of these" if path.exists() else "there is no such file or folder",
            "Name PACKAGE@VERSION, a manifest (.json), a wheel (.whl) or a folder",
        )
    if version == INSTALLED:
        return SourceView(InstalledSource(name), text)
    if not whole:
        manifest = stored_manifest(name, version, extra=extra)
        if manifest is not None:
            return ManifestView(manifest, text)
    installed = installed_source(name, version)
    if installed is not None:
        return SourceView(installed, text)
    known = stored_versions(name, extra=extra)
    if whole and known:
        raise SourceNotFoundError(
            text,
            "its stored manifest holds selected symbols only, and this version is not installed",
            "Name a wheel or a folder",
        )
    raise SourceNotFoundError(
        text,
        f"there is no stored manifest of it (stored: {', '.join(known) or 'none'})",
        "Name a wheel or a folder, or build one: patchkit manifest build",
    )


def installed_source(package: str, version: str) -> Source | None:
    """The installed copy, if it is of that version."""
    try:
        if public_version(installed_version(package)) == public_version(version):
            return InstalledSource(package)
    except PackageNotInstalledError:
        return None
    return None


def open_tree(path: Path, package: str | None = None) -> TreeSource:
    """A folder that contains a package, or is one."""
    path = path.resolve()
    if (path / "__init__.py").is_file() and (package is None or path.name == package):
        return TreeSource(path.parent, path.name)
    if package is not None:
        for root in (path, path / "src", path / "python"):
            if (root / package).is_dir() or (root / f"{package}.py").is_file():
                return TreeSource(root, package)
        raise SourceNotFoundError(
            str(path), f"it contains no package {package!r}", "Name the folder above the package"
        )
    for root in (path, path / "src", path / "python"):
        if not root.is_dir():
            continue
        found = sorted(
            p.parent.name for p in root.glob("*/__init__.py") if p.parent.name.isidentifier()
        )
        likely = [name for name in found if name not in ("tests", "test", "docs", "examples")]
        if len(likely) == 1:
            return TreeSource(root, likely[0])
        if likely:
            raise SourceNotFoundError(
                str(path),
                f"it contains {len(likely)} packages ({', '.join(likely[:6])} …)",
                "Name a symbol or an adapter, or the package's own folder",
            )
    raise SourceNotFoundError(str(path), "it contains no package", "Name the folder above it")


def versions_between(
    package: str, old: View, new: View, *, extra: Sequence[Path] = ()
) -> list[Manifest]:
    """Stored manifests after `old` up to `new`, so that symbols are followed step by step."""
    from packaging.version import InvalidVersion, Version

    try:
        low, high = Version(public_version(old.version)), Version(public_version(new.version))
    except InvalidVersion:
        return []
    found = []
    for text in stored_versions(package, extra=extra):
        if low < Version(text) <= high:
            manifest = stored_manifest(package, text, extra=extra)
            if manifest is not None:
                found.append(manifest)
    # Up to a version that is not stored itself nothing can be followed to the end.
    return found if found and Version(found[-1].version) == high else []
