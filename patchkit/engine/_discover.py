"""Finding adapters by name, and the side that is meant."""

from __future__ import annotations

from importlib.util import find_spec

from patchkit.engine._declare import SIDES, Adapter
from patchkit.engine.errors import AdapterNotFoundError, DeclarationError, SideError
from patchkit.errors import ConfigurationError
from patchkit.symbols import Symbol

GROUP = "patchkit.adapters"


def adapter_names() -> list[str]:
    """The names of all installed adapters, without loading them."""
    return sorted({point.name for point in _entry_points()})


def find_adapter(name: str) -> Adapter:
    """Load an adapter by name from the entry-point group ``patchkit.adapters``."""
    points = [point for point in _entry_points() if point.name == name]
    if not points:
        raise AdapterNotFoundError(name, adapter_names())
    places = {point.value for point in points}
    if len(places) > 1:
        raise DeclarationError(
            f"adapter {name!r}",
            [f"several distributions declare it ({', '.join(sorted(places))}); uninstall one"],
        )
    try:
        adapter = points[0].load()
    except ConfigurationError:
        raise
    except Exception as error:  # whatever the package raises when it is imported
        told = f"{points[0].value} cannot be loaded: {type(error).__name__}: {error}"
        raise DeclarationError(f"adapter {name!r}", [f"its entry point {told}"]) from error
    if not isinstance(adapter, Adapter):
        raise DeclarationError(
            f"adapter {name!r}", [f"its entry point {points[0].value} is no Adapter"]
        )
    return adapter


def side_of(adapter: Adapter, side: str | None) -> str:
    """The side asked for, or the only one whose packages are installed."""
    if not isinstance(adapter, Adapter):
        raise ConfigurationError(
            f"expected an adapter's name, or an Adapter, found {type(adapter).__name__} "
            f"{adapter!r:.200}"
        )
    if side is not None:
        adapter.patches(side)
        return side
    possible = [s for s in SIDES if adapter.patches(s) and _importable(adapter, s)]
    if len(possible) != 1:
        raise SideError(adapter.name, possible)
    return possible[0]


def _importable(adapter: Adapter, side: str) -> bool:
    packages = {Symbol.parse(patch.symbol).package for patch in adapter.patches(side)}
    return all(find_spec(package) is not None for package in packages)


def _entry_points():  # type: ignore[no-untyped-def]
    from importlib.metadata import entry_points

    return entry_points(group=GROUP)
