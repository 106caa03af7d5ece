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

from patchkit.engine import _dispatch as dispatch
from patchkit.engine import _foreign as foreign
from patchkit.engine import _inert as inert
from patchkit.engine import _process as process
from patchkit.engine import _references as references
from patchkit.engine._build import Built, Pair, build, build_static
from patchkit.engine._declare import Adapter, Patch
from patchkit.engine._discover import find_adapter, side_of
from patchkit.engine._holders import settle
from patchkit.engine._inert import MISSING
from patchkit.engine._journal import Entry
from patchkit.engine._late import too_late
from patchkit.engine._pending import cannot_wait
from patchkit.engine._report import plan_as_dict
from patchkit.engine._review import Review
from patchkit.engine._slots import AttributeSlot, RegistrySlot, Slot
from patchkit.engine._switch import Switch
from patchkit.engine._targets import Target, locate, resolve, still_importing
from patchkit.engine.errors import PreflightError, violation
from patchkit.errors import PatchkitError, Violation
from patchkit.symbols import Symbol, SymbolFacts, find_facts

Result = TypeVar("Result")
_ATTEMPTS = 8


@dataclass(frozen=True, slots=True, eq=False)
class PlannedPatch:
    """What one patch will do, or, while its module is not imported, is waiting to do.

    Attributes:
        patch: The declaration.
        target: The live target; None while the module is not imported.
        facts: What its source says; None where there is no source.
        entries: The slots to be written, the target's own first.
        built: The new objects.
        kept: References that stay as they are, because the replacement uses them
            to reach the original.
        accepted: References that stay as they are, because the adapter accepts that.
        notes: What a reader of the plan ought to know.
    """

    patch: Patch
    target: Target | None
    facts: SymbolFacts | None
    entries: tuple[Entry, ...] = ()
    built: Built | None = None
    kept: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def pending(self) -> bool:
        return self.target is None

    @property
    def module(self) -> str:
        return Symbol.parse(self.patch.symbol).module


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


references.bookkeeping |= {Target, PlannedPatch, Plan, Built, Pair, Entry, Patch}


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
        Modules that this very thread is importing, further up its stack.
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
        except PatchkitError:
            continue  # build() reports it, with the rest
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
            if inert.loaded(ours) is None and find_facts(patch.replacement) is not None:
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
    for symbol in adapter.relies_on:
        review.judge(symbol)
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


def prepare(
    patches: list[Patch], review: Review, switch: Switch | None, *, arrived: bool = False
) -> list[PlannedPatch]:
    """Plan patches together, those whose modules are loaded to the last slot.

    Args:
        patches: What to plan.
        review: Collects verdicts and violations.
        switch: The switch of a trainer side.
        arrived: Called right after the module ran, from inside its import.
    """
    live: list[tuple[Patch, Target, SymbolFacts | None]] = []
    planned: dict[int, PlannedPatch] = {}
    for patch in patches:
        found, facts = _find(patch, review, arrived)
        if isinstance(found, Violation):
            review.violations.append(found)
            continue
        for symbol in patch.depends_on:
            review.judge(symbol)
        if found is None:
            notes = build_static(patch, facts, review.violations)
            planned[id(patch)] = PlannedPatch(patch, None, facts, notes=notes)
        else:
            others = _others(patch, found, facts, review.adapter)
            review.violations += others
            if not others:
                live.append((patch, found, facts))
    _one_slot_each(live, review)
    # Replacements were imported before the scan, so that it sees the references they
    # make, and are built after it, so that it does not see those that wrappers make.
    olds = _old_objects(live)
    owners = [target.owner for _, target, _ in live]
    scan = references.scan(olds, owners, ignored=process.bookkeeping_ids())
    review.violations += too_late(live)
    for patch, target, facts in live:
        acting = None if patch.always else switch
        if patch.action == "dispatch":
            built = dispatch.build(patch, target, acting is not None, review.violations)
        else:
            built = build(patch, target, facts, acting, review.violations)
        if built is not None:
            planned[id(patch)] = _with_slots(patch, target, facts, built, scan, review)
    return [planned[id(patch)] for patch in patches if id(patch) in planned]


def _find(
    patch: Patch, review: Review, arrived: bool
) -> tuple[Target | Violation | None, SymbolFacts | None]:
    """The live target, if its module is loaded, and what its source says."""
    if patch.action == "dispatch":
        return dispatch.locate(patch), None  # operators have no source to review
    symbol = Symbol.parse(patch.symbol)
    found = locate(symbol, on_subclass=patch.on_subclass, arrived=arrived)
    if isinstance(found, Violation):
        return found, None
    if found is None and (why := cannot_wait(symbol.module)):
        problem = violation(symbol, "cannot be awaited", found=why, remedy="import it first")
        return problem, None
    return found, review.judge(patch.symbol, live=found is not None)


