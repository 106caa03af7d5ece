"""The files of the audited project, their module names, and what is the project's own."""

from __future__ import annotations

import ast
import os
import re
import stat
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from patchkit.errors import ConfigurationError

_SKIPPED_FOLDERS = frozenset({
    "__pycache__", "node_modules", "site-packages", "dist-packages", "venv", "env", "build",
    "dist", "eggs",
})  # fmt: skip
_TEST_FOLDERS = frozenset({"test", "tests"})
_TEST_FILE = re.compile(r"(?:^test_.*|.*_test|^conftest)\.py$")
MAX_FILE_BYTES = 8 << 20

# Packages that are patched often enough that a folder of this name beside a script is
# taken for a checkout of the package, not for a module of the project.
WELL_KNOWN = frozenset({
    "vllm", "transformers", "torch", "ray", "sglang", "megatron", "deepspeed", "accelerate",
    "peft", "trl", "datasets", "flash_attn", "triton", "numpy", "verl", "diffusers",
    "bitsandbytes", "xformers", "flashinfer", "xgrammar",
})  # fmt: skip

# Any of these must stand in a file that patches something by itself. The expression may
# say yes too often, never no: an assignment to an attribute or an entry that is not
# directly one of `self`, or the name of something that patches.
_TRIGGER = re.compile(
    rb"(?<!\bself)\.\w+\s*(?:[-+*/|&^%@]|//|\*\*|<<|>>)?=(?!=)"
    rb"|^[ \t]*[\w.()\[\]'\"]+\.\w+[ \t]*:[^=\n]+=(?!=)"
    rb"|(?<!self)\.\w+\s*,[^()=\n]*=(?!=)"
    rb"|\]\s*[|]?=(?!=)"
    rb"|\)\s*=(?!=)"
    rb"|\.\w+\s*\\\s*="
    rb"|\.(?:update|setdefault|__setitem__)\b|[A-Z_]{2,}\.(?:append|insert|extend|pop)\b"
    rb"|(?i:registry|mapping)\.(?:append|insert|extend|pop)\b"
    rb"|setattr|delattr|\bdel\b|__dict__|__class__|\bvars\b|globals"
    rb"|mock|monkeypatch|wrapt|gorilla|mpat|curse|\bpatchy?\b|[._]patch|patch[_(]"
    rb"|sys\.modules|meta_path|torch\.library|\.impl\b|py_impl|register|when_imported"
    rb"|post_import|write_text|write_bytes|\.write\b|writelines|\bexec\b|\bcompile\b"
    rb"|worker_process_setup_hook|worker_extension_cls|worker_cls|_w\b|\bwrap\w*\(|sed\b",
    re.MULTILINE,
)


_WORD = re.compile(rb"(\w+)\s*[(),]|^\s*@[\w.]*?(\w+)\s*$", re.MULTILINE)


