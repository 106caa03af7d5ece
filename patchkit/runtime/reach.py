"""Which patches the processes of an engine really ran.

No single process runs every patch: the front end admits requests, the engine core
schedules them, workers run the model. Each counts its own calls from the moment the
patches are installed (building the model is where some of them act), and the driver
adds the counts up. The counting variants are gone as soon as the counts are told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from patchkit.errors import Violation, ViolationsError

__all__ = ["PatchNotReachedError", "end_canary", "require_reached", "start_canary"]

_canary: Any = None


class PatchNotReachedError(ViolationsError):
    """Patches are installed, but nothing ran them."""


def start_canary(installation: Any) -> None:
    """Count calls in this process from now on."""
    global _canary
    _canary = installation.canary(watch_calls=False)
    _canary.__enter__()


def end_canary() -> dict[str, int]:
    """Stop counting and return calls per patch; told again when asked again."""
    if _canary is None:
        return {}
    _canary.stop()
    return dict(_canary.hits)


def require_reached(
    manifest: Mapping[str, Any], hits: Iterable[Mapping[str, int]]
) -> dict[str, int]:
    """Add up the counts of all processes and refuse a required patch without any.

    Args:
        manifest: A runtime manifest of the side, as plain data.
        hits: Calls per patch, one mapping per process.

    Returns:
        Calls per patch over all processes.

    Raises:
        PatchNotReachedError: Naming every required patch that nothing ran.
    """
    total: Counter[str] = Counter()
    for counts in hits:
        total.update(counts)
    missed = [
        Violation(
            subject=identity,
            problem="is installed and was never called",
            expected="at least one call in some process of the engine",
            found="none while the engine was built and sampled",
            remedy="another code path is selected: look for a switch (model runner, backend, "
            "platform) in `patchkit diff`, and patch what runs instead",
        )
        for patch in manifest["patches"]
        if patch["required"] and not total[identity := _identity(patch)]
    ]
    if missed:
        raise PatchNotReachedError(f"adapter {manifest['adapter']!r}: not everything ran", missed)
    return dict(total)


def _identity(patch: Mapping[str, Any]) -> str:
    return f"{patch['symbol']}[{patch['key']}]" if patch["key"] else str(patch["symbol"])
