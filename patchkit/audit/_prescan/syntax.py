"""Going over syntax, and what its shape alone says: nothing here knows what a name stands for."""

from __future__ import annotations

import ast

Function = ast.FunctionDef | ast.AsyncFunctionDef

_QUIET = frozenset({
    "ctx", "annotation", "returns", "type_comment", "op", "ops", "type_params", "names", "name",
    "id", "attr", "arg", "module", "level", "lineno", "posonlyargs", "kwonlyargs", "vararg",
    "kwarg", "asname", "conversion", "simple", "is_async", "kind", "n", "s",
})  # fmt: skip
_LEAVES = frozenset({
    ast.Load, ast.Store, ast.Del, ast.Name, ast.Constant, ast.Pass, ast.Break, ast.Continue,
    ast.arg, ast.alias, str, int, bool, bytes, type(None),
})  # fmt: skip
# Kind of node -> the fields that are looked into.
_fields: dict[type, tuple[str, ...]] = {}


def outside_of_functions(tree: ast.Module) -> tuple[list[ast.AST], list[Function]]:
    """The nodes outside of all functions, and the outermost functions."""
    found: list[ast.AST] = []
    functions: list[Function] = []
    todo: list[ast.AST] = list(tree.body)
    index = 0
    while index < len(todo):
        node = todo[index]
        index += 1
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            functions.append(node)
            todo.extend(node.decorator_list)
            continue
        found.append(node)
        _children(node, todo)
    return found, functions


def everything_in(root: ast.AST) -> list[ast.AST]:
    """A node and everything in it."""
    found = [root]
    for node in found:
        _children(node, found)
    return found


def _children(node: ast.AST, into: list[ast.AST]) -> None:
    """Add what stands in a node; names, constants and annotations trigger nothing."""
    kind = node.__class__
    fields = _fields.get(kind)
    if fields is None:
        fields = _fields[kind] = tuple(f for f in kind._fields if f not in _QUIET)
    for name in fields:
        value = getattr(node, name, None)
        if value.__class__ is list:
            for inner in value:  # type: ignore[union-attr]
                if inner.__class__ not in _LEAVES:
                    into.append(inner)
        elif value.__class__ not in _LEAVES:
            into.append(value)  # type: ignore[arg-type]


def parameters(args: ast.arguments) -> tuple[set[str], set[str]]:
    """The names of a function's parameters, and of them ``self`` or ``cls``, which come first."""
    names = {a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)}
    for rest in (args.vararg, args.kwarg):
        if rest is not None:
            names.add(rest.arg)
    first = [*args.posonlyargs, *args.args][:1]
    receiver = {a.arg for a in first} & {"self", "cls"}
    return names - receiver, receiver


def innermost(node: ast.expr) -> ast.expr:
    """What attributes and items are taken of."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node


def root_of(node: ast.expr) -> str | None:
    """The name that a chain of attributes and items begins with."""
    inner = innermost(node)
    return inner.id if isinstance(inner, ast.Name) else None


def last_of(node: ast.expr) -> str:
    """The last name of a chain."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def copied_from(value: ast.expr) -> str | None:
    """The name of what ``dict(x)``, ``list(x)`` or ``{**x}`` copies."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        if value.func.id in ("dict", "list", "tuple", "sorted") and len(value.args) == 1:
            return root_of(value.args[0])
    elif isinstance(value, ast.Dict) and None in value.keys:
        return root_of(value.values[value.keys.index(None)])
    return None


def part_of(value: ast.expr) -> str | None:
    """The name whose class, or part, a value is: ``x``, ``x.Klass``, ``getattr(x, …)``."""
    if isinstance(value, ast.Call):
        if not isinstance(value.func, ast.Name) or value.func.id != "getattr":
            return None
        return root_of(value.args[0]) if value.args else None
    if isinstance(value, ast.Name):
        return value.id
    if isinstance(value, ast.Attribute) and value.attr.lstrip("_")[:1].isupper():
        return root_of(value)
    return None


def is_special(node: ast.expr) -> bool:
    """Whether something is reached through ``__class__``, ``__dict__``, ``type`` or ``vars``."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Attribute) and node.attr in ("__class__", "__dict__"):
            return True
        node = node.value
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and (node.func.id in ("type", "vars"))
    )
