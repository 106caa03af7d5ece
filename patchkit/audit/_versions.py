"""The versions that are asked about: what exists at each, and where."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence
from importlib.metadata import packages_distributions
from pathlib import Path

from patchkit.audit._values import FilePath, Ref
from patchkit.errors import ConfigurationError
from patchkit.symbols import Manifest, Symbol, SymbolFacts, installed_version
from patchkit.symbols._store import public_version
from patchkit.symbols.drift import (
    Drift,
    Finding,
    InstalledSource,
    ManifestView,
    SourceView,
    View,
    definition,
    diff,
    open_view,
    versions_between,
)
from patchkit.symbols.errors import (
    PackageNotInstalledError,
    SourceNotFoundError,
    SourceUnreadableError,
)


class Target:
    """One version of one package.

    Attributes:
        package: The import package.
        version: Its version, without a local label.
        label: How the version is named in the answer.
        view: Its symbols.
    """

    def __init__(self, view: View, label: str = "") -> None:
        self.view = view
        self.package = view.package
        self.version = public_version(view.version)
        self.label = label or f"{view.package} {self.version}"
        self._drifts: dict[tuple[int, str], Finding | None] = {}
        self._aliases: dict[str, tuple[str, ...]] = {}
        self._with_text: dict[str, list[str]] = {}

    @property
    def source(self) -> SourceView | None:
        """The view where it has source text."""
        return self.view if isinstance(self.view, SourceView) else None

    @property
    def _manifest(self) -> Manifest | None:
        """The manifest where that is all there is."""
        return self.view.manifest if isinstance(self.view, ManifestView) else None

    # ---- names -------------------------------------------------------------------

    def is_module(self, name: str) -> bool | None:
        """Whether there is a module of this name; None where only a manifest is at hand."""
        manifest = self._manifest
        if manifest is not None:
            start = (f"{name}:", f"{name}.")
            if any(symbol.startswith(start) for symbol in manifest.symbols):
                return True
            # What adapters looked for in it and did not find was the whole of it.
            return False if any(s.startswith(f"{name}:") for s in manifest.absent) else None
        assert self.source is not None
        modules = self.source.source.modules()
        return name in modules or self._is_namespace(name)

    def _is_namespace(self, name: str) -> bool:
        assert self.source is not None
        if not hasattr(self, "_folders"):
            folders: set[str] = set()
            for module in self.source.source.modules():
                parts = module.split(".")
                folders.update(".".join(parts[:i]) for i in range(1, len(parts)))
            self._folders = folders
        return name in self._folders

    def split(self, place: Ref) -> tuple[str, str] | None:
        """Module and qualified name; None where the module does not exist at this version."""
        parts = [*place.module.split("."), *place.attrs]
        manifest = self._manifest
        if manifest is not None:
            known = {*manifest.symbols, *manifest.absent}
            return next(
                (
                    (".".join(parts[:i]), ".".join(parts[i:]))
                    for i in range(len(parts) - 1, 0, -1)
                    if f"{'.'.join(parts[:i])}:{'.'.join(parts[i:])}" in known
                ),
                None,
            )
        module = parts[0]
        if not self.is_module(module):
            return None
        index = 1
        while index < len(parts):
            inner = f"{module}.{parts[index]}"
            if not self.is_module(inner):
                break
            if index == len(parts) - 1 and self._defines(module, parts[index]):
                break  # a function that is called like its module
            module = inner
            index += 1
        if index < len(parts) and index < len(place.module.split(".")):
            return None  # the project imports it as a module, and there is none
        return module, ".".join(parts[index:])

    def imported(self, module: str, name: str) -> str | None:
        """Where in another package a module has a name from: ``module:name``, or a module."""
        for _ in range(8):
            raw = self.source.source.raw(module) if self.source is not None else None
            found = raw.references.get(name) if raw is not None else None
            if found is None:
                return None
            if found.partition(":")[0].partition(".")[0] != self.package:
                return found
            module, _, name = found.partition(":")
        return None

    def made_when_asked(self, place: str) -> str:
        """The module whose ``__getattr__`` gives a name on the way to a place, by its text."""
        parts = place.replace(":", ".").split(".")
        for end in range(len(parts) - 1, 0, -1):
            module = ".".join(parts[:end])
            if self.source is None or not self.is_module(module):
                continue
            raw = self.source.source.raw(module)
            file = self.source.source.modules().get(module)
            text = self.text(file) if file is not None else None
            if raw is None or not raw.dynamic or text is None:
                return ""
            name = parts[end]
            return module if f'"{name}"' in text or f"'{name}'" in text else ""
        return ""

    def _defines(self, module: str, name: str) -> bool:
        assert self.source is not None
        raw = self.source.source.raw(module)
        return raw is not None and name in raw.records

    def has(self, place: Ref) -> bool | None:
        """Whether a module or a name exists."""
        found = self.split(place)
        if found is None:
            return False if self.source is not None else self.is_module(place.dotted)
        module, name = found
        if not name:
            return True
        if self.facts(f"{module}:{name}") is not None:
            return True
        if not self.view.known(f"{module}:{name}"):
            return None
        head, dot, _ = name.partition(".")
        if self.imported(module, head):
            return None if dot else True
        owner, _, last = name.rpartition(".")
        if last.startswith("__") and last.endswith("__") and owner:
            # Python itself gives it to most functions and classes.
            return None if self.has(Ref(module, tuple(owner.split(".")))) else False
        first = self.facts(f"{module}:{head}") if dot else None
        if first is not None and first.kind == "attribute":
            return None  # what an object has is not looked into
        raw = self.source.source.raw(module) if self.source else None
        # A module with `__getattr__` may have it all the same.
        return None if raw is not None and raw.dynamic and first is None else False

    def holds_code(self, place: Ref) -> bool | None:
        """Whether a name is a module, a class or a function, None where that is not known."""
        found = self.split(place)
        if found is None or not found[1]:
            return True if found else None
        facts = self.facts(f"{found[0]}:{found[1]}")
        return None if facts is None else facts.kind != "attribute" or None

    def facts(self, symbol: str) -> SymbolFacts | None:
        """Facts about a symbol, None where there is none (or its file cannot be read)."""
        try:
            return self.view.facts(symbol)
        except SourceUnreadableError:
            return None

    def foreign_bases(self, cls: str) -> list[str]:
        """Bases of a class, and of its bases, that this package's source does not define."""
        if self.source is None:
            return []
        found: list[str] = []
        resolver = self.source.resolver
        for one in resolver.order(Symbol.parse(cls)):
            raw = self.source.source.raw(one.module)
            record = raw.records.get(one.qualname) if raw is not None else None
            bases = [b for b in (record or {}).get("bases", ()) if "=" not in b]
            if len(bases) > len(list(resolver.bases(one))):
                known = {str(b) for b in resolver.bases(one)}
                found += [
                    b.partition("[")[0]
                    for b in bases
                    if b.partition("[")[0] not in known and not self._is_class(one, b)
                ]
        return found

    def _is_class(self, cls: Symbol, base: str) -> bool:
        """Whether the text of a base leads to a class of this package."""
        name = base.partition("[")[0]
        if "(" in name:
            return False
        symbol = name if ":" in name else f"{cls.module}:{name}"
        facts = self.facts(symbol)
        return facts is not None and facts.kind == "class"

    # ---- where it went -----------------------------------------------------------

    def fate(self, symbol: str, base: Target) -> Finding | None:
        """How a symbol of `base` fares here; None where `base` has none."""
        key = (id(base), symbol)
        if key not in self._drifts:
            between = versions_between(self.package, base.view, self.view)
            drift: Drift = diff(base.view, self.view, [symbol], between=between)
            self._drifts[key] = drift.findings[0] if drift.findings else None
        return self._drifts[key]

    def definition(self, facts: SymbolFacts) -> ast.AST | None:
        """The syntax of a definition."""
        if self.source is None:
            return None
        try:
            node = definition(self.source, facts)
        except SourceUnreadableError:
            return None
        return node if isinstance(node, ast.AST) else None

    def aliases(self, symbol: str) -> tuple[str, ...]:
        """Module-level names elsewhere in the package that hold the same object."""
        if symbol not in self._aliases:
            self._aliases[symbol] = self._find_aliases(Symbol.parse(symbol))
        return self._aliases[symbol]

    def _find_aliases(self, symbol: Symbol) -> tuple[str, ...]:
        view = self.source
        facts = self.facts(str(symbol))
        if view is None or facts is None:
            return facts.aliases if facts is not None else ()
        found = []
        for module in self._importers(symbol.name):
            raw = view.source.raw(module)
            if raw is None or module == symbol.module:
                continue
            for local, reference in raw.references.items():
                if "." in local or not reference.endswith(f":{symbol.name}"):
                    continue
                reached = self.facts(f"{module}:{local}")
                if reached is not None and reached.defined_at == facts.defined_at:
                    found.append(f"{module}:{local}")
        return tuple(sorted(found))

    def _importers(self, name: str) -> list[str]:
        """Modules with an import statement that names `name`, as far as text can say."""
        assert self.source is not None
        word = name.encode()
        importing = re.compile(
            rb"^[ \t]*from[ \t]+[.\w]+[ \t]+import[ \t]+"
            rb"(?:\([^)]*\b" + re.escape(word) + rb"\b|[^\n(]*\b" + re.escape(word) + rb"\b)",
            re.MULTILINE,
        )
        found = []
        for module, file in self.source.source.modules().items():
            try:
                text = self.source.source.text(file)
            except SourceUnreadableError:
                continue
            if word in text and importing.search(text):
                found.append(module)
        return found

    # ---- files ---------------------------------------------------------------------

    def file(self, path: FilePath) -> str | None:
        """The file meant by a path: ``a/b/__init__.py`` may be meant for ``a/b.py``."""
        if self.source is None:
            return None
        files = set(self.source.source.modules().values())
        candidates = [path.relative]
        parts = path.parts
        if parts and parts[-1] == "__init__.py":
            candidates.append("/".join((path.package, *parts[:-1])) + ".py")
        elif len(parts) > 1:
            # `dirname(module.__file__)` of a module, taken for a package's.
            candidates.append("/".join((path.package, *parts[:-2], parts[-1])))
        return next((c for c in candidates if c in files), None)

    def text(self, file: str) -> str | None:
        """The text of a file."""
        if self.source is None:
            return None
        try:
            return self.source.source.text(file).decode("utf-8", "replace")
        except (SourceUnreadableError, KeyError):
            return None

    def files_with(self, text: str) -> list[str]:
        """The files of the package in which a text stands."""
        if self.source is None:
            return []
        if text not in self._with_text:
            self._with_text[text] = self._search(text.encode())
        return self._with_text[text]

    def _search(self, wanted: bytes) -> list[str]:
        assert self.source is not None
        found = []
        for file in self.source.source.modules().values():
            try:
                if wanted in self.source.source.text(file):
                    found.append(file)
            except SourceUnreadableError:
                continue
        return found


