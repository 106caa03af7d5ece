"""Which code is worth walking: a cheap look that may say yes too often, never no.

A look goes over the nodes of a function, or of a module's top, twice: first it notes what
each name may stand for, then it asks of every write and call what it depends on. Whether
that is something foreign is known only when all files have been looked at.
"""

from patchkit.audit._prescan.files import look, look_at_file, may_patch, remember
from patchkit.audit._prescan.looks import GIVEN, PASSED, RETURNED, FileLook

__all__ = [
    "GIVEN",
    "PASSED",
    "RETURNED",
    "FileLook",
    "look",
    "look_at_file",
    "may_patch",
    "remember",
]
