"""The first time over the nodes: what each name may stand for, and what may patch."""

from __future__ import annotations

import ast

from patchkit.audit._known import DOORS
from patchkit.audit._prescan.looks import Import
from patchkit.audit._prescan.names import HARMLESS, HOLDER, MAYBE, Names
from patchkit.audit._prescan.origins import foreign, origins
from patchkit.audit._prescan.syntax import copied_from, parameters, part_of
from patchkit.audit._prescan.weights import weight, weight_of_items

# Kinds of nodes that bind a name or may patch; most nodes are of none of them.
_NOTED = frozenset({
    ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.AnnAssign, ast.NamedExpr,
    ast.For, ast.AsyncFor, ast.comprehension, ast.withitem, ast.Import, ast.ImportFrom,
    ast.Global, ast.keyword, ast.Dict, ast.AugAssign, ast.Delete, ast.Return, ast.Yield,
})  # fmt: skip
_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.Tuple)


def collect(nodes: list[ast.AST], names: Names) -> list[ast.AST]:
    """Note what the names may stand for; the nodes that may patch, in their order."""
    triggers: list[ast.AST] = []
    for node in nodes:
        kind = node.__class__
        if kind is ast.Call:
            triggers.append(node)
        elif kind is ast.Assign:
            triggers.append(node)
            for target in node.targets:  # type: ignore[attr-defined]
                _bind(target, node.value, names)  # type: ignore[attr-defined]
        elif kind in _NOTED and _note(node, names):
            triggers.append(node)
    return triggers


def _note(node: ast.AST, names: Names) -> bool:
    """Note what a node binds; whether it may patch, too."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        own, receivers = parameters(node.args)
        names.parameters |= own
        names.receivers |= receivers
        if not isinstance(node, ast.Lambda):
            names.functions.add(node.name)
            names.weights.setdefault(node.name, HARMLESS)
        return False
    if isinstance(node, ast.ClassDef):
        names.weights.setdefault(node.name, HARMLESS)
        return False
    if isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
        if node.value is None:
            return False
        _bind(node.target, node.value, names)
        return True
    if isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        _bind_items(node.target, node.iter, names)
        return False
    if isinstance(node, ast.withitem):
        if node.optional_vars is not None:
            _bind(node.optional_vars, node.context_expr, names)
        return False
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        _import(node, names)
        return False
    if isinstance(node, ast.Global):
        for name in node.names:
            names.weights[name] = names.outside.get(name, MAYBE)
        return False
    if isinstance(node, ast.keyword):
        return node.arg in DOORS
    if isinstance(node, ast.Dict):
        return any(isinstance(k, ast.Constant) and k.value in DOORS for k in node.keys)
    return True


def _import(node: ast.Import | ast.ImportFrom, names: Names) -> None:
    for alias in node.names:
        local = alias.asname or alias.name
        if isinstance(node, ast.Import):
            origin: Import = (alias.name, 0, "")
            local = alias.asname or alias.name.partition(".")[0]
        else:
            origin = (node.module or "", node.level, alias.name)
        names.weights[local] = MAYBE
        names.imported.append((local, origin))


def _bind(target: ast.expr, value: ast.expr, names: Names) -> None:
    if isinstance(target, (ast.Tuple, ast.List)):
        parts = getattr(value, "elts", None)
        for index, element in enumerate(target.elts):
            whole = parts is not None and len(parts) == len(target.elts)
            _bind(element, parts[index] if whole else value, names)  # type: ignore[index]
    elif isinstance(target, ast.Name):
        found = weight(value, names)
        if copied_from(value) in names.parameters:
            names.copies.add(target.id)
        if found == HOLDER and isinstance(value, _DISPLAYS) and foreign(value, names):
            names.tables.add(target.id)
        _may_be(target.id, found, value, names)
        whole_of = part_of(value)
        if whole_of is not None:
            names.through.setdefault(target.id, set()).add(whole_of)


def _bind_items(target: ast.expr, iterated: ast.expr, names: Names) -> None:
    while (
        isinstance(iterated, ast.Call)
        and isinstance(iterated.func, ast.Name)
        and iterated.func.id in ("list", "tuple", "set", "sorted")
        and iterated.args
    ):
        iterated = iterated.args[0]  # the items are those of what is copied
    if isinstance(target, (ast.Tuple, ast.List)):
        for element in target.elts:
            _bind_items(element, iterated, names)
    elif isinstance(target, ast.Name):
        _may_be(target.id, weight_of_items(iterated, names), iterated, names)


def _may_be(name: str, found: int, value: ast.expr, names: Names) -> None:
    """A name may stand for this, beside all that it stood for before."""
    names.weights[name] = max(names.weights.get(name, 0), found)
    if found == MAYBE:
        sources = {r for r in origins(value, names) if r != name}
        names.derived.setdefault(name, set()).update(sources)