def _declared_well(
    adapter: Adapter, side: str, applying: list[Patch], skipped: list[Patch], review: Review
) -> None:
    if not applying:
        listing = "; ".join(f"{p.symbol} {p.versions}" for p in skipped) or "none declared"
        packages = {Symbol.parse(p.symbol).package for p in skipped}
        versions = ", ".join(f"{p} {review.version(p) or '(not installed)'}" for p in packages)
        review.violations.append(
            violation(
                f"adapter {adapter.name!r}",
                f"no patch of its {side} side is for what is installed",
                expected=listing,
                found=versions or "nothing to do",
                remedy="install a version the adapter supports (`patchkit matrix`)",
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


def _others(patch: Patch, target: Target, facts: Any, adapter: Adapter) -> list[Violation]:
    """Other adapters and foreign patchers on the target."""
    found = []
    holder = next(filter(None, map(process.owner, inert.layers(target.held))), None)
    if holder is not None and holder[0] not in adapter.after:
        found.append(
            violation(
                patch.symbol,
                "another adapter has patched it",
                expected="the original",
                found=f"the patch of adapter {holder[0]!r} ({holder[1]} side)",
                remedy=f"if this one belongs on top, declare after=({holder[0]!r},) in "
                f"adapter {adapter.name!r}; else uninstall the other first",
            )
        )
    for who in foreign.others(target, facts, process.is_ours):
        found.append(
            violation(
                patch.symbol,
                "somebody else has patched it",
                expected=f"the {facts.kind} defined in {facts.file}:{facts.line}"
                if facts is not None
                else "the function as its own package defines it",
                found=who,
                remedy="remove the other patch, or install before it is applied",
            )
        )
    return found


def _one_slot_each(live: list[tuple[Patch, Target, Any]], review: Review) -> None:
    """No slot twice, and no method twice along one method resolution order."""
    seen: dict[tuple[int, str, str | None], Patch] = {}
    for patch, target, _ in live:
        place = (id(target.owner), target.attribute, patch.key)
        first = seen.setdefault(place, patch)
        if first is not patch and first.identity != patch.identity:
            review.violations.append(
                violation(
                    patch.symbol,
                    "it is the same slot as another patch's",
                    expected="one patch per slot",
                    found=f"{first.symbol}, defined in {target.slot_name}",
                    remedy="patch the defining class once, or set on_subclass=True",
                )
            )
    for i, (patch, target, _) in enumerate(live):
        for other, theirs, _ in live[:i]:
            if _related(target, theirs) and not (
                other.symbol in patch.stacks_on or patch.symbol in other.stacks_on
            ):
                review.violations.append(
                    violation(
                        patch.symbol,
                        "the same method is wrapped in a base class too",
                        expected="one wrapper per call",
                        found=f"{other.symbol}, which super() can reach",
                        remedy=f"wrap only one of them, or say stacks_on=({other.symbol!r},)",
                    )
                )


def _related(one: Target, two: Target) -> bool:
    if one.attribute != two.attribute or one.owner is two.owner:
        return False
    if not (inert.is_class(one.owner) and inert.is_class(two.owner)):
        return False
    return one.owner in inert.mro(two.owner) or two.owner in inert.mro(one.owner)


def _old_objects(live: list[tuple[Patch, Target, Any]]) -> references.Private:
    """Every object that a reference to a target may hold; the caller's list alone holds them."""
    olds: dict[int, Any] = {}
    for patch, target, _ in live:
        if patch.action in ("register", "dispatch") or target.held is MISSING:
            continue
        if type(target.value) not in inert.ATOM_TYPES:
            olds[id(target.value)] = target.value
        if target.kind in ("staticmethod", "classmethod"):  # `alias = C.m` holds the function
            olds[id(target.function)] = target.function
    return references.Private(olds.values())


def _with_slots(
    patch: Patch,
    target: Target,
    facts: SymbolFacts | None,
    built: Built,
    scan: references.Scan,
    review: Review,
) -> PlannedPatch:
    slot: Slot
    if patch.action == "dispatch":
        slot = target.owner
        entries = [Entry(slot, target.held, built.value)]
        return PlannedPatch(patch, target, facts, tuple(entries), built, notes=built.notes)
    if patch.action == "register":
        name = f"{target.slot_name}[{patch.key!r}]"
        door = resolve(patch.door) if patch.door else None
        slot = RegistrySlot(target.value, patch.key, door, name)
        entries = [Entry(slot, slot.read(), built.value)]
        return PlannedPatch(patch, target, facts, tuple(entries), built, notes=built.notes)
    slot = AttributeSlot(target.owner, target.attribute, target.slot_name)
    entries = [Entry(slot, target.held, built.value)]
    settled = settle(patch, target, built, scan)
    review.violations += settled.violations
    entries += settled.entries
    return PlannedPatch(
        patch,
        target,
        facts,
        tuple(entries),
        built,
        settled.kept,
        settled.accepted,
        built.notes + settled.notes,
    )
