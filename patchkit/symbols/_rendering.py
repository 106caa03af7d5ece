"""Expressions as source text, written the same way on every interpreter.

``ast.unparse`` chooses quotes, parentheses and spaces differently from version to
version; what stands in a manifest must not depend on who built it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from patchkit.symbols._normalform import digest, merged_parts

_BINARY = {
    ast.Add: ("+", 12), ast.Sub: ("-", 12), ast.Mult: ("*", 13), ast.MatMult: ("@", 13),
    ast.Div: ("/", 13), ast.Mod: ("%", 13), ast.FloorDiv: ("//", 13), ast.Pow: ("**", 15),
    ast.LShift: ("<<", 11), ast.RShift: (">>", 11), ast.BitOr: ("|", 8), ast.BitXor: ("^", 9),
    ast.BitAnd: ("&", 10),
}  # fmt: skip
_UNARY = {ast.UAdd: "+", ast.USub: "-", ast.Invert: "~", ast.Not: "not "}
_COMPARE = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip
_ATOM = 20


def quoted(text: str) -> str:
    """A string literal; only ASCII is taken as printable, so that all interpreters agree."""
    escaped = ascii(text)
    if escaped[0] == "'" and '"' not in text:
        inner = escaped[1:-1].replace("\\'", "'")
        return f'"{inner}"'
    return escaped


def render(node: ast.AST | None) -> str:
    """One expression as source text."""
    if node is None:
        return ""
    return _render(node, 0)


def _render(node: Any, outer: int) -> str:
    """`outer` is how strongly the surroundings bind: weaker expressions get parentheses."""
    handler = _HANDLERS.get(node.__class__)
    if handler is None:
        # Syntax of a newer Python: unreadable, but two different ones must not look equal.
        return f"<{node.__class__.__name__} {digest([node])}>"
    text, strength = handler(node)
    return f"({text})" if strength < outer else text


def _constant(node: ast.Constant) -> tuple[str, int]:
    value = node.value
    if isinstance(value, str):
        return quoted(value), _ATOM
    if value is Ellipsis:
        return "...", _ATOM
    if isinstance(value, float) and repr(value) == "inf":  # `1e400`, not a name `inf`
        return "1e999", _ATOM
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 4096:
        return hex(value), _ATOM
    return repr(value), _ATOM


def _attribute(node: ast.Attribute) -> tuple[str, int]:
    base = _render(node.value, 17)
    if isinstance(node.value, ast.Constant) and isinstance(node.value.value, int):
        base = f"({base})"
    return f"{base}.{node.attr}", 18


def _commas(nodes: list) -> str:
    return ", ".join(_render(n, 1) for n in nodes)


def _tuple(node: ast.Tuple) -> tuple[str, int]:
    if len(node.elts) == 1:
        return f"({_render(node.elts[0], 1)},)", _ATOM
    return f"({_commas(node.elts)})", _ATOM


def _subscript(node: ast.Subscript) -> tuple[str, int]:
    index = node.slice
    if isinstance(index, ast.Tuple) and index.elts:
        inside = _commas(index.elts) + ("," if len(index.elts) == 1 else "")
    else:
        inside = _render(index, 1)
    return f"{_render(node.value, 17)}[{inside}]", 18


def _slice(node: ast.Slice) -> tuple[str, int]:
    text = f"{render(node.lower)}:{render(node.upper)}"
    return text + (f":{render(node.step)}" if node.step else ""), _ATOM


def _call(node: ast.Call) -> tuple[str, int]:
    pieces = [_render(a, 1) for a in node.args]
    for keyword in node.keywords:
        value = _render(keyword.value, 1)
        pieces.append(f"{keyword.arg}={value}" if keyword.arg else f"**{value}")
    return f"{_render(node.func, 17)}({', '.join(pieces)})", 18


def _binary(node: ast.BinOp) -> tuple[str, int]:
    sign, strength = _BINARY[node.op.__class__]
    # A chain `a + b + c …` is flattened first: it may be longer than the stack is deep.
    if sign == "**":
        return f"{_render(node.left, strength + 1)} ** {_render(node.right, strength)}", strength
    pieces = []
    left: ast.AST = node
    while isinstance(left, ast.BinOp) and _BINARY[left.op.__class__][1] == strength:
        pieces.append(f" {_BINARY[left.op.__class__][0]} {_render(left.right, strength + 1)}")
        left = left.left
    return _render(left, strength) + "".join(reversed(pieces)), strength


def _unary(node: ast.UnaryOp) -> tuple[str, int]:
    strength = 6 if isinstance(node.op, ast.Not) else 14
    return _UNARY[node.op.__class__] + _render(node.operand, strength), strength


def _boolean(node: ast.BoolOp) -> tuple[str, int]:
    word, strength = (" and ", 5) if isinstance(node.op, ast.And) else (" or ", 4)
    return word.join(_render(v, strength + 1) for v in node.values), strength


def _compare(node: ast.Compare) -> tuple[str, int]:
    text = _render(node.left, 8)
    for op, right in zip(node.ops, node.comparators, strict=True):
        text += f" {_COMPARE[op.__class__]} {_render(right, 8)}"
    return text, 7


def _lambda(node: ast.Lambda) -> tuple[str, int]:
    head = _arguments(node.args)
    return f"lambda{' ' if head else ''}{head}: {_render(node.body, 1)}", 2


def _arguments(args: ast.arguments) -> str:
    pieces: list[str] = []
    positional = [*args.posonlyargs, *args.args]
    first_default = len(positional) - len(args.defaults)
    for index, arg in enumerate(positional):
        text = arg.arg
        if index >= first_default:
            text += f"={_render(args.defaults[index - first_default], 1)}"
        pieces.append(text)
        if args.posonlyargs and index == len(args.posonlyargs) - 1:
            pieces.append("/")
    if args.vararg:
        pieces.append(f"*{args.vararg.arg}")
    elif args.kwonlyargs:
        pieces.append("*")
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        pieces.append(arg.arg + (f"={_render(default, 1)}" if default is not None else ""))
    if args.kwarg:
        pieces.append(f"**{args.kwarg.arg}")
    return ", ".join(pieces)


def _conditional(node: ast.IfExp) -> tuple[str, int]:
    body, test, other = _render(node.body, 4), _render(node.test, 4), _render(node.orelse, 3)
    return f"{body} if {test} else {other}", 3


def _dict(node: ast.Dict) -> tuple[str, int]:
    pieces = [
        f"{_render(k, 1)}: {_render(v, 1)}" if k is not None else f"**{_render(v, 8)}"
        for k, v in zip(node.keys, node.values, strict=True)
    ]
    return "{" + ", ".join(pieces) + "}", _ATOM


def _generators(generators: list[ast.comprehension]) -> str:
    text = ""
    for g in generators:
        text += f" {'async ' if g.is_async else ''}for {_target(g.target)} in {_render(g.iter, 4)}"
        text += "".join(f" if {_render(test, 4)}" for test in g.ifs)
    return text


def _target(node: ast.expr) -> str:
    return _commas(node.elts) if isinstance(node, ast.Tuple) and node.elts else _render(node, 1)


def _comprehension(opening: str, closing: str) -> Callable[[Any], tuple[str, int]]:
    def handler(node: Any) -> tuple[str, int]:
        head = _render(node.elt, 1)
        return f"{opening}{head}{_generators(node.generators)}{closing}", _ATOM

    return handler


def _dict_comprehension(node: ast.DictComp) -> tuple[str, int]:
    head = f"{_render(node.key, 1)}: {_render(node.value, 1)}"
    return f"{{{head}{_generators(node.generators)}}}", _ATOM


def _fstring(node: ast.JoinedStr) -> tuple[str, int]:
    return 'f"' + _fstring_parts(node) + '"', _ATOM


def _fstring_parts(node: ast.JoinedStr) -> str:
    text = ""
    for part in merged_parts(node.values):
        if isinstance(part, str):
            inner = ascii(part)[1:-1].replace("\\'", "'").replace('"', '\\"')
            text += inner.replace("{", "{{").replace("}", "}}")
        elif isinstance(part, ast.FormattedValue):
            text += "{" + _render(part.value, 4)
            if part.conversion != -1:
                text += f"!{chr(part.conversion)}"
            if isinstance(part.format_spec, ast.JoinedStr):
                text += ":" + _fstring_parts(part.format_spec)
            text += "}"
    return text


_HANDLERS: dict[type, Callable[[Any], tuple[str, int]]] = {
    ast.Name: lambda n: (n.id, _ATOM),
    ast.Constant: _constant,
    ast.Attribute: _attribute,
    ast.Tuple: _tuple,
    ast.List: lambda n: (f"[{_commas(n.elts)}]", _ATOM),
    ast.Set: lambda n: ("{" + _commas(n.elts) + "}", _ATOM),
    ast.Dict: _dict,
    ast.Subscript: _subscript,
    ast.Slice: _slice,
    ast.Call: _call,
    ast.BinOp: _binary,
    ast.UnaryOp: _unary,
    ast.BoolOp: _boolean,
    ast.Compare: _compare,
    ast.Lambda: _lambda,
    ast.IfExp: _conditional,
    ast.Starred: lambda n: (f"*{_render(n.value, 8)}", 1),
    ast.NamedExpr: lambda n: (f"({n.target.id} := {_render(n.value, 1)})", _ATOM),
    ast.Await: lambda n: (f"await {_render(n.value, 17)}", 16),
    ast.Yield: lambda n: (f"(yield {render(n.value)})".replace(" )", ")"), _ATOM),
    ast.YieldFrom: lambda n: (f"(yield from {render(n.value)})", _ATOM),
    ast.ListComp: _comprehension("[", "]"),
    ast.SetComp: _comprehension("{", "}"),
    ast.GeneratorExp: _comprehension("(", ")"),
    ast.DictComp: _dict_comprehension,
    ast.JoinedStr: _fstring,
}
