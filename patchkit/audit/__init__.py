"""``patchkit audit``: what a project patches, and what the next upgrade does to it.

Static: neither the project nor the packages it patches are imported.
"""

from __future__ import annotations

from patchkit.audit._audit import audit
from patchkit.audit._findings import Finding, Report, Verdict, VerdictKind
from patchkit.audit._sightings import BlindSpot, Door, Place

__all__ = [
    "BlindSpot",
    "Door",
    "Finding",
    "Place",
    "Report",
    "Verdict",
    "VerdictKind",
    "audit",
]
