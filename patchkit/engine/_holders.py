"""What becomes of each reference to an old object: rebound, kept, accepted or refused."""

from __future__ import annotations

from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

from patchkit.engine import _inert as inert
from patchkit.engine._build import Built
from patchkit.engine._declare import NATIVE, Patch
from patchkit.engine._journal import Entry
from patchkit.engine._owners import Reference
from patchkit.engine._references import Scan
from patchkit.engine._slots import AttributeSlot
from patchkit.engine._targets import Target
from patchkit.engine.errors import violation
from patchkit.errors import Violation


@dataclass(frozen=True, slots=True, eq=False)
class Settled:
    """The decisions about one patch's references."""

    entries: tuple[Entry, ...]
    kept: tuple[str, ...]
    accepted: tuple[str, ...]
    violations: tuple[Violation, ...]
    notes: tuple[str, ...]


def settle(
    patch: Patch,
    target: Target,
    built: Built,
    scan: Scan,
) -> Settled:
    """Decide about every reference to the old objects of one patch."""
    if (
        target.held is inert.MISSING
    ):  # the class that defines it keeps it, and so does everyone else
        return Settled((), (), (), (), ())
    new_of = {id(old): new for old, new in built.renamed}
    used = _used_by(built.counted)
    entries, kept, accepted, refused = [], [], [], []
    for reference in scan.references:
        if id(reference.obj) not in new_of or _is_target_itself(reference, target):
            continue
        if reference.holder == id(target.value):
            continue  # the function inside the old static or class method
        if _accepts(patch, reference.name):
            accepted.append(reference.name)
        elif reference.name in used:
            kept.append(reference.name)
        elif reference.slot is None:
            refused.append(_cannot_rebind(patch, reference))
        elif reference.instance and not patch.rebind_instances:
            refused.append(_live_instance(patch, reference))
        else:
            new = new_of[id(reference.obj)]
            if type(reference.held) is MethodType:
                new = MethodType(new, reference.held.__self__)
            entries.append(Entry(reference.slot, reference.held, new))
    for old, _ in built.renamed:
        if count := scan.unseen.get(id(old), 0):
            if _accepts(patch, NATIVE):
                accepted.append(f"{NATIVE} ({count})")
            else:
                refused.append(_native(patch, old, count))
    return Settled(tuple(entries), tuple(kept), tuple(accepted), tuple(refused), ())


def _is_target_itself(reference: Reference, target: Target) -> bool:
    slot = reference.slot
    return (
        type(slot) is AttributeSlot
        and slot.owner is target.owner
        and slot.attribute == target.attribute
    )


def _accepts(patch: Patch, name: str) -> bool:
    return any(
        name == accepted or (accepted.endswith("*") and name.startswith(accepted[:-1]))
        for accepted in patch.accepts_unreachable
    )


def _cannot_rebind(patch: Patch, reference: Reference) -> Violation:
    return violation(
        patch.symbol,
        "somebody holds the old object, in a place that cannot be written",
        expected="references that can be rebound, or that the adapter accepts",
        found=f"{reference.name}: {reference.why}",
        remedy="install before it is taken; or, if it never runs, add "
        f"accepts_unreachable=({reference.name!r},) to the patch",
    )


def _live_instance(patch: Patch, reference: Reference) -> Violation:
    return violation(
        patch.symbol,
        "too late: a live instance has bound the old function",
        expected="no instances built yet",
        found=reference.name,
        remedy="install before the instances are built, or say rebind_instances=True",
    )


def _native(patch: Patch, old: Any, count: int) -> Violation:
    return violation(
        patch.symbol,
        "too late: it is held where Python cannot look",
        expected="no references from C++ or running frames",
        found=f"{count} of them to {inert.describe(old)}",
        remedy="install before it is captured (registered with C++, called, awaited); or, if "
        f"those calls do not matter, add accepts_unreachable=({NATIVE!r},) to the patch",
    )


def _used_by(replacement: FunctionType | None) -> set[str]:
    """Names of module attributes that the replacement, or what it calls, reads.

    An adapter's ``from target import f as original`` must go on to reach the
    original, or the replacement would call itself for ever.
    """
    if replacement is None:
        return set()
    top = inert.home(replacement).partition(".")[0]
    names: set[str] = set()
    todo, seen = [replacement], set()
    while todo:
        function = todo.pop()
        if id(function.__code__) in seen:
            continue
        seen.add(id(function.__code__))
        for name in _global_names(function.__code__):
            value = function.__globals__.get(name, inert.MISSING)
            if value is inert.MISSING:
                continue
            names.add(f"{inert.home(function)}:{name}")
            todo += [f for f in _functions(value) if inert.home(f).partition(".")[0] == top]
        for cell in function.__closure__ or ():
            try:
                todo += [
                    f
                    for f in _functions(cell.cell_contents)
                    if inert.home(f).partition(".")[0] == top
                ]
            except ValueError:
                continue  # an empty cell
    return names


def _global_names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if type(constant) is CodeType:
            names |= _global_names(constant)
    return names


def _functions(value: Any) -> list[FunctionType]:
    if inert.is_class(value):
        inside = map(inert.function_of, inert.namespace(value).values())
        return [f for f in inside if f is not None]
    function = inert.function_of(value)
    return [] if function is None else [function]
