"""Preflight: everything is resolved, checked and built; nothing is changed.

All violations are collected before any is reported. The plan that comes out
lists every slot, what it holds, and what it will hold.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeVar

from patchkit.engine import _inert as inert
from patchkit.engine import _process as process
from patchkit.engine._build import Built, Pair
from patchkit.engine._declare import Adapter, Patch
from patchkit.engine._discover import find_adapter, side_of
from patchkit.engine._journal import Entry
from patchkit.engine._owners import bookkeeping
from patchkit.engine._preflight import PlannedPatch, prepare, rely
from patchkit.engine._report import plan_as_dict
from patchkit.engine._review import Review
from patchkit.engine._switch import Switch
from patchkit.engine._targets import Target, resolve, still_importing
from patchkit.engine.errors import PreflightError, violation
from patchkit.errors import PatchkitError, Violation
from patchkit.symbols import Symbol, find_facts

Result = TypeVar("Result")
_ATTEMPTS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The result of a preflight.

    Attributes:
        adapter: The adapter.
        side: "rollout" or "trainer".
        patches: What will be done, in order.
        skipped: Patches that are not for the installed versions.
        violations: What stands against it; only `inspect_plan` returns a plan with any.
        unreviewed: symbol -> digest of what is let through without a review.
        versions: package -> installed version.
        switch: The switch of a trainer side.
        profile: The adapter's profile that decides which patches apply.
    """

    adapter: Adapter
    side: str
    patches: tuple[PlannedPatch, ...]
    skipped: tuple[Patch, ...]
    violations: tuple[Violation, ...]
    unreviewed: dict[str, str]
    versions: Mapping[str, str]
    accept: Mapping[str, str] = field(default_factory=dict)
    switch: Switch | None = None
    profile: str = ""

    @property
    def entries(self) -> list[Entry]:
        return [entry for planned in self.patches for entry in planned.entries]

    def as_dict(self) -> dict[str, Any]:
        """For reading and for JSON: slots, references, violations."""
        return plan_as_dict(self)


bookkeeping.update({Target, PlannedPatch, Plan, Built, Pair, Entry, Patch})


def plan(
    adapter: str | Adapter,
    side: str | None = None,
    *,
    accept: Mapping[str, str] | None = None,
    profile: str | None = None,
) -> Plan:
    """Preflight; raises a PreflightError with everything that stands against it."""
    return with_plan(adapter, side, accept, profile, without_violations)


def without_violations(made: Plan) -> Plan:
    """The plan, if nothing stands against it."""
    if made.violations:
        raise PreflightError(
            f"adapter {made.adapter.name!r} cannot be installed on the {made.side} side",
            made.violations,
        )
    return made


def inspect_plan(
    adapter: str | Adapter,
    side: str | None = None,
    *,
    accept: Mapping[str, str] | None = None,
    profile: str | None = None,
) -> Plan:
    """The same, with the violations in the plan: for showing, not for installing."""
    return with_plan(adapter, side, accept, profile, lambda made: made)


def with_plan(
    adapter: str | Adapter,
    side: str | None,
    accept: Mapping[str, str] | None,
    profile: str | None,
    use: Callable[[Plan], Result],
) -> Result:
    """Make a plan and use it, under the lock; what must be imported is imported before.

    An import can wait for another thread that waits for the lock, so nothing is
    imported while it is held; when another thread's import comes in between,
    it is done once more.
    """
    if isinstance(adapter, str):
        adapter = find_adapter(adapter)
    chosen_side, chosen_profile = side_of(adapter, side), adapter.profile(profile)
    patches = [
        patch
        for patch in adapter.patches(chosen_side)
        if not patch.profiles or chosen_profile in patch.profiles
    ]
    collected = False
    for _ in range(_ATTEMPTS):
        unfinished = bring_in(patches)
        with process.lock:
            if not settled(patches, unfinished):
                continue
            made = _make(adapter, chosen_side, chosen_profile, patches, accept or {})
            if collected or not any(is_about_holders(v) for v in made.violations):
                return use(made)
        # Garbage that waits for the collector holds references too (dead frames of an
        # exception, closed generators): nobody is refused because of that.
        del made
        gc.collect()
        collected = True
    raise PreflightError(
        f"adapter {adapter.name!r} cannot be installed on the {chosen_side} side",
        [
            violation(
                f"adapter {adapter.name!r}",
                "its modules are being imported by other threads all the time",
                expected="a moment without imports of what is patched",
                found=f"{_ATTEMPTS} attempts in which one came in between",
                remedy="install before those threads start",
            )
        ],
    )


def is_about_holders(found: Violation) -> bool:
    """Whether a violation may come from an object that is garbage already."""
    return found.problem.startswith(("somebody holds", "too late"))