@dataclass(slots=True)
class SourceFile:
    """One Python file of the project."""

    path: Path
    relative: str
    module: str
    is_package: bool
    data: bytes | None = None
    _words: set[bytes] | None = None

    def words(self) -> set[bytes]:
        """The names that stand before an opening or closing parenthesis or a comma."""
        if self._words is None:
            self._words = {a or b for a, b in _WORD.findall(self.data or b"")}
        return self._words

    @property
    def package(self) -> str:
        return self.module if self.is_package else self.module.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A file that could not be read."""

    file: str
    problem: str
    line: int = 0


@dataclass
class Project:
    """The audited files and the names they go by.

    Args:
        root: A folder, or one file.
        packages: Import packages that count as foreign even where the project has a
            folder of that name.
        include_tests: Whether test files are looked at.
    """

    root: Path
    packages: frozenset[str] = frozenset()
    include_tests: bool = False
    files: list[SourceFile] = field(default_factory=list)
    skipped_tests: int = 0
    unreadable: list[Unreadable] = field(default_factory=list)
    by_module: dict[str, SourceFile] = field(default_factory=dict)
    by_path: dict[Path, SourceFile] = field(default_factory=dict)
    own_roots: set[str] = field(default_factory=set)
    _packages: dict[Path, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (self.root.is_dir() or self.root.is_file()):
            raise ConfigurationError(f"{self.root}: there is no such file or folder to audit")
        self.root = self.root.resolve()
        self.base = self.root if self.root.is_dir() else self.root.parent
        for path in sorted(self._paths()):
            relative = path.relative_to(self.base).as_posix()
            if not self.include_tests and self.root.is_dir() and is_test(relative):
                self.skipped_tests += 1
                continue
            self._add(path, relative)

    # ---- files -------------------------------------------------------------------

    def _paths(self) -> Iterator[Path]:
        if self.root.is_file():
            yield self.root
            return
        for folder, folders, names in os.walk(self.root):
            folders[:] = sorted(
                f
                for f in folders
                if not f.startswith(".")
                and f not in _SKIPPED_FOLDERS
                and not f.endswith(".egg-info")
                and not (Path(folder, f, "pyvenv.cfg").exists())
            )
            for name in names:
                if name.endswith(".py"):
                    yield Path(folder, name)

    def _add(self, path: Path, relative: str) -> None:
        names = [path.stem] if path.stem != "__init__" else []
        folder = path.parent
        while self._is_package(folder) and folder != folder.parent:
            names.insert(0, folder.name)
            folder = folder.parent
        module = ".".join(names) or path.parent.name
        file = SourceFile(path, relative, module, path.name == "__init__.py")
        self.files.append(file)
        self.by_path[path] = file
        in_package = "." in module or file.is_package
        top = module.partition(".")[0]
        if in_package and self._owns(top, folder):
            self.own_roots.add(top)
            self.by_module.setdefault(module, file)
        # Folders without __init__.py (namespace packages, scripts) go by their path, too.
        if in_package and not (folder != self.base and self.base in folder.parents):
            return
        parts = relative[: -len(".py")].split("/")
        if parts[-1] == "__init__":
            parts.pop()
        if len(parts) > 1 and parts[0] in ("src", "python", "lib"):
            parts = parts[1:]
        dotted = ".".join(parts)
        if parts and dotted != module and all(p.isidentifier() for p in parts):
            if parts[0] in WELL_KNOWN or parts[0] in self.packages:
                return
            self.by_module.setdefault(dotted, file)
            if len(parts) > 1:
                self.own_roots.add(parts[0])
            if not in_package:
                file.module = dotted

    def _owns(self, top: str, folder: Path) -> bool:
        """Whether a top-level name is the project's, and not a checkout of a foreign package."""
        if top in self.packages:
            return False
        if top not in WELL_KNOWN:
            return True
        inside = self.base == folder / top or (folder / top) in self.base.parents
        return inside or folder in (self.base, self.base / "src", self.base / "python")

    def _is_package(self, folder: Path) -> bool:
        known = self._packages.get(folder)
        if known is None:
            known = self._packages[folder] = (folder / "__init__.py").is_file()
        return known

    # ---- names -------------------------------------------------------------------

    def find(self, module: str, importer: SourceFile | None = None) -> SourceFile | None:
        """The project's file behind an absolute module name, None for a foreign one."""
        found = self.by_module.get(module)
        if found is not None or importer is None:
            return found
        top = module.partition(".")[0]
        if top in self.packages or top in WELL_KNOWN or self._is_package(importer.path.parent):
            return None
        # A script imports what lies beside it.
        base = importer.path.parent.joinpath(*module.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            file = self.by_path.get(path)
            if file is not None and file is not importer:
                self.by_module.setdefault(file.module, file)
                return file
        return None

    def is_own(self, module: str, importer: SourceFile | None = None) -> bool:
        """Whether a module name belongs to the project (even where the file is missing)."""
        top = module.partition(".")[0]
        return top in self.own_roots or self.find(module, importer) is not None

    # ---- what to look at ---------------------------------------------------------

    def candidates(self) -> list[SourceFile]:
        """Files that may patch something by themselves."""
        return [f for f in self.files if self._text(f) and _TRIGGER.search(f.data or b"")]

    def text(self, file: SourceFile) -> bytes:
        """The bytes of a file, empty where it cannot be read."""
        self._text(file)
        return file.data or b""

    def mentioning(self, names: Iterable[str], files: list[SourceFile]) -> list[SourceFile]:
        """The files in which one of the names is called or handed on, as far as text can say."""
        wanted = {n.encode() for n in names}
        if not wanted:
            return []
        return [f for f in files if self._text(f) and not wanted.isdisjoint(f.words())]

    def _text(self, file: SourceFile) -> bool:
        if file.data is None:
            try:
                status = file.path.stat()
                if not stat.S_ISREG(status.st_mode):  # reading a pipe would never end
                    self.unreadable.append(Unreadable(file.relative, "it is no regular file"))
                    file.data = b""
                elif status.st_size > MAX_FILE_BYTES:
                    self.unreadable.append(Unreadable(file.relative, "it is too large"))
                    file.data = b""
                else:
                    file.data = file.path.read_bytes()
            except OSError as error:
                self.unreadable.append(Unreadable(file.relative, error.strerror or str(error)))
                file.data = b""
        return bool(file.data)

    def parse(self, file: SourceFile) -> tuple[ast.Module, str] | None:
        """The syntax tree and text of a file; what cannot be read is noted."""
        self._text(file)
        data = file.data or b""
        tree = parse_text(data)
        if isinstance(tree, ast.Module):
            return tree, data.decode("utf-8", "replace")
        self.note_unreadable(file, *tree)
        return None

    def note_unreadable(self, file: SourceFile, problem: str, line: int = 0) -> None:
        """Remember that a file could not be read."""
        entry = Unreadable(file.relative, problem, line)
        if entry not in self.unreadable:
            self.unreadable.append(entry)


def parse_text(data: bytes) -> ast.Module | tuple[str, int]:
    """The syntax tree, or what is wrong and where."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(data)
    except SyntaxError as error:
        return f"no Python: {error.msg}", error.lineno or 0
    except (ValueError, RecursionError, MemoryError) as error:
        return str(error) or type(error).__name__, 0


def is_test(relative: str) -> bool:
    """Whether a path inside the project is a test."""
    *folders, name = relative.split("/")
    return any(f in _TEST_FOLDERS for f in folders) or _TEST_FILE.match(name) is not None
