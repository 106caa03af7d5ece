"""Looks at functions and at whole files, and what is remembered of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary

from patchkit.audit._prescan.collecting import collect
from patchkit.audit._prescan.effects import effects
from patchkit.audit._prescan.looks import FileLook, Import, Looked
from patchkit.audit._prescan.names import HARMLESS, MAYBE, Names
from patchkit.audit._prescan.syntax import Function, everything_in, outside_of_functions

# Without one of these no text of an installed file is in reach.
_READS_SOURCE = re.compile(
    rb"read_text|read_bytes|\.read\b|readlines|getsource|-packages|__file__|find_spec|__path__"
    rb"|importlib[._]resources|submodule_search|getfile"
)

_cache: WeakKeyDictionary[ast.AST, Looked] = WeakKeyDictionary()


def may_patch(
    node: ast.AST,
    helpers: frozenset[str],
    patching: frozenset[str],
    possible: Callable[[str], bool],
) -> bool:
    """Whether a function may patch.

    Args:
        node: The function.
        helpers: Functions that patch what they are given.
        patching: Functions that patch by themselves, whoever calls them.
        possible: Whether a name of the file may stand for something foreign.
    """
    looked = look(node)
    return (
        any(map(possible, looked.alone))
        or not patching.isdisjoint(looked.called)
        or any(name in helpers and possible(root) for name, root in looked.called_with)
    )


def look(node: ast.AST) -> Looked:
    """One look at a function, remembered; without its file, the names around may be anything."""
    known = _cache.get(node)
    if known is None:
        known = _cache[node] = _looked(everything_in(node), Names({}, reads_source=True))
    return known


def remember(tree: ast.Module, functions: Mapping[int, Looked]) -> None:
    """Take over looks that another process had at the same file."""
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            known = functions.get(node.lineno)
            if known is not None:
                _cache[node] = known
        elif isinstance(node, ast.stmt):
            for name in ("body", "orelse", "finalbody", "handlers", "cases"):
                todo += getattr(node, name, ())
        elif isinstance(node, (ast.ExceptHandler, ast.match_case)):
            todo += node.body


def look_at_file(tree: ast.Module, source: bytes) -> FileLook:
    """Look at a module's top and at each of its functions."""
    nodes, functions = outside_of_functions(tree)
    first = Names({}, reads_source=_READS_SOURCE.search(source) is not None)
    for function in functions:
        first.weights.setdefault(function.name, HARMLESS)
    every = [_looked(nodes, first)]
    looks: list[tuple[Function, Looked]] = []
    imported = list(first.imported)
    for function in functions:
        names = Names(first.weights, first.reads_source)
        found = _looked(everything_in(function), names)
        looks.append((function, found))
        every.append(found)
        imported += names.imported
    usual = [
        (f, found) for f, found in looks if not (f.name.startswith("__") and f.name.endswith("__"))
    ]
    imports: dict[str, set[Import]] = {}
    for name, origin in imported:
        imports.setdefault(name, set()).add(origin)
    return FileLook(
        alone=frozenset().union(*(found.alone for found in every)),
        helpers=frozenset(n for f, found in usual if found.when_called for n in _defined(f)),
        setters=frozenset(n for f, found in usual if found.setter for n in _defined(f)),
        passing=tuple((f.name, found.passed) for f, found in usual if found.passed),
        giving=tuple((f.name, found.gives) for f, found in usual if found.gives),
        called_with=frozenset().union(*(found.called_with for found in every)),
        called=frozenset().union(*(found.called for found in every)),
        functions={f.lineno: found for f, found in looks},
        imports={name: frozenset(origins) for name, origins in imports.items()},
        defined=frozenset(n for n, w in first.weights.items() if w != MAYBE),
    )


def _looked(nodes: list[ast.AST], names: Names) -> Looked:
    return effects(collect(nodes, names), names)


def _defined(function: Function) -> list[str]:
    """The name of a function, and those of the functions at the top of its body."""
    inner = [
        n.name for n in function.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    return [function.name, *inner]
