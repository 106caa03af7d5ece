"""Which patches the processes of an engine really ran.

No single process runs every patch: the front end admits requests, the engine core
schedules them, workers run the model. Each counts its own calls from the moment the
patches are installed (building the model is where some of them act), and the driver
adds the counts up. The counting variants are gone as soon as the counts are told.

A process that loads a compiled model from disk traces nothing. There, what was traced
when the model was compiled counts: it is stored with the artefact, under the same
patch set, and asked for only where vLLM says that it loaded one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from patchkit.engine import load_evidence, store_evidence
from patchkit.errors import Violation, ViolationsError
from patchkit.runtime.caches import artefact_folder, was_loaded, was_saved

__all__ = ["PatchNotReachedError", "end_canary", "evident", "require_reached", "start_canary"]

_canary: Any = None
_digest = ""
_told: dict[str, int] | None = None
_evident: tuple[str, ...] = ()


class PatchNotReachedError(ViolationsError):
    """Patches are installed, but nothing ran them."""


def start_canary(installation: Any) -> None:
    """Count calls in this process from now on."""
    global _canary, _digest, _told, _evident
    _canary, _digest = installation.canary(watch_calls=False), installation.manifest.digest
    _told, _evident = None, ()
    _canary.__enter__()


def end_canary() -> dict[str, int]:
    """Stop counting and return calls per patch; told again when asked again.

    Includes the traces stored with a compiled model that this process loaded from
    disk; :func:`evident` names the patches that count for that reason alone.
    """
    global _told, _evident
    if _canary is None:
        return {}
    if _told is None:
        _canary.stop()
        hits = dict(_canary.hits)
        if (folder := artefact_folder()) is not None:
            if was_saved() and _canary.traced:
                store_evidence(folder, _digest, _canary.traced)
            if was_loaded():
                stored = load_evidence(folder, _digest)
                _evident = tuple(sorted(i for i, n in stored.items() if n and not hits.get(i)))
                hits.update({identity: stored[identity] for identity in _evident})
        _told = hits
    return dict(_told)


def evident() -> tuple[str, ...]:
    """Patches of the last count that nothing called: they were traced in an earlier run."""
    return _evident


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
            "platform) in `patchkit diff`, and patch what runs instead; or a compiled model was "
            "loaded that was made without a canary: start once with VLLM_DISABLE_COMPILE_CACHE=1",
        )
        for patch in manifest["patches"]
        if patch["required"] and _counted(patch) and not total[identity := _identity(patch)]
    ]
    if missed:
        raise PatchNotReachedError(f"adapter {manifest['adapter']!r}: not everything ran", missed)
    return dict(total)


def _identity(patch: Mapping[str, Any]) -> str:
    return f"{patch['symbol']}[{patch['key']}]" if patch["key"] else str(patch["symbol"])


def _counted(patch: Mapping[str, Any]) -> bool:
    """Whether calls of it are counted at all: those of a value or a class are not."""
    kinds = {patch[side].get("kind") for side in ("before", "after")}
    return patch["action"] != "value" and "class" not in kinds
