"""Functions that outlive their installation: whoever still holds one gets the original.

Bound methods, callbacks and copies taken while a patch was active survive its
undo. The installed functions are ours, so their code can be exchanged for a
detour to the original; nothing of this costs anything while a patch is active.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from types import FunctionType

from patchkit.engine import _detour as detour
from patchkit.engine import _inert as inert

_numbers = itertools.count(1)


def make_inert(installed: FunctionType, original: FunctionType) -> None:
    """Let a function that nobody should hold any more run the original."""
    name = f"original_{next(_numbers)}"
    # Kept as an attribute of this module for as long as somebody may call the leftover.
    inert.namespace(sys.modules[__name__])[name] = original
    weakref.finalize(installed, inert.namespace(sys.modules[__name__]).pop, name, None)
    installed.__code__ = detour.rerouted(installed, __name__, "", name)
