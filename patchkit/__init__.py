"""patchkit: monkeypatches that are verified, all-or-nothing and undoable.

    >>> import patchkit
    >>> with patchkit.install(adapter="qwen3_moe", side="trainer") as inst:  # doctest: +SKIP
    ...     inst.verify()

The names below are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patchkit.engine import (
        Adapter,
        Installation,
        Patch,
        exact_context,
        install,
        stock_context,
    )
    from patchkit.errors import ConfigurationError, PatchkitError, Violation, ViolationsError

_ENGINE = ("Adapter", "Installation", "Patch", "exact_context", "install", "stock_context")
_ERRORS = ("ConfigurationError", "PatchkitError", "Violation", "ViolationsError")

__all__ = [
    "Adapter",
    "ConfigurationError",
    "Installation",
    "Patch",
    "PatchkitError",
    "Violation",
    "ViolationsError",
    "exact_context",
    "install",
    "stock_context",
]


def __getattr__(name: str) -> Any:
    if name in _ENGINE:
        import patchkit.engine as module
    elif name in _ERRORS:
        import patchkit.errors as module  # type: ignore[no-redef]
    else:
        raise AttributeError(f"module 'patchkit' has no attribute {name!r}")
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
