"""What the modules and classes of some packages hold, by identity.

Imports nothing of patchkit: the probe of an inactive plugin runs this file, too.
Identities are numbers and no references: whoever kept the functions themselves would be
one of the holders that an installation finds and rewrites.
"""

from __future__ import annotations

import sys
from types import BuiltinFunctionType, FunctionType

_HELD = (FunctionType, BuiltinFunctionType, classmethod, staticmethod, property, type)

# (module or class, attribute) -> identity of the object and of the code behind it.
Snapshot = dict[tuple[str, str], tuple[int, int]]


def snapshot(packages: frozenset[str]) -> Snapshot:
    """Functions, descriptors and classes that live modules and their classes hold."""
    found: Snapshot = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in packages or module is None:
            continue
        for attribute, value in list(vars(module).items()):
            if not _counts(value):
                continue
            found[name, attribute] = _identity(value)
            if isinstance(value, type) and vars(value).get("__module__") == name:
                for member, held in list(vars(value).items()):
                    if _counts(held):
                        found[f"{name}:{value.__qualname__}", member] = _identity(held)
    return found


def changed(before: Snapshot, after: Snapshot) -> list[str]:
    """Places that hold something else now, or nothing any more."""
    return sorted(
        f"{place}.{name}"
        for (place, name), identity in before.items()
        if after.get((place, name)) != identity
    )


def _counts(value: object) -> bool:
    return isinstance(value, _HELD)


def _identity(value: object) -> tuple[int, int]:
    function = value
    if isinstance(value, (classmethod, staticmethod)):
        function = value.__func__
    elif isinstance(value, property):
        function = value.fget
    code = function.__code__ if type(function) is FunctionType else None
    return id(value), id(code)
