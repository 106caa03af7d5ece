"""Installing: a plan is made without the lock, then committed under it."""

from __future__ import annotations

from collections.abc import Mapping

from patchkit.engine import _process as process
from patchkit.engine._declare import Adapter
from patchkit.engine._discover import find_adapter, side_of
from patchkit.engine._installation import Installation
from patchkit.engine._plan import Plan, with_plan, without_violations
from patchkit.engine._switch import State, Switch
from patchkit.engine.errors import (
    AlreadyInstalledError,
    AmbiguousInstallationError,
    NoInstallationError,
)


def install(
    adapter: str | Adapter,
    side: str | None = None,
    *,
    accept: Mapping[str, str] | None = None,
    profile: str | None = None,
) -> Installation:
    """Verify all, write all, and return the handle.

    Installing the same definition again returns the same handle.

    Args:
        adapter: Its name, or the declaration itself.
        side: "rollout" or "trainer"; may be left out where only one is possible.
        accept: symbol -> digest of drifted symbols to let through, unreviewed.
        profile: Which of the adapter's profiles; its default one if None.

    Raises:
        PreflightError: With every violation; nothing was changed.
        AlreadyInstalledError: This adapter is installed with another definition.
    """
    if isinstance(adapter, str):
        adapter = find_adapter(adapter)
    chosen = side_of(adapter, side)
    profile = adapter.profile(profile)
    with process.lock:
        if (known := _known(adapter, chosen, accept, profile)) is not None:
            return known

    def commit(made: Plan) -> Installation | None:
        """Under the lock: what was planned is still so, but for imports."""
        if (known := _known(adapter, chosen, accept, profile)) is not None:
            return known  # another thread was faster
        installation = Installation(without_violations(made))
        if not installation._commit():
            return None
        installation._claims = 1
        process.installations[adapter.name, chosen] = installation
        return installation

    while (installed := with_plan(adapter, chosen, accept, profile, commit)) is None:
        continue  # a module was imported between plan and commit: once more, now with it
    return installed


def _known(
    adapter: Adapter, side: str, accept: Mapping[str, str] | None, profile: str
) -> Installation | None:
    known = process.installations.get((adapter.name, side))
    if known is None:
        return None
    if known.state == "broken":
        raise AlreadyInstalledError(adapter.name, side, "and broken (see its verify())")
    if known.adapter != adapter:
        raise AlreadyInstalledError(adapter.name, side, "with another definition")
    if known._plan.accept != dict(accept or {}):
        raise AlreadyInstalledError(adapter.name, side, "with other accepted digests")
    if known._plan.profile != profile:
        raise AlreadyInstalledError(adapter.name, side, f"with profile {known._plan.profile!r}")
    known._claims += 1
    return known


def installations() -> list[Installation]:
    """Everything installed in this process."""
    return list(process.installations.values())


def exact_context(adapter: str | None = None) -> State:
    """A context in which the trainer's patches act, in this thread or task.

    Args:
        adapter: Its name; needed where several are installed on the trainer side.
    """
    return trainer_switch(adapter).exact()


def stock_context(adapter: str | None = None) -> State:
    """A context in which the originals run, said explicitly: for threads beside the exact one."""
    return trainer_switch(adapter).stock()


def trainer_switch(adapter: str | None = None) -> Switch:
    """The switch of a trainer installation, for capturing its state."""
    found = {
        name: installation
        for (name, side), installation in process.installations.items()
        if side == "trainer" and adapter in (None, name)
    }
    if not found:
        wanted = f"trainer installation of {adapter!r}" if adapter else "trainer installation"
        here = [f"{name} ({side})" for name, side in process.installations]
        raise NoInstallationError(wanted, here)
    if len(found) > 1:
        raise AmbiguousInstallationError(found)
    switch = next(iter(found.values())).switch
    assert switch is not None  # every trainer plan has one
    return switch
