"""A normal form of Python code that is equal on every interpreter.

``ast.dump`` and ``ast.unparse`` differ between Python versions for the same
source, so digests over them cannot be compared. The normal form is a flat list
of tokens: the type of each node, its non-empty fields, constants by type and
value. Docstrings, comments and layout are not in it, nor is what the position of
a node already says (load or store). Parts of f-strings are merged, because the
interpreters cut them at different places.

The list can be decoded without ambiguity (every list carries its length, every
string constant too), so two different programs never share one.

The walk keeps its own stack: source that nests deeper than the interpreter's
recursion limit is still read, and a loop is faster here than a visitor.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from zlib import crc32

DIGEST_BYTES = 16
SKETCH_SIZE = 24
_SKETCH_ITEM_BYTES = 3

# Fields in which a function or a class keeps what is not its body.
_SINGLETONS: dict[type, str] = {
    t: t.__name__
    for base in (ast.operator, ast.unaryop, ast.boolop, ast.cmpop)
    for t in base.__subclasses__()
}
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_LEFT_OUT = frozenset({"ctx", "type_comment", "kind", "type_ignores"})


class _Text(str):
    """A piece of an f-string that is a constant (kept apart from identifiers)."""

    __slots__ = ()


def _plan_fields() -> dict[type, tuple[str, tuple[str, ...]]]:
    plans = {}
    for value in vars(ast).values():
        if isinstance(value, type) and issubclass(value, ast.AST):
            fields = tuple(f for f in value._fields if f not in _LEFT_OUT)
            plans[value] = (value.__name__, fields)
    return plans


_FIELDS = _plan_fields()


def constant_token(value: object) -> str:
    """A constant by type and value.

    ``repr`` of a string depends on the interpreter's Unicode tables and ``repr``
    of a huge integer is refused by newer ones, so neither is used.
    """
    kind = value.__class__
    if kind is str:
        return f"s{len(value)}:{value}"  # type: ignore[arg-type]
    if value is None or value is True or value is False:
        return f"k{value}"
    if kind is int:
        return f"i{value:x}"
    if kind is bytes:
        return f"b{value.hex()}"  # type: ignore[attr-defined]
    if value is Ellipsis:
        return "k..."
    return f"{kind.__name__}{value!r}"


def merged_parts(values: Sequence[ast.AST]) -> list[ast.AST | str]:
    """The parts of an f-string, with neighbouring constants joined and empty ones dropped."""
    parts: list[ast.AST | str] = []
    for value in values:
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            text = value.value
            if not text:
                continue
            if parts and isinstance(parts[-1], str):
                parts[-1] = parts[-1] + text
            else:
                parts.append(text)
        elif isinstance(value, ast.JoinedStr):  # implicit concatenation, where kept apart
            for inner in merged_parts(value.values):
                if isinstance(inner, str) and parts and isinstance(parts[-1], str):
                    parts[-1] = parts[-1] + inner
                else:
                    parts.append(inner)
        else:
            parts.append(value)
    return parts


def is_docstring(statement: ast.AST) -> bool:
    return (
        statement.__class__ is ast.Expr
        and statement.value.__class__ is ast.Constant  # type: ignore[attr-defined]
        and statement.value.value.__class__ is str  # type: ignore[attr-defined]
    )


_PASS = ast.Pass()


def function_body(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements of a function without its docstring."""
    if body and is_docstring(body[0]):
        # A function that has nothing but a docstring does what `pass` does.
        return body[1:] or [_PASS]
    return body


def class_body(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements of a class without its docstring and those of its attributes."""
    for statement in body:
        if statement.__class__ is ast.Expr and is_docstring(statement):
            return [s for s in body if not is_docstring(s)] or [_PASS]
    return body


def tokens(nodes: Iterable[ast.AST]) -> list[str]:
    """The normal form of `nodes`, one after the other."""
    out: list[str] = []
    add = out.append
    stack: list = list(nodes)
    stack.reverse()
    pop = stack.pop
    push = stack.append
    extend = stack.extend
    fields_of = _FIELDS
    name_type, attribute_type, constant_type = ast.Name, ast.Attribute, ast.Constant
    call_type, expr_type, assign_type = ast.Call, ast.Expr, ast.Assign
    while stack:
        node = pop()
        kind = node.__class__
        if kind is name_type:
            add("n" + node.id)
        elif kind is attribute_type:
            add("." + node.attr)
            push(node.value)
        elif kind is constant_type:
            value = node.value
            add(f"s{len(value)}:{value}" if value.__class__ is str else constant_token(value))
        elif kind is list:
            add(f"[{len(node)}")
            extend(node)
        elif kind is str:
            add(node)
        elif kind is call_type:
            args, keywords = node.args, node.keywords
            add(f"({len(args)},{len(keywords)}")
            extend(keywords)
            extend(args)
            push(node.func)
        elif kind is expr_type:
            add("e")
            push(node.value)
        elif kind is assign_type:
            targets = node.targets
            add(f"={len(targets)}")
            push(node.value)
            extend(targets)
        elif kind in _SINGLETONS:
            add(_SINGLETONS[kind])
        elif kind is _Text:
            add(f"t{len(node)}:{node}")
        elif kind is int:  # FormattedValue.conversion, AnnAssign.simple, ImportFrom.level
            add(f"i{node}")
        elif node is None:  # a gap inside a list, as in `{**a}`
            add("_")
        elif kind is ast.JoinedStr:
            add("JoinedStr")
            push([_Text(p) if isinstance(p, str) else p for p in merged_parts(node.values)])
        else:
            plan = fields_of.get(kind)
            if plan is None:  # the value in `case True`
                add(constant_token(node))
                continue
            tag, fields = plan
            add(tag)
            scope = kind in _SCOPES
            for field in fields:
                value = getattr(node, field, None)
                if value is None or (value.__class__ is list and not value):
                    continue
                if scope and field == "body":
                    trim = class_body if kind is ast.ClassDef else function_body
                    value = trim(value)
                add(field)
                push(value)
            add(";")
    return out


def digest_of(parts: Iterable[str]) -> str:
    """The digest of a list of tokens."""
    text = "\x00".join(parts)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).hexdigest()


def digest(nodes: Iterable[ast.AST]) -> str:
    """The digest of the normal form of `nodes`."""
    return digest_of(tokens(nodes))


_hashes: dict[str, int] = {}


def sketch_of(parts: Iterable[str]) -> str:
    """A short fingerprint of the set of tokens; :func:`similarity` compares two.

    The smallest hashes of a set are a uniform sample of it, and the samples of two
    sets overlap as the sets do (a bottom-k sketch).
    """
    known = _hashes
    values = set()
    for part in set(parts):
        value = known.get(part)
        if value is None:
            value = known[part] = crc32(part.encode("utf-8", "surrogatepass")) >> 8
        values.add(value)
    smallest = sorted(values)[:SKETCH_SIZE]
    return b"".join(v.to_bytes(_SKETCH_ITEM_BYTES, "big") for v in smallest).hex()


def similarity(first: str, second: str) -> float:
    """How far the token sets behind two sketches overlap, from 0 to 1."""
    step = 2 * _SKETCH_ITEM_BYTES
    a = {first[i : i + step] for i in range(0, len(first), step)}
    b = {second[i : i + step] for i in range(0, len(second), step)}
    union = sorted(a | b)[: max(SKETCH_SIZE if len(a) + len(b) else 0, 1)]
    if not union:
        return 1.0
    return sum(1 for item in union if item in a and item in b) / len(union)
