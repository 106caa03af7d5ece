"""Reached and needed, for adapters that claim no equal log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import patchkit
from patchkit.engine import Adapter, Patch, find_adapter, inspect_plan, install, resolve_reference
from patchkit.errors import Violation
from patchkit.kit._ablation import unproven
from patchkit.kit._result import Outcome
from patchkit.parity.ablation import without
from patchkit.symbols import Symbol

if TYPE_CHECKING:
    from patchkit.kit._stages import SuiteSettings


def reached_by_exercise(settings: SuiteSettings) -> Outcome:
    """Run the adapter's exercise of each side as a canary."""
    adapter = find_adapter(settings.adapter)
    if adapter.exercise is None:
        return Outcome(violations=(_undeclared(adapter),))
    figures: dict[str, Any] = {}
    for side in _sides(adapter):
        _import_targets(adapter, side, settings.profile)
        with (
            install(adapter=adapter, side=side, profile=settings.profile) as installation,
            installation.canary() as canary,
        ):
            _exercised(adapter, side)
        figures.update({f"{side} {identity}": hits for identity, hits in canary.hits.items()})
    return Outcome(figures=figures)


def needed_by_exercise(settings: SuiteSettings) -> Outcome:
    """Leave out one patch at a time and compare what the exercise returns."""
    adapter = find_adapter(settings.adapter)
    if adapter.exercise is None:
        return Outcome(violations=(_undeclared(adapter),))
    figures: dict[str, Any] = {}
    violations: list[Violation] = []
    for side in _sides(adapter):
        _import_targets(adapter, side, settings.profile)
        with install(adapter=adapter, side=side, profile=settings.profile):
            complete = _exercised(adapter, side)
        for patch in _required(adapter, side, settings.profile):
            found = _without(adapter, side, patch, settings.profile)
            noticed = found != complete
            figures[f"without {side} {patch.identity}"] = "noticed" if noticed else "the same"
            if not noticed and (v := unproven(adapter, side, patch.identity, figures)):
                violations.append(v)
    return Outcome(violations=tuple(violations), figures=figures)


def _without(adapter: Adapter, side: str, patch: Patch, profile: str) -> str:
    rest = without(adapter, side, patch.identity)
    try:
        if not rest.patches(side):
            return _exercised(rest, side, installed=False)
        with install(adapter=rest, side=side, profile=profile):
            return _exercised(rest, side)
    except Exception as error:  # an error without the patch is one way to notice it
        return f"{type(error).__name__}: {error}"


def _exercised(adapter: Adapter, side: str, *, installed: bool = True) -> str:
    exercise = resolve_reference(adapter.exercise)
    if side == "trainer" and installed:
        with patchkit.exact_context():
            return repr(exercise(side))
    return repr(exercise(side))


def _required(adapter: Adapter, side: str, profile: str) -> Iterator[Patch]:
    for planned in inspect_plan(adapter, side, profile=profile).patches:
        if planned.patch.required:
            yield planned.patch


def _import_targets(adapter: Adapter, side: str, profile: str) -> None:
    for planned in inspect_plan(adapter, side, profile=profile).patches:
        import_module(Symbol.parse(planned.patch.symbol).module)


def _sides(adapter: Adapter) -> list[str]:
    return [side for side in ("rollout", "trainer") if adapter.patches(side)]


def _undeclared(adapter: Adapter) -> Violation:
    return Violation(
        subject=f"adapter {adapter.name!r}: exercise",
        problem="not declared",
        expected="a reference to exercise(side), which runs what the patches are for",
        found="nothing",
        remedy="set Adapter(exercise=…): patches that nothing runs cannot be certified; an "
        "adapter of a model declares tiny_model, logprobs, weight_map and profiles instead",
    )
