"""Whether an engine may still be used, and which policy version it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from patchkit.errors import PatchkitError

__all__ = ["EnginePoisonedError", "EngineState"]


class EnginePoisonedError(PatchkitError):
    """An engine was used after a weight update on it had failed, or after it was lost.

    Attributes:
        reason: What had failed.
        version: The version that was being loaded; None if none was.
        wanted: What was asked of the engine.
    """

    def __init__(self, wanted: str, version: int | None, reason: str) -> None:
        self.wanted, self.version, self.reason = wanted, version, reason
        update = (
            f"The update to policy version {version} failed, so nobody knows what its weights "
            "and caches hold. "
            if version is not None
            else ""
        )
        super().__init__(
            f"{wanted} refused: the engine is poisoned. {update}First cause: {reason} "
            "Shut this engine down and start a new one from a checkpoint."
        )

    def __reduce__(self) -> Any:
        return type(self), (self.wanted, self.version, self.reason)


@dataclass(slots=True)
class EngineState:
    """Shared by everything that talks to one engine.

    Attributes:
        version: The committed policy version; None before the first.
        updating: The version that is being loaded, if any.
        poisoned: Why the engine is unusable; None while it is usable.
    """

    version: int | None = None
    updating: int | None = None
    poisoned: str | None = None
    _poisoned_by: int | None = None

    def poison(self, reason: str) -> None:
        """Mark unusable, for good; the first reason stays."""
        if self.poisoned is None:
            self.poisoned, self._poisoned_by = reason, self.updating

    def require_usable(self, wanted: str) -> None:
        """Refuse, by name, what an unusable engine is asked for."""
        if self.poisoned is not None:
            raise EnginePoisonedError(wanted, self._poisoned_by, self.poisoned)
        if self.updating is not None:
            raise EnginePoisonedError(
                wanted, self.updating, "the update is still under way in another thread."
            )
