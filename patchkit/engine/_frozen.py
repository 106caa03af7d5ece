"""Whether somebody froze the collector: what is frozen cannot be searched."""

from __future__ import annotations

import gc
import sys

# CPython 3.12 moves immortal objects (a few hundred static ones of the interpreter
# itself) into the permanent generation whenever it collects, and counts them as
# frozen. Whoever calls gc.freeze() to any purpose freezes far more than this.
_IMMORTAL = 4096 if sys.version_info[:2] == (3, 12) else 0


def frozen_objects() -> int:
    """How many objects are frozen; 0 unless ``gc.freeze()`` was called."""
    count = gc.get_freeze_count()
    return count if count > _IMMORTAL else 0
