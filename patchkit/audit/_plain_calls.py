"""Calls of builtins and methods whose results are known: sequences, dicts, strings."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from patchkit.audit._handlers import Args, Handler, Kwargs
from patchkit.audit._values import (
    UNKNOWN,
    Const,
    Map,
    Ref,
    Result,
    Seq,
    Source,
    Value,
    Version,
    VersionPart,
    first_of,
)

if TYPE_CHECKING:
    from patchkit.audit._expressions import Frame
    from patchkit.audit._interpreter import Interpreter


class PlainCalls:
    """Models calls that write nothing."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self.table: dict[str, Handler] = {
            "builtins.globals": lambda a, k, f, n: UNKNOWN,
            "operator.attrgetter": lambda a, k, f, n: Result(Ref("operator", ("attrgetter",)), a),
            "builtins.str": self.first,
            "builtins.tuple": self.first_or_empty,
            "builtins.list": self.first_or_empty,
            "builtins.sorted": self.first,
            "builtins.reversed": self.reversed,
            "builtins.set": self.first_or_empty,
            "builtins.frozenset": self.first_or_empty,
            "builtins.dict": self.make_dict,
            "builtins.zip": self.zip_of,
            "builtins.enumerate": self.enumerate,
            "builtins.map": self.map_over,
            "builtins.iter": self.first,
            "builtins.next": self.next_of,
            "builtins.int": self.first,
            "builtins.float": self.first,
            "textwrap.dedent": self.first,
            "inspect.cleandoc": self.first,
            "typing.cast": lambda a, k, f, n: a[1] if len(a) > 1 else UNKNOWN,
            "copy.copy": self.copy,
            "copy.deepcopy": self.copy,
            "inspect.unwrap": self.first,
            "types.SimpleNamespace": lambda a, k, f, n: UNKNOWN,
        }  # fmt: skip

    def first(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        return args[0] if args else UNKNOWN

    def first_or_empty(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if not args:
            return Seq(())
        if isinstance(args[0], Map):
            return Seq(tuple(k for k, _ in args[0].items))
        return self.copy(args, kwargs, frame, node)

    def reversed(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        return Seq(args[0].items[::-1]) if args and isinstance(args[0], Seq) else UNKNOWN

    def copy(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        # A copy of a foreign container is nobody else's.
        if args and first_of(args[0], Ref):
            return UNKNOWN
        return self.first(args, kwargs, frame, node)

    def next_of(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if args and isinstance(args[0], Seq) and args[0].items:
            return args[0].items[0]
        return UNKNOWN

    def make_dict(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        items = tuple((Const(k), v) for k, v in kwargs.items())
        if not args:
            return Map(items)
        if isinstance(args[0], Map):
            return Map(args[0].items + items)
        if isinstance(args[0], Seq) and all(
            isinstance(i, Seq) and len(i.items) == 2 for i in args[0].items
        ):
            pairs = tuple((i.items[0], i.items[1]) for i in args[0].items if isinstance(i, Seq))
            return Map(pairs + items)
        return UNKNOWN

    def zip_of(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if args and all(isinstance(a, Seq) for a in args):
            rows = zip(*(a.items for a in args), strict=False)  # type: ignore[union-attr]
            return Seq(tuple(Seq(row) for row in rows))
        return UNKNOWN

    def enumerate(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if args and isinstance(args[0], Seq):
            return Seq(tuple(Seq((Const(i), v)) for i, v in enumerate(args[0].items)))
        return UNKNOWN

    def map_over(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if len(args) < 2:
            return UNKNOWN
        if isinstance(args[1], (VersionPart, Version)):
            return args[1]
        if isinstance(args[1], Seq):
            return Seq(
                tuple(
                    self._interpreter.calls.apply(args[0], (item,), {}, frame, node)
                    for item in args[1].items
                )
            )
        return UNKNOWN

    def map_method(self, base: Map, name: str, args: Args) -> Value | None:
        if name == "items":
            return Seq(tuple(Seq(pair) for pair in base.items))
        if name == "values":
            return Seq(tuple(v for _, v in base.items))
        if name in ("keys", "copy"):
            return base if name == "copy" else Seq(tuple(k for k, _ in base.items))
        if name == "get" and args:
            for key, value in base.items:
                if key == args[0]:
                    return value
        return None

    def string_method(self, text: str, name: str, args: Args) -> Value | None:
        values = [a.value for a in args if isinstance(a, Const)]
        if len(values) != len(args):
            if name == "join" and args and isinstance(args[0], Seq):
                parts = [i.value for i in args[0].items if isinstance(i, Const)]
                if len(parts) == len(args[0].items) and all(isinstance(p, str) for p in parts):
                    return Const(text.join(parts))  # type: ignore[arg-type]
            if name == "join" and args:
                # `"".join(lines)` of a text that was split into lines
                found = first_of(args[0], Source)
                if found is not None:
                    return found
            return None
        method = {
            "format", "replace", "strip", "lstrip", "rstrip", "lower", "upper", "removeprefix",
            "removesuffix", "split", "rsplit", "partition", "rpartition", "title", "capitalize",
        }  # fmt: skip
        if name not in method:
            return None
        try:
            result = getattr(text, name)(*values)
        except (TypeError, ValueError, IndexError, KeyError):
            return UNKNOWN
        if isinstance(result, str):
            return Const(result)
        return Seq(tuple(Const(r) for r in result))
