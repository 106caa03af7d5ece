"""The journal: what was written where, and the way back.

It is the only code that writes slots. ``commit`` is all or nothing, ``undo``
is generated from the entries: nobody writes an undo by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from patchkit.engine._inert import describe
from patchkit.engine._slots import Slot, same
from patchkit.engine.errors import RollbackError, SlotChangedError


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One planned or written change: the slot, what it held, what it is to hold."""

    slot: Slot
    before: Any
    after: Any


def commit(entries: Iterable[Entry]) -> list[Entry]:
    """Write all, or restore all and raise.

    Each slot must still hold what was verified; a check right before the write
    is the best that is possible, as foreign writers can't be locked out.
    """
    written: list[Entry] = []
    try:
        for entry in entries:
            found = entry.slot.read()
            if not same(found, entry.before):
                raise SlotChangedError(entry.slot.name, describe(entry.before), describe(found))
            # Noted before the write, so that an interrupt between the two is undone as well.
            written.append(entry)
            entry.slot.write(entry.after)
            landed = entry.slot.read()
            if not same(landed, entry.after):
                raise SlotChangedError(entry.slot.name, describe(entry.after), describe(landed))
    except BaseException as error:
        restore(written, cause=error)
        raise
    return written


def restore(written: list[Entry], *, cause: BaseException | None = None) -> None:
    """Put everything back, in reverse order, whatever happens on the way.

    A step that fails is tried a second time after all others; what fails twice
    is named in a RollbackError.
    """
    failed = [entry for entry in reversed(written) if _put_back(entry) is not None]
    problems = [(entry.slot.name, why) for entry in failed if (why := _put_back(entry))]
    if problems:
        raise RollbackError(problems) from cause


def _put_back(entry: Entry) -> str | None:
    """Restore one slot; the reason if that was not possible."""
    try:
        if not same(entry.slot.read(), entry.before):
            entry.slot.write(entry.before)
        found = entry.slot.read()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return None if same(found, entry.before) else f"it holds {describe(found)}"


def changed(
    entries: Iterable[Entry], who: Callable[[Any], str] = describe
) -> list[tuple[str, str, str]]:
    """The slots that no longer hold what was written: (slot, expected, found)."""
    return [
        (entry.slot.name, describe(entry.after), who(found))
        for entry in entries
        if not same(found := entry.slot.read(), entry.after)
    ]
