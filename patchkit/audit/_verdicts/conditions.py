"""Whether a patch is applied at all at one version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from patchkit.audit._findings import Verdict, VerdictKind
from patchkit.audit._guards import Ways, World, all_true, describe
from patchkit.audit._sightings import Sighting
from patchkit.audit._values import Guard, Ref
from patchkit.audit._verdicts.case import Case
from patchkit.audit._versions import Target, Versions


class AtVersion(World):
    """The packages as they are when one version of one package is asked about.

    Args:
        target: The version.
        versions: All versions at hand.
        added: What the project itself puts in places, and may look for there.
        judged: The patch whose own conditions are asked about: it adds nothing yet.
    """

    def __init__(
        self,
        target: Target,
        versions: Versions,
        added: Mapping[str, int],
        judged: str,
    ) -> None:
        self._target = target
        self._versions = versions
        self._added = added
        self._judged = judged

    def version(self, package: str) -> str | None:
        found = self._of(package)
        return found.version if found is not None else None

    def has(self, place: Ref) -> bool | None:
        found = self._of(place.root)
        there = found.has(place) if found is not None else None
        if there is False and self._added.get(place.dotted, 0) > (place.dotted == self._judged):
            return None
        return there

    def holds_code(self, place: Ref) -> bool | None:
        found = self._of(place.root)
        return found.holds_code(place) if found is not None else None

    def _of(self, package: str) -> Target | None:
        if package == self._target.package:
            return self._target
        asked = self._versions.asked.get(package)
        if asked:
            return asked[-1]
        return self._versions.installed(package)


class Conditions:
    """The tests that a project's patches stand under."""

    def __init__(self, versions: Versions, ways: Ways, sightings: Sequence[Sighting]) -> None:
        self._versions = versions
        self._ways = ways
        self._added = Counter(s.target.dotted for s in sightings if isinstance(s.target, Ref))
        # Tries whose handlers patch something else instead.
        self._fallbacks = {g.site for s in sightings for g in s.guards if g.kind == "except"}

    def never_true(self, case: Case) -> Verdict | None:
        """The verdict where the tests on the way to a patch do not hold."""
        place = case.sighting.target
        judged = place.dotted if isinstance(place, Ref) else ""
        world = AtVersion(case.target, self._versions, self._added, judged)
        guards, function = case.sighting.guards, case.sighting.function
        own = all_true(guards, world)
        reached = self._ways.reached(function, world)
        if own is not False and reached is not False:
            return None
        if own is False:
            failing = _failing(guards, world)
            text = " and ".join(describe(failing))
            silent = self._is_silent(failing)
        else:
            failing = [
                g for guards in self._ways.conditions(function) for g in _failing(guards, world)
            ]
            text = " and ".join(describe(failing)) or "no call of it is reached"
            silent = bool(failing) and self._is_silent(failing)
        if silent:
            text = f"{text}: that is false, the import fails and nobody is told"
        else:
            text = f"{text}: that is false, the patch is not applied"
        return Verdict(version=case.label, kind=VerdictKind.GUARD, text=text, silent=silent)

    def _is_silent(self, failing: Iterable[Guard]) -> bool:
        """Whether nothing but failed imports, for which nobody has an answer, is in the way."""
        return all(g.kind == "try" and g.site not in self._fallbacks for g in failing)


def _failing(guards: Iterable[Guard], world: World) -> list[Guard]:
    return [g for g in guards if all_true((g,), world) is False]
