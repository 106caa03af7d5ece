"""Preflight of patches: located, judged, searched for, built; slots and what they will hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from patchkit.engine import _dispatch as dispatch
from patchkit.engine import _foreign as foreign
from patchkit.engine import _inert as inert
from patchkit.engine import _process as process
from patchkit.engine import _references as references
from patchkit.engine._build import Built, build, build_static
from patchkit.engine._declare import Adapter, Patch
from patchkit.engine._holders import settle
from patchkit.engine._inert import MISSING
from patchkit.engine._journal import Entry
from patchkit.engine._late import too_late
from patchkit.engine._owners import Private
from patchkit.engine._pending import cannot_wait
from patchkit.engine._review import Review
from patchkit.engine._slots import AttributeSlot, RegistrySlot, Slot
from patchkit.engine._switch import Switch
from patchkit.engine._targets import Target, locate, resolve
from patchkit.engine.errors import violation
from patchkit.errors import Violation
from patchkit.symbols import Symbol, SymbolFacts


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
            rely(symbol, review)
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


def rely(symbol: str, review: Review) -> None:
    """Judge a symbol that is not patched: its source, and, where it is loaded, whose it is."""
    facts = review.judge(symbol)
    target = locate(Symbol.parse(symbol))
    if not isinstance(target, Target):
        return  # not loaded, or made on demand
    if target.function is None and facts is not None and facts.decorators:
        return  # a decorator's object (a kernel, say), which shows no function
    for who in foreign.others(target, facts, process.is_ours) or foreign.other_class(target):
        review.violations.append(
            violation(
                symbol,
                "somebody else has patched it, and the adapter relies on it",
                expected="what its own package defines",
                found=who,
                remedy="remove the other patch, or install before it is applied",
            )
        )


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


def _old_objects(live: list[tuple[Patch, Target, Any]]) -> Private:
    """Every object that a reference to a target may hold; the caller's list alone holds them."""
    olds: dict[int, Any] = {}
    for patch, target, _ in live:
        if patch.action in ("register", "dispatch") or target.held is MISSING:
            continue
        if type(target.value) not in inert.ATOM_TYPES:
            olds[id(target.value)] = target.value
        if target.kind in ("staticmethod", "classmethod"):  # `alias = C.m` holds the function
            olds[id(target.function)] = target.function
    return Private(olds.values())


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
