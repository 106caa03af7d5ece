"""The names and calls on which it depends what an expression is, and whether it matters."""

from __future__ import annotations

import ast
import re

from patchkit.audit._prescan.looks import GIVEN, PASSED, RETURNED
from patchkit.audit._prescan.names import HARMLESS, HOLDER, MAYBE, Names
from patchkit.audit._prescan.syntax import innermost, root_of
from patchkit.audit._prescan.weights import GIVING, GIVING_SOURCE, PLAIN, weight

# Functions, called by their bare names, that give a module, a class or a path.
_GIVING_NAMES = frozenset({
    "getattr", "__import__", "vars", "type", "globals", "next", "iter", "cast", "wraps",
    "partial", "Path", "reversed", "sorted", "zip", "enumerate", "map", "filter", "chain",
    *GIVING, *GIVING_SOURCE,
})  # fmt: skip
# What a test of a version, or of a name's existence, looks like.
_VERSION_TEST = re.compile(r"ersion|VERSION|hasattr|\bparse\(|\b[vV]\d*\b|\bver\b")


def origins(value: ast.expr, names: Names) -> set[str]:
    """The names, or calls, on which it depends what a value is."""
    if isinstance(value, ast.Call):
        func = value.func
        if isinstance(func, ast.Name) and func.id not in _GIVING_NAMES:
            return _returned(func.id, value, names)
        if isinstance(func, ast.Attribute) and func.attr not in _GIVING_NAMES:
            if func.attr in ("items", "values", "keys", "get", "pop", "copy"):
                root = root_of(func.value)
                if root is None and isinstance(func.value, ast.Call):
                    return origins(func.value, names)
                return {""} if root is None else {root}
            return _returned(func.attr, value, names)
        return {""}
    if isinstance(value, (ast.Name, ast.Attribute, ast.Subscript)):
        root = root_of(value)
        if root is None:
            inner = innermost(value)
            return origins(inner, names) if isinstance(inner, ast.Call) else {""}
        return {root}
    if isinstance(value, ast.BoolOp):
        return set().union(*(origins(v, names) for v in value.values))
    if isinstance(value, ast.IfExp):
        return origins(value.body, names) | origins(value.orelse, names)
    if isinstance(value, (ast.Tuple, ast.List, ast.Set)):
        return set().union(*(origins(v, names) for v in value.elts))
    if isinstance(value, PLAIN):
        return set()
    return {""}


def _returned(name: str, call: ast.Call, names: Names) -> set[str]:
    """On what the result of a call of the project's own depends."""
    found = {RETURNED + name}
    todo = [*call.args, *(k.value for k in call.keywords)]
    for argument in todo:
        if isinstance(argument, (ast.List, ast.Tuple, ast.Set)):
            todo += argument.elts
        elif isinstance(argument, ast.Dict):
            todo += argument.values
        elif isinstance(argument, (ast.Name, ast.Attribute)):
            root = root_of(argument)
            if root is not None and root not in names.parameters and root not in names.receivers:
                found.add(f"{PASSED}{name}:{root}")
    return found


def foreign(node: ast.expr, names: Names) -> set[str]:
    """The names on which it depends whether an argument is something foreign."""
    if isinstance(node, ast.Constant):
        dotted = isinstance(node.value, str) and "." in node.value and " " not in node.value
        return {""} if dotted else set()
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return set().union(*(foreign(n, names) for n in node.elts))
    if isinstance(node, ast.Dict):
        return set().union(*(foreign(n, names) for n in node.values))
    if isinstance(node, ast.Starred):
        return foreign(node.value, names)
    if isinstance(node, (ast.Attribute, ast.Name, ast.Subscript)):
        root = root_of(node)
        if root is None:
            inner = innermost(node)
            return foreign(inner, names) if isinstance(inner, ast.Call) else {""}
        if root in names.receivers or root in names.parameters:
            return set()
        return names.roots(root) if names.standing(root) != HARMLESS else set()
    if isinstance(node, ast.Call):
        return origins(node, names) if weight(node, names) == MAYBE else set()
    if isinstance(node, ast.IfExp):
        return foreign(node.body, names) | foreign(node.orelse, names)
    if isinstance(node, ast.BoolOp):
        return set().union(*(foreign(n, names) for n in node.values))
    return {""} if isinstance(node, ast.JoinedStr) else set()


def given_back(node: ast.expr, names: Names) -> set[str]:
    """The functions on which it depends whether a returned value matters."""
    if isinstance(node, ast.Name):
        if node.id in names.functions:
            return {""}
        if node.id in names.parameters and node.id not in names.weights:
            return {GIVEN}
        if node.id in names.receivers or names.standing(node.id) == HARMLESS:
            return set()
        if names.standing(node.id) == HOLDER:
            if node.id in names.copies:
                return {GIVEN}
            return {""} if node.id in names.tables else set()
        return _functions_of(names.roots(node.id))
    if isinstance(node, (ast.Attribute, ast.Subscript)):
        root = root_of(node)
        if root is None:
            inner = innermost(node)
            return given_back(inner, names) if isinstance(inner, ast.Call) else {""}
        if root in names.receivers or root in names.parameters:
            return set()
        return {""} if names.standing(root) == MAYBE else set()
    if isinstance(node, (ast.Tuple, ast.List)):
        return set().union(*(given_back(n, names) for n in node.elts))
    if isinstance(node, ast.Dict):
        return set().union(*(given_back(n, names) for n in node.values))
    if isinstance(node, ast.Call):
        if weight(node, names) != MAYBE:
            return set()
        return _functions_of(origins(node, names))
    if isinstance(node, ast.IfExp):
        return given_back(node.body, names) | given_back(node.orelse, names)
    if isinstance(node, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
        return {""} if _VERSION_TEST.search(ast.unparse(node)) else set()
    if isinstance(node, ast.BinOp):
        return {""} if names.reads_source else set()
    return {""} if isinstance(node, ast.Lambda) else set()


def _functions_of(roots: set[str]) -> set[str]:
    """Roots as what a giving function depends on: other functions, or nothing."""
    return {
        r.removeprefix(RETURNED) if r.startswith(RETURNED) else ""
        for r in roots
        if not r.startswith(PASSED)
    }