class Versions:
    """The versions asked about, per package, oldest question first.

    Attributes:
        asked: Package -> the versions that get a verdict.
        base: Package -> the version that the patches were written for, where known.
        also_installed: Whether the installed copies are asked about beside others.
    """

    def __init__(self, *, also_installed: bool = False) -> None:
        self.also_installed = also_installed
        self.asked: dict[str, list[Target]] = {}
        self.base: dict[str, Target] = {}
        self._installed: dict[str, Target | None] = {}
        self._complete: set[str] = set()

    def ask(self, target: Target) -> None:
        """Add a version that gets a verdict."""
        known = self.asked.setdefault(target.package, [])
        if all(t.label != target.label for t in known):
            known.append(target)

    def of(self, package: str) -> list[Target]:
        """The versions of a package that get a verdict; the installed one by default."""
        if package not in self._complete:
            self._complete.add(package)
            known = self.asked.setdefault(package, [])
            target = self.installed(package) if self.also_installed or not known else None
            if target is not None and all(t.version != target.version for t in known):
                known.insert(0, target)
        return self.asked[package]

    def installed(self, package: str) -> Target | None:
        """The installed copy of a package."""
        if package in sys.stdlib_module_names:
            return None  # no distribution's
        if package not in self._installed:
            try:
                source = InstalledSource(package)
                self._installed[package] = Target(SourceView(source))
            except (PackageNotInstalledError, SourceUnreadableError, ValueError):
                self._installed[package] = None
        return self._installed[package]

    def base_of(self, package: str, target: Target) -> Target | None:
        """The version to compare with: the one named, or the installed one if it differs."""
        base = self.base.get(package)
        if base is None:
            base = self.installed(package)
        return base if base is not None and base.version != target.version else None


