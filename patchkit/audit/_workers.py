"""Which patches run in spawned workers, and through which entry point."""

from __future__ import annotations

from patchkit.audit._sightings import Door, Sighting
from patchkit.audit._survey import Survey
from patchkit.audit._values import Func


class Workers:
    """What is reached from the entry points that workers come through."""

    def __init__(self, survey: Survey) -> None:
        self._survey = survey
        self._reached: dict[str, list[str]] = {}
        self._imports: dict[str, set[str]] = {}
        for source, module in survey.found.imports:
            self._imports.setdefault(source, set()).add(module)
        self._calls: dict[str, set[str]] = {}
        for edge in survey.found.edges:
            source = edge.caller.reference if edge.caller is not None else edge.module.name
            self._calls.setdefault(source, set()).add(edge.callee.reference)
        for door in survey.found.doors:
            for place in self._closure(door):
                self._reached.setdefault(place, []).append(_name(door))

    def of(self, sighting: Sighting) -> tuple[str, ...]:
        """The entry points through which a write runs in a worker."""
        return tuple(dict.fromkeys(self._reached.get(_place(sighting.function, sighting), ())))

    def _closure(self, door: Door) -> set[str]:
        """Modules and functions that run when a worker comes through a door."""
        module, _, name = door.target.partition(":")
        name = name.partition("[")[0].strip()
        found: set[str] = set()
        todo = self._entered(module)
        if name:
            todo.append(f"{module}:{name}")
            if door.group in ("worker_extension_cls", "worker_cls"):
                todo.pop()
        while todo:
            place = todo.pop()
            if place in found:
                continue
            found.add(place)
            if ":" not in place:
                self._survey.imports_of(place)
            for imported in sorted(self._imports.get(place, ())):
                todo += self._entered(imported)
            for called in sorted(self._calls.get(place, ())):
                todo.append(called)
                todo += self._entered(called.partition(":")[0])
        return found

    @staticmethod
    def _entered(module: str) -> list[str]:
        """Importing a module runs its parents, too."""
        parts = module.split(".")
        return [".".join(parts[:i]) for i in range(1, len(parts) + 1)]


def _place(function: Func | None, sighting: Sighting) -> str:
    return function.reference if function is not None else sighting.module.name


def _name(door: Door) -> str:
    return f"{door.group}: {door.name + ' = ' if door.name else ''}{door.target}"
