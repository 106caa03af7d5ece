"""Texts of installed files and of functions: reading, replacing in them, writing back."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from patchkit.audit._handlers import Args, Kwargs
from patchkit.audit._values import (
    NONE,
    UNKNOWN,
    Const,
    Edit,
    FilePath,
    Handle,
    Inst,
    Ref,
    Source,
    Value,
    either,
    first_of,
    options,
)

if TYPE_CHECKING:
    from patchkit.audit._expressions import Frame
    from patchkit.audit._interpreter import Interpreter


_INSTALLED = re.compile(r"(?:site|dist)-packages/(.+)$")
_SAME_TEXT = frozenset({
    "strip", "rstrip", "lstrip", "expandtabs", "decode", "encode", "removeprefix",
    "removesuffix", "format",
})  # fmt: skip
_SAME_PATH = frozenset({
    "resolve", "absolute", "expanduser", "as_posix", "__str__", "__fspath__",
})  # fmt: skip


class SourceCalls:
    """Models of the calls by which a project rewrites installed source."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self.table: dict[str, Callable[[Args, Kwargs, Frame, ast.AST], Value]] = {
            "pathlib.Path": self._path,
            "pathlib.PurePath": self._path,
            "os.path.join": self._join,
            "os.path.dirname": self._dirname,
            "os.path.abspath": self._same,
            "os.path.realpath": self._same,
            "os.path.normpath": self._same,
            "os.fspath": self._same,
            "importlib.resources.files": self._files,
            "importlib_resources.files": self._files,
            "inspect.getfile": self._file_of,
            "inspect.getsourcefile": self._file_of,
            "inspect.getsource": self._source_of,
            "builtins.open": self._open,
            "io.open": self._open,
            "codecs.open": self._open,
            "builtins.compile": lambda a, k, f, n: a[0] if a else UNKNOWN,
            "ast.parse": lambda a, k, f, n: a[0] if a else UNKNOWN,
            "re.sub": self._sub,
            "re.compile": lambda a, k, f, n: Inst(Ref("re", ("Pattern",)), a) if a else UNKNOWN,
            "shutil.copy": self._copied,
            "shutil.copyfile": self._copied,
            "shutil.copy2": self._copied,
        }
        self._mentioned: dict[FilePath | Ref, list[Edit]] = {}

    # ---- paths -------------------------------------------------------------------

    def _path(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if not args:
            return UNKNOWN
        return either([(self._join_values(v, args[1:]), guards) for v, guards in options(args[0])])

    def _join(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        return self._path(args, kwargs, frame, node)

    @staticmethod
    def _join_values(first: Value, rest: Args) -> Value:
        if isinstance(first, Const) and isinstance(first.value, str):
            found = _INSTALLED.search(first.value)
            if found is None:
                if all(isinstance(r, Const) for r in rest):
                    return Const("/".join([first.value, *(str(r.value) for r in rest)]))  # type: ignore[union-attr]
                return UNKNOWN
            package, *parts = found.group(1).split("/")
            first = FilePath(package, tuple(parts))
        if not isinstance(first, FilePath):
            return UNKNOWN
        for piece in rest:
            if not isinstance(piece, Const) or not isinstance(piece.value, str):
                return UNKNOWN
            first = first.join(piece.value)
        return first

    def _dirname(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        path = first_of(args[0], FilePath) if args else None
        return path.parent() if isinstance(path, FilePath) else UNKNOWN

    def _same(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        return args[0] if args else UNKNOWN

    def _files(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if args and isinstance(args[0], Const) and isinstance(args[0].value, str):
            package, *parts = args[0].value.split(".")
            return FilePath(package, tuple(parts))
        if args and isinstance(args[0], Ref):
            package, *parts = args[0].dotted.split(".")
            return FilePath(package, tuple(parts))
        return UNKNOWN

    def _file_of(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if not args or not isinstance(args[0], Ref):
            return UNKNOWN
        package, *parts = args[0].dotted.split(".")
        # A class or function stands in its module's file; names in capitals are no modules.
        while parts and parts[-1][:1].isupper():
            parts.pop()
        return FilePath(package, (*parts, "__init__.py"))

    # ---- texts -------------------------------------------------------------------

    def _source_of(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        found = first_of(args[0], Ref) if args else None
        return Source(found) if isinstance(found, Ref) else UNKNOWN

    def _open(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        path = first_of(args[0], FilePath) if args else None
        if not isinstance(path, FilePath):
            if args and isinstance(args[0], Const):
                path = self._join_values(args[0], ())
            if not isinstance(path, FilePath):
                return UNKNOWN
        mode = args[1] if len(args) > 1 else kwargs.get("mode", Const("r"))
        text = str(mode.value) if isinstance(mode, Const) else "r"
        return Handle(path, any(c in text for c in "wax+"))

    def _sub(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if len(args) < 3:
            return UNKNOWN
        pattern, new, text = args[:3]
        return self._edited(text, pattern, new, node, regex=True)

    def _edited(
        self, text: Value, anchor: Value, new: Value, node: ast.AST, *, regex: bool
    ) -> Value:
        source = first_of(text, Source)
        if not isinstance(source, Source):
            return UNKNOWN
        if not isinstance(anchor, Const) or not isinstance(anchor.value, str):
            return Source(source.origin, source.edits, source.lines)
        replacement = new.value if isinstance(new, Const) and isinstance(new.value, str) else None
        edit = Edit(anchor.value, replacement, regex, getattr(node, "lineno", 0))
        return Source(source.origin, (*source.edits, edit), source.lines)

    def method(
        self, base: Value, name: str, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST
    ) -> Value | None:
        """A method call on a path, a file or a text; None where it is none of them."""
        if isinstance(base, FilePath):
            return self._path_method(base, name, args, kwargs, frame, node)
        if isinstance(base, Handle):
            return self._handle_method(base, name, args, frame, node)
        if isinstance(base, Source):
            return self._text_method(base, name, args, node)
        if isinstance(base, Inst) and base.cls == Ref("re", ("Pattern",)):
            if name == "sub" and len(args) > 1 and base.args:
                return self._edited(args[1], base.args[0], args[0], node, regex=True)
            if name in ("search", "match", "findall") and args:
                self._mention(args[0], base.args[0], node, regex=True)
                return UNKNOWN
        return None

    def _path_method(
        self, path: FilePath, name: str, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST
    ) -> Value | None:
        if name in _SAME_PATH:
            return path
        if name in ("joinpath", "__truediv__"):
            return self._join_values(path, args)
        if name in ("with_name", "with_suffix"):
            return UNKNOWN
        if name in ("read_text", "read_bytes"):
            return Source(path)
        if name in ("write_text", "write_bytes") and args:
            self._written(path, args[0], frame, node)
            return NONE
        if name == "open":
            return self._open((path, *args), kwargs, frame, node)
        if name in ("exists", "is_file", "is_dir"):
            return UNKNOWN
        return None

    def _handle_method(
        self, handle: Handle, name: str, args: Args, frame: Frame, node: ast.AST
    ) -> Value | None:
        if name == "read":
            return Source(handle.path)
        if name == "readlines":
            return Source(handle.path, lines=True)
        if name in ("write", "writelines") and args:
            self._written(handle.path, args[0], frame, node)
            return NONE
        return NONE

    def _text_method(self, text: Source, name: str, args: Args, node: ast.AST) -> Value | None:
        if name == "replace" and len(args) > 1:
            return self._edited(text, args[0], args[1], node, regex=False)
        if name in _SAME_TEXT:
            return text
        if name in ("split", "splitlines", "partition", "rpartition", "rsplit"):
            if args:
                self._mention(text, args[0], node)
            return Source(text.origin, text.edits, lines=True)
        if name in ("find", "index", "rfind", "rindex", "count", "startswith") and args:
            self._mention(text, args[0], node)
            return UNKNOWN
        return UNKNOWN

    def _mention(self, text: Value, anchor: Value, node: ast.AST, *, regex: bool = False) -> None:
        source = first_of(text, Source)
        if (
            isinstance(source, Source)
            and isinstance(anchor, Const)
            and isinstance(anchor.value, str)
            and len(anchor.value.strip()) > 3
        ):
            edit = Edit(anchor.value, None, regex, getattr(node, "lineno", 0))
            found = self._mentioned.setdefault(source.origin, [])
            if edit not in found:
                found.append(edit)

    # ---- writing -------------------------------------------------------------------

    def _written(self, path: FilePath, text: Value, frame: Frame, node: ast.AST) -> None:
        """Text goes into an installed file."""
        if not path.parts or not path.parts[-1].endswith(".py"):
            return
        source = _most_edited(text)
        edits: tuple[Edit, ...] = ()
        if isinstance(source, Source):
            edits = source.edits
            if not edits and source.origin == path and not source.lines:
                return  # written back as it was
        if not edits:
            edits = tuple(self._mentioned.get(path, ()))
        self._interpreter.writes.emit(
            frame, node, "source rewriting", "rewrite", path, UNKNOWN, edits=edits, must_exist=True
        )

    def executed(self, code: Value, frame: Frame, node: ast.AST) -> bool:
        """Edited source of a function or module is executed; whether that is what happens."""
        source = _most_edited(code)
        if source is None:
            return False
        if source.edits:
            self._interpreter.writes.emit(
                frame, node, "source rewriting", "rewrite", source.origin, UNKNOWN,
                edits=source.edits, must_exist=True,
            )  # fmt: skip
        return True

    def _copied(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        """A file of the project's replaces an installed one."""
        target = args[1] if len(args) > 1 else kwargs.get("dst", UNKNOWN)
        path = first_of(target, FilePath)
        origin = first_of(args[0], FilePath) if args else None
        if isinstance(path, FilePath) and origin is None:
            self._written(path, UNKNOWN, frame, node)
        return UNKNOWN

    @staticmethod
    def diff_anchors(text: Value) -> tuple[Edit, ...]:
        """The lines that a unified diff wants to find."""
        if not isinstance(text, Const) or not isinstance(text.value, str):
            return ()
        lines = [
            line[1:].strip()
            for line in text.value.splitlines()
            if line.startswith("-") and not line.startswith("---")
        ]
        return tuple(Edit(line) for line in lines if line)


def _most_edited(text: Value) -> Source | None:
    found = [v for v, _ in options(text) if isinstance(v, Source)]
    return max(found, key=lambda s: len(s.edits), default=None)


__all__ = ["SourceCalls"]