def open_target(text: str, package: str | None = None, extra: Sequence[Path] = ()) -> Target:
    """A version as the user names it: ``vllm@0.33.0``, a wheel, a folder, a manifest.

    Raises:
        ConfigurationError: It names nothing.
    """
    try:
        return Target(open_view(text, package=package, extra=extra, whole=True))
    except SourceNotFoundError:
        pass
    try:
        # A stored manifest answers for the symbols that adapters need, and for no others.
        return Target(open_view(text, package=package, extra=extra))
    except SourceNotFoundError as error:
        name, at, version = text.partition("@")
        if not at or not name.isidentifier() or not version:
            raise
        remedy = f"{download(name, version)}, and name the wheel, which answers for every symbol"
        raise SourceNotFoundError(text, error.problem, remedy) from None


def download(package: str, version: str) -> str:
    """How to come by the wheel of a version."""
    name = package.replace("_", "-")
    installed = packages_distributions().get(package, [name])
    if not any(other.replace("_", "-").lower().startswith(name.lower()) for other in installed):
        name = installed[0]
    return f"pip download {name}=={version} --no-deps"


def open_installed(package: str) -> Target:
    """The installed copy, which must exist."""
    try:
        installed_version(package)
        return Target(SourceView(InstalledSource(package)))
    except PackageNotInstalledError as error:
        raise ConfigurationError(str(error)) from error