def bring_in(patches: list[Patch]) -> set[str]:
    """Wait for imports of targets that are under way, and import the replacements of loaded ones.

    Returns:
        Modules that another attempt would not bring in either: this very thread is
        importing them, further up its stack, or they raise when they are imported.
    """
    unfinished = set()
    for patch in patches:
        name = Symbol.parse(patch.symbol).module
        module = inert.loaded(name)
        if module is None:
            continue
        if still_importing(module):
            import_module(name)  # returns when the other thread is through with it
            if still_importing(module):
                unfinished.add(name)
        try:
            resolve(patch.replacement)
        except PatchkitError:  # build() reports it, with the rest
            if isinstance(patch.replacement, str):
                unfinished.add(Symbol.parse(patch.replacement).module)
    return unfinished


def settled(patches: list[Patch], unfinished: set[str]) -> bool:
    """Whether planning would import or wait for anything."""
    for patch in patches:
        name = Symbol.parse(patch.symbol).module
        module = inert.loaded(name)
        if module is None or name in unfinished:
            continue
        if still_importing(module):
            return False
        if isinstance(patch.replacement, str):
            ours = Symbol.parse(patch.replacement).module
            if ours in unfinished or inert.loaded(ours) is not None:
                continue
            if find_facts(patch.replacement) is not None:
                return False
    return True


def _make(
    adapter: Adapter, side: str, profile: str, patches: list[Patch], accept: Mapping[str, str]
) -> Plan:
    review = Review(adapter, accept)
    applying: list[Patch] = []
    skipped: list[Patch] = []
    for patch in patches:
        (applying if review.applies(patch) else skipped).append(patch)
    switch = Switch(adapter.name) if side == "trainer" else None
    _declared_well(adapter, side, applying, skipped, review)
    planned = prepare(applying, review, switch)
    for symbol in adapter.relied_on(side):
        rely(symbol, review)
    for symbol in set(accept) - set(review.unreviewed):
        review.violations.append(
            violation(
                symbol,
                "a digest is accepted that nothing needs",
                expected="a symbol whose found digest was never reviewed",
                found=accept[symbol],
                remedy="leave it out: a stale exception would hide the next drift",
            )
        )
    return Plan(
        adapter,
        side,
        tuple(planned),
        tuple(skipped),
        tuple(review.violations),
        dict(review.unreviewed),
        {p: v for p, v in review.versions.items() if v},
        dict(accept),
        switch,
        profile,
    )


def _unsupported(applying: list[Patch], skipped: list[Patch]) -> dict[str, list[Patch]]:
    """Packages of which no patch of the profile's own is meant for the installed version.

    Patches that belong to every profile (of a gate, say) do not make up for them:
    what the profile is for would be left out, and nothing would say so.
    """
    meant = {Symbol.parse(p.symbol).package for p in applying if p.profiles}
    found: dict[str, list[Patch]] = {}
    for patch in skipped if applying else ():
        package = Symbol.parse(patch.symbol).package
        if patch.profiles and package not in meant:
            found.setdefault(package, []).append(patch)
    return found


def _declared_well(
    adapter: Adapter, side: str, applying: list[Patch], skipped: list[Patch], review: Review
) -> None:
    if not applying and not skipped:
        review.violations.append(
            violation(
                f"adapter {adapter.name!r}",
                f"it has no patch on its {side} side",
                expected="at least one",
                found="none declared",
                remedy="install its other side, or choose another profile",
            )
        )
    elif not applying:
        listing = "; ".join(f"{p.symbol} {p.versions}" for p in skipped)
        packages = {Symbol.parse(p.symbol).package for p in skipped}
        versions = ", ".join(f"{p} {review.version(p) or '(not installed)'}" for p in packages)
        review.violations.append(
            violation(
                f"adapter {adapter.name!r}",
                f"no patch of its {side} side is for what is installed",
                expected=listing,
                found=versions,
                remedy="install a version the adapter supports (`patchkit matrix`)",
            )
        )
    for package, left_out in _unsupported(applying, skipped).items():
        review.violations.append(
            violation(
                f"adapter {adapter.name!r}",
                f"no patch of this profile is for this {package}, on its {side} side",
                expected="; ".join(f"{p.symbol} {p.versions}" for p in left_out),
                found=f"{package} {review.version(package) or '(not installed)'}",
                remedy="install a version the profile supports (`patchkit matrix`), or choose "
                "another profile",
            )
        )
    seen: dict[str, Patch] = {}
    for patch in applying:
        if (first := seen.setdefault(patch.identity, patch)) is not patch:
            review.violations.append(
                violation(
                    patch.identity,
                    "two patches of one adapter match",
                    expected="one patch per symbol and version",
                    found=f"versions {first.versions or 'any'!r} and {patch.versions or 'any'!r}",
                    remedy="make their `versions` exclude each other",
                )
            )
