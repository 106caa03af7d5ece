"""New objects for what is no function: classes, values, entries of registries."""

from __future__ import annotations

from typing import Any

from patchkit.engine import _detour as detour
from patchkit.engine import _inert as inert
from patchkit.engine import _shape as shape
from patchkit.engine._declare import Patch, Value
from patchkit.engine._fitting import FUNCTION_KINDS, Built, Pair, same_shape
from patchkit.engine._inert import MISSING
from patchkit.engine._switch import Switch
from patchkit.engine._targets import Target
from patchkit.engine.errors import violation
from patchkit.errors import Violation


def build_class(
    patch: Patch, target: Target, replacement: Any, switch: Switch | None, find: list[Violation]
) -> Built | None:
    if patch.action != "replace" or not inert.is_class(replacement) or switch is not None:
        find.append(
            violation(
                patch.symbol,
                "a class can only be replaced by a class, and not on the trainer side",
                expected='action "replace" with a class, on the rollout side',
                found=f'action "{patch.action}" with {inert.describe(replacement)}',
                remedy="patch the methods in place: that reaches every user of the class",
            )
        )
        return None
    try:
        told = shape.difference(shape.params(target.value), shape.params(replacement), bound=False)
    except (TypeError, ValueError):
        told = ""  # no introspectable constructor on one side
    if told:
        find.append(
            violation(
                patch.symbol,
                "its replacement has another constructor",
                expected=shape.show(shape.params(target.value)),
                found=f"{shape.show(shape.params(replacement))}: {told}",
                remedy="give the replacement exactly the target's constructor",
            )
        )
    note = "replaces a name: users that took the class elsewhere are rebound where possible"
    return Built(replacement, (Pair(target.value, replacement),), None, (note,))


def build_constant(
    patch: Patch, target: Target, replacement: Any, switch: Switch | None, find: list[Violation]
) -> Built | None:
    if switch is not None:
        find.append(
            violation(
                patch.symbol,
                "a value cannot be switched",
                expected='"replace" or "wrap" of a function on the trainer side',
                found="a value that every thread reads",
                remedy="patch the function that reads it",
            )
        )
        return None
    if target.kind in FUNCTION_KINDS or target.kind == "class":
        find.append(
            violation(
                patch.symbol,
                'action "value" does not fit',
                expected="a constant or an object that is no function",
                found=inert.describe(target.value),
                remedy='use "replace": it checks signature and kind',
            )
        )
        return None
    value = replacement.value if type(replacement) is Value else replacement
    notes = []
    if type(value) is not type(target.value):
        notes.append(f"changes the type: {inert.describe(target.value)} to {inert.describe(value)}")
    return Built(value, (Pair(target.value, value),), None, tuple(notes))


def build_entry(
    patch: Patch, target: Target, replacement: Any, switch: Switch | None, find: list[Violation]
) -> Built | None:
    registry = target.value
    if not all(hasattr(type(registry), n) for n in ("__getitem__", "__setitem__", "__delitem__")):
        find.append(
            violation(
                patch.symbol,
                "is no registry",
                expected="a mapping with entries that can be set and deleted",
                found=inert.describe(registry),
                remedy="name the mapping behind the registry, and give its own way in as `door`",
            )
        )
        return None
    try:
        old = registry[patch.key]
    except KeyError:
        old = MISSING
    new = inert.function_of(replacement)
    theirs = inert.function_of(old)
    if new is None:
        if switch is not None and old is not MISSING:
            return build_constant(patch, target, replacement, switch, find)
        return Built(replacement, (), None)
    if theirs is None:  # nothing to be mistaken for, and nothing to switch to
        copy = shape.twin(new)
        return Built(copy, (), copy)
    same_shape(patch, target, theirs, new, switch, find)
    if any(v.subject == patch.symbol for v in find):
        return None
    exact = shape.dressed(new, theirs)
    installed = exact
    if switch is not None:
        installed = detour.switched(theirs, exact, switch, switch.selector())
    return Built(installed, (), exact)
