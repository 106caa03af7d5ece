"""What is installed in this process: one table, one lock.

Installs, verifications and undos are serialised by ``lock``. Nothing is
imported while it is held: an import can wait for another thread that waits
for the lock.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patchkit.engine._installation import Installation

lock = threading.RLock()
installations: dict[tuple[str, str], Installation] = {}

# Identity of an installed object -> (the object, adapter, side, symbol). Holding
# the object keeps its identity from being given to another one.
_owners: dict[int, tuple[Any, str, str, str]] = {}


def own(value: Any, adapter: str, side: str, symbol: str) -> None:
    _owners[id(value)] = (value, adapter, side, symbol)


def disown(value: Any) -> None:
    _owners.pop(id(value), None)


def owner(value: Any) -> tuple[str, str, str] | None:
    """(adapter, side, symbol) of the installation that made this object, if one did."""
    known = _owners.get(id(value))
    return known[1:] if known is not None and known[0] is value else None


def is_ours(value: Any) -> bool:
    return owner(value) is not None


def bookkeeping_ids() -> set[int]:
    """Identities of the containers above, for the reference scan to pass over."""
    return {id(_owners), *map(id, _owners.values())}


def _after_fork_in_child() -> None:
    global lock
    lock = threading.RLock()  # another thread may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
