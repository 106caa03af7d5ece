"""How much an expression may be a module, a class or a container of others."""

from __future__ import annotations

import ast

from patchkit.audit._prescan.names import HARMLESS, HOLDER, MAYBE, Names
from patchkit.audit._prescan.syntax import last_of, root_of

# Methods that may give a module or a class …
GIVING = frozenset({
    "import_module", "resolve_name", "getmodule", "locate", "attrgetter", "Library", "get_class",
    "version", "parse", "Version",
})  # fmt: skip
# … an entry of a table …
_LOOKUPS = frozenset({"get", "pop", "setdefault"})
# … or a path or a text of an installed package, where files of it are in reach.
GIVING_SOURCE = frozenset({
    "find_spec", "read_text", "read", "join", "replace", "getsource", "files", "joinpath",
    "dirname", "resolve", "absolute", "split", "partition", "readlines", "sub", "open",
    "getfile", "getsourcefile", "with_name",
})  # fmt: skip
_MAKING = frozenset({
    "dict", "list", "set", "tuple", "len", "int", "str", "float", "bool", "sum", "max", "min",
    "sorted", "range", "isinstance", "deepcopy", "copy", "repr", "id", "abs", "round", "open",
    "super", "defaultdict", "hasattr", "callable", "issubclass", "hash", "print", "input",
})  # fmt: skip
_LITERALS = (
    ast.List, ast.Dict, ast.Set, ast.Tuple, ast.ListComp, ast.DictComp, ast.SetComp,
    ast.GeneratorExp,
)  # fmt: skip
PLAIN = (ast.Constant, ast.JoinedStr, ast.Compare, ast.UnaryOp)


def weight(value: ast.expr, names: Names) -> int:
    """The gravest thing that a value may be."""
    if isinstance(value, ast.Call):
        func = value.func
        if isinstance(func, ast.Attribute):
            return _weight_of_method(func, names)
        if isinstance(func, ast.Name):
            if func.id in _MAKING:
                giving = func.id == "open" and names.reads_source
                return MAYBE if giving else HOLDER
            # A class by its spelling: what it makes is an object.
            return HARMLESS if func.id.lstrip("_")[:1].isupper() else MAYBE
        return MAYBE
    if isinstance(value, _LITERALS):
        return HOLDER
    if isinstance(value, ast.BinOp):
        return MAYBE if names.reads_source else HARMLESS
    return HARMLESS if isinstance(value, PLAIN) else MAYBE


def _weight_of_method(func: ast.Attribute, names: Names) -> int:
    if func.attr in GIVING:
        return MAYBE
    root = root_of(func.value)
    if func.attr in _LOOKUPS:
        mine = root is None or root in names.receivers or root in names.parameters
        return HARMLESS if mine else MAYBE
    if func.attr in GIVING_SOURCE and names.reads_source:
        return MAYBE
    if func.attr in ("split", "partition") and "ersion" in last_of(func.value):
        return MAYBE
    # A method of the project's own may give anything.
    is_own_method = root in names.receivers and isinstance(func.value, ast.Name)
    return MAYBE if is_own_method else HARMLESS


def weight_of_items(iterated: ast.expr, names: Names) -> int:
    """The gravest thing that an item may be of what a loop goes over."""
    return HARMLESS if _has_harmless_items(iterated, names) else MAYBE


def _has_harmless_items(iterated: ast.expr, names: Names) -> bool:
    if isinstance(iterated, ast.Call):
        func = iterated.func
        if isinstance(func, ast.Attribute):
            if func.attr in ("items", "values", "keys", "copy"):
                root = root_of(func.value)
                if root in names.parameters or root in names.receivers:
                    return True
                return isinstance(func.value, ast.Call) and weight(func.value, names) == HARMLESS
            return True
        if isinstance(func, ast.Name) and func.id in ("range", "open"):
            return True
        return (
            isinstance(func, ast.Name)
            and func.id in ("enumerate", "zip")
            and all(_has_harmless_items(a, names) for a in iterated.args)
        )
    root = root_of(iterated)
    return root in names.receivers or (root is not None and root in names.parameters)
