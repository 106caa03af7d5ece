"""Installing and undoing each side, watched by something that is not the engine.

The engine restores what its journal says. Here every function and class of the patched
packages is compared by identity, before and after, so that what a replacement's module
did on its own behalf shows as well.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING

from patchkit.engine import Adapter, find_adapter, inspect_plan, install, installations
from patchkit.errors import Violation
from patchkit.kit._result import Outcome
from patchkit.kit._snapshot import changed, snapshot
from patchkit.symbols import Symbol

if TYPE_CHECKING:
    from patchkit.kit._stages import SuiteSettings


def undone(settings: SuiteSettings) -> Outcome:
    """Install, verify and undo every declared side, twice."""
    adapter = find_adapter(settings.adapter)
    violations: list[Violation] = []
    figures: dict[str, int] = {}
    for side in ("rollout", "trainer"):
        if adapter.patches(side):
            violations += _side(adapter, side, settings.profile, figures)
    return Outcome(violations=tuple(violations), figures=figures)


def _side(
    adapter: Adapter, side: str, profile: str, figures: dict[str, int]
) -> Iterator[Violation]:
    planned = inspect_plan(adapter, side, profile=profile)
    if planned.violations:
        yield from planned.violations
        return
    for patch in planned.patches:
        import_module(Symbol.parse(patch.patch.symbol).module)
    packages = frozenset(Symbol.parse(p.patch.symbol).package for p in planned.patches)
    before, hooks = snapshot(packages), [id(finder) for finder in sys.meta_path]
    for turn in ("first", "second"):
        installation = install(adapter=adapter, side=side, profile=profile)
        if installation.state != "active":
            yield Violation(
                subject=f"adapter {adapter.name!r}, {side} side",
                problem="is not active though every target is imported",
                expected="active",
                found=installation.state,
                remedy="look at `patchkit check`: a target may be made by code that never ran",
            )
        written = changed(before, snapshot(packages))
        installation.verify()
        installation.uninstall()
        left = changed(before, snapshot(packages))
        figures[f"{side}: written"] = len(written)
        if not written and _writes_functions(adapter, side):
            yield Violation(
                subject=f"adapter {adapter.name!r}, {side} side",
                problem="no function or class of the target's packages changed",
                expected="at least one slot that holds something else while installed",
                found="none",
                remedy="look at `patchkit check` for what the plan writes",
            )
        for place in left:
            yield Violation(
                subject=place,
                problem=f"does not hold what it held before, after the {turn} undo",
                expected="the very object from before the installation",
                found="another one",
                remedy="the engine restores what it wrote: look for code that patches while "
                "the replacement's module is imported, and declare that as a patch",
            )
        if [id(finder) for finder in sys.meta_path] != hooks:
            yield Violation(
                subject="sys.meta_path",
                problem=f"has other import hooks after the {turn} undo",
                expected="those from before",
                found=", ".join(type(finder).__name__ for finder in sys.meta_path),
                remedy="look for an import hook that the replacement's module enters",
            )
        if left or installations():
            return
    figures[f"{side}: patches"] = len(planned.patches)


def _writes_functions(adapter: Adapter, side: str) -> bool:
    return any(p.action in ("replace", "wrap") for p in adapter.patches(side))
