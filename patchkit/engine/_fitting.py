"""Whether a replacement fits its target, and the pairs of old and new objects."""

from __future__ import annotations

from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

from patchkit.engine import _shape as shape
from patchkit.engine._declare import Patch
from patchkit.engine._switch import Switch
from patchkit.engine._targets import Target
from patchkit.engine.errors import violation
from patchkit.errors import Violation

FUNCTION_KINDS = frozenset(
    {
        "function",
        "method",
        "staticmethod",
        "classmethod",
        "property",
        "cached_property",
        "cached-function",
    }
)


class Pair(NamedTuple):
    """An old object and the one that takes its place."""

    old: Any
    new: Any


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """The new objects of one patch.

    Attributes:
        value: The new raw attribute or entry.
        renamed: Old object -> new object, by identity, for every object that a
            reference may hold: the raw attribute and the function inside.
        counted: The function whose calls are hits; None where there is none.
        notes: What a reader of the plan ought to know.
    """

    value: Any
    renamed: tuple[Pair, ...]
    counted: FunctionType | None
    notes: tuple[str, ...] = ()


def other_signature(
    patch: Patch, wanted: tuple[shape.Param, ...], given: tuple[shape.Param, ...], told: str
) -> Violation:
    return violation(
        patch.symbol,
        "its replacement has another signature",
        expected=shape.show(wanted),
        found=f"{shape.show(given)}: {told}",
        remedy="give the replacement exactly the target's parameters; "
        "*args and **kwargs would only hide the next change",
    )


def same_shape(
    patch: Patch,
    target: Target,
    theirs: FunctionType,
    ours: FunctionType,
    switch: Switch | None,
    find: list[Violation],
) -> None:
    bound = target.kind not in ("function", "staticmethod")
    told = shape.difference(shape.params(theirs), shape.params(ours), bound=bound)
    if told:
        find.append(other_signature(patch, shape.params(theirs), shape.params(ours), told))
    elif told := shape.changed_defaults(theirs, ours):
        find.append(
            violation(
                patch.symbol,
                "its replacement has other defaults",
                expected="the target's defaults",
                found=told,
                remedy="repeat the target's defaults; callers rely on them",
            )
        )
    kinds = shape.run_kind(theirs), shape.run_kind(ours)
    if kinds[0] != kinds[1]:
        find.append(
            violation(
                patch.symbol,
                "its replacement runs in another way",
                expected=f"a {kinds[0]}",
                found=f"a {kinds[1]}",
                remedy="callers await, iterate or call it: the replacement must be of that kind",
            )
        )
