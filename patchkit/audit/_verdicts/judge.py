"""The judge: which rules a patch comes under, and which of their verdicts is the gravest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from patchkit.audit._findings import NOTHING_AT_HAND, Verdict, VerdictKind
from patchkit.audit._guards import Ways
from patchkit.audit._selectors import off_path
from patchkit.audit._sightings import Sighting
from patchkit.audit._verdicts.bodies import changed, taken_up
from patchkit.audit._verdicts.case import Case, Subject
from patchkit.audit._verdicts.conditions import Conditions
from patchkit.audit._verdicts.fine import fine
from patchkit.audit._verdicts.fitting import signature
from patchkit.audit._verdicts.modules import module
from patchkit.audit._verdicts.operators import Operators
from patchkit.audit._verdicts.texts import rewriting
from patchkit.audit._verdicts.whereabouts import Whereabouts, moved
from patchkit.audit._versions import Versions

_GRAVITY = (
    VerdictKind.GUARD, VerdictKind.ANCHOR, VerdictKind.GONE, VerdictKind.MOVED,
    VerdictKind.RENAMED, VerdictKind.SIGNATURE, VerdictKind.ABSORBED, VerdictKind.OFF_PATH,
    VerdictKind.BODY,
)  # fmt: skip


class Judge:
    """Judges patches."""

    def __init__(
        self,
        versions: Versions,
        ways: Ways,
        settings: Mapping[str, str],
        sightings: Sequence[Sighting],
        uses: Callable[[str], bool] = lambda name: False,
        mentions: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self._versions = versions
        self._settings = settings
        self._conditions = Conditions(versions, ways, sightings)
        self._whereabouts = Whereabouts(versions, uses, mentions)
        self._operators = Operators(versions)

    def verdicts(self, subject: Subject, package: str) -> tuple[Verdict, ...]:
        """One verdict per version asked about."""
        targets = self._versions.of(package)
        if not targets:
            return (_nothing_at_hand(package),)
        found = [
            self._verdict(Case(subject, t, self._versions.base_of(t.package, t))) for t in targets
        ]
        if not any(v.kind is VerdictKind.GUARD for v in found):
            return tuple(found)
        # A guard that holds at another version asked about does what it is there for.
        elsewhere = any(v.kind is not VerdictKind.GUARD for v in found)
        return tuple(
            replace(v, level="note") if v.kind is VerdictKind.GUARD and elsewhere else v
            for v in found
        )

    def _verdict(self, case: Case) -> Verdict:
        guard = self._conditions.never_true(case)
        reasons = [] if guard is None else [guard]
        reasons += self._reasons(case)
        if not reasons:
            return fine(case)
        order = {kind: index for index, kind in enumerate(_GRAVITY)}
        silent = guard is not None and guard.silent
        if silent and len(reasons) > 1:
            # Told more by what became of the target than by the import that fails.
            reasons = [*reasons[1:], reasons[0]]
            first, *rest = reasons
        else:
            first, *rest = sorted(reasons, key=lambda v: order.get(v.kind, len(order)))
        return replace(
            first,
            also=(*first.also, *(f"{v.kind.sentence}: {v.text}" for v in rest)),
            alias_sites=case.alias_sites(),
            silent=silent or first.silent,
        )

    def _reasons(self, case: Case) -> Iterator[Verdict]:
        """What is found wanting, whether or not the patch is applied."""
        action = case.sighting.action
        if action == "rewrite":
            yield from rewriting(case, self._whereabouts)
        elif action == "dispatch":
            yield from self._operators.undeclared(case)
        elif action == "module" or ":" not in case.symbol:
            yield from module(case)
        else:
            yield from self._symbol(case)

    def _symbol(self, case: Case) -> Iterator[Verdict]:
        facts, fate = case.facts(), case.fate()
        if facts is None:
            yield from self._whereabouts.missing(case, fate)
            return
        if fate is not None and fate.new_symbol is not None:
            # The old path still leads there, by inheritance or by a re-export: what is
            # written to it is not seen by those who use the new place.
            yield moved(case, fate)
        before = case.before()
        yield from signature(case, facts, before)
        yield from taken_up(case, facts, before)
        why = off_path(case.target, facts.defined_at, self._settings)
        if why:
            yield Verdict(version=case.label, kind=VerdictKind.OFF_PATH, text=why)
        yield from changed(case, facts, fate)


def _nothing_at_hand(package: str) -> Verdict:
    if package in sys.stdlib_module_names:
        text = "it is of the standard library, which has no versions of its own"
    else:
        text = f"{package} is not installed: name a version of it with --against"
    return Verdict(version=f"{package} {NOTHING_AT_HAND}", kind=VerdictKind.UNKNOWN, text=text)
