"""Around an installation: what it made, whose a foreign object is, and the way out."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from patchkit.engine import _inert as inert
from patchkit.engine import _process as process
from patchkit.engine._journal import Entry
from patchkit.engine._plan import PlannedPatch
from patchkit.engine._targets import resolve, still_importing
from patchkit.engine.errors import violation
from patchkit.errors import Violation


def past_the_hook(planned: PlannedPatch) -> bool:
    if not planned.pending:
        return False
    module = inert.loaded(planned.module)
    return module is not None and not still_importing(module)


def missed_import(planned: PlannedPatch) -> Violation:
    return violation(
        planned.patch.symbol,
        "its module was loaded past the import system",
        expected=f"an import of {planned.module} that can be hooked",
        found="a loaded module without the patch",
        remedy="uninstall() and install() again, now that it is loaded",
    )


def new_functions(planned: PlannedPatch) -> list[Any]:
    if planned.built is None:
        return []
    objects = [planned.built.value, inert.function_of(planned.built.value)]
    objects += [new for _, new in planned.built.renamed]
    return [o for o in objects if o is not None and type(o) not in inert.ATOM_TYPES]


def leftovers(planned: PlannedPatch) -> list[tuple[FunctionType, FunctionType]]:
    """(original, installed) of the functions that somebody may have kept."""
    if planned.built is None:
        return []
    pairs = []
    for old, new in planned.built.renamed:
        theirs, ours = inert.function_of(old), inert.function_of(new)
        if theirs is not None and ours is not None and not inert.is_class(new):
            pairs.append((theirs, ours))
    return list({id(new): (old, new) for old, new in pairs}.values())


def clear_caches(patches: list[PlannedPatch]) -> None:
    for planned in patches:
        for symbol in planned.patch.caches:
            module = inert.loaded(symbol.partition(":")[0])
            if module is not None:
                resolve(symbol).cache_clear()


def whose(found: Any, entry: Entry) -> str:
    holder = process.owner(found) or next(
        filter(None, map(process.owner, inert.layers(found))), None
    )
    if holder is not None:
        return f"the patch of adapter {holder[0]!r} ({holder[1]} side) of {holder[2]}"
    function = inert.function_of(found)
    if function is not None:
        return f"{inert.describe(found)}, code of {inert.home(function)}"
    return inert.describe(found)


def way_out(found: Any, entry: Entry) -> str:
    holder = process.owner(found)
    if holder is not None:
        return f"uninstall adapter {holder[0]!r} first"
    if found is entry.before:
        return "somebody put the original back: find out who; uninstall() still works"
    if executed_again(found, entry):
        return (
            "its module was executed again (reload); uninstall("
            f"leave=({entry.slot.name!r},)) and install again"
        )
    return f"remove that first, or give the slot up: uninstall(leave=({entry.slot.name!r},))"


def executed_again(found: Any, entry: Entry) -> bool:
    new, old = inert.function_of(found), inert.function_of(entry.before)
    if new is None or old is None:
        return inert.is_class(found) and inert.is_class(entry.before)
    return (
        new.__code__.co_filename == old.__code__.co_filename
        and new.__qualname__ == old.__qualname__
    )


def installed_names() -> list[str]:
    return [f"{name} ({side})" for name, side in process.installations]
