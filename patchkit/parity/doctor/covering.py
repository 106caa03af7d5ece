"""Which of an adapter's patches stands at the operator that differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from patchkit.parity.doctor.compare import Cell
from patchkit.symbols import Symbol

if TYPE_CHECKING:
    from patchkit.engine import Adapter, Patch

__all__ = ["covering_patches"]


def covering_patches(
    cell: Cell, rollout: Sequence[Patch], trainer: Sequence[Patch]
) -> tuple[list[Patch], list[Patch]]:
    """Patches of the classes that implement the operator, on each side.

    Args:
        cell: The operator.
        rollout: Patches that apply on the rollout side.
        trainer: The same of the trainer.

    Returns:
        For each side the patches of the nearest class that has one: that of the module
        itself before that of a module around it.
    """
    return _nearest(cell.owners[0], rollout), _nearest(cell.owners[1], trainer)


def _nearest(owners: Sequence[str], patches: Sequence[Patch]) -> list[Patch]:
    for owner in owners:
        found = [p for p in patches if _owner_of(p.symbol) == owner and _computes(p)]
        if found:
            return found
    return []


def _owner_of(symbol: str) -> str:
    parsed = Symbol.parse(symbol)
    return f"{parsed.module}:{parsed.qualname.rpartition('.')[0] or parsed.qualname}"


def _computes(patch: Patch) -> bool:
    """Whether it takes part in a forward: how weights are laid out comes before it."""
    return not patch.symbol.endswith("process_weights_after_loading")


def applicable_patches(adapter: Adapter, profile: str) -> tuple[list[Patch], list[Patch]]:
    """Patches of both sides that the profile has, at the versions installed here."""
    from packaging.specifiers import SpecifierSet

    from patchkit.errors import PatchkitError
    from patchkit.symbols import installed_version

    def applies(patch: Patch) -> bool:
        if patch.profiles and profile not in patch.profiles:
            return False
        if not patch.versions:
            return True
        try:
            version = installed_version(Symbol.parse(patch.symbol).package)
        except PatchkitError:
            return False
        # A local label (+cpu) names a build, not another version.
        return SpecifierSet(patch.versions).contains(version.partition("+")[0], prereleases=True)

    return [p for p in adapter.rollout if applies(p)], [p for p in adapter.trainer if applies(p)]
