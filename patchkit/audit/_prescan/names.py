"""What the names of one function, or of a module's top, may stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from patchkit.audit._prescan.looks import PASSED, RETURNED, Import

# What a name may stand for, from what does not matter to what may.
HARMLESS = 0  # neither a module or class of others, nor anything that holds one
HOLDER = 1  # a container made here: writing into it is harmless, its items may not be
MAYBE = 2


@dataclass(slots=True, eq=False)
class Names:
    """What is known of the names; inner functions share them with the outer one.

    Attributes:
        outside: What the names of the module around may stand for.
        reads_source: Whether the text of an installed file is in reach.
        weights: Name -> the gravest thing that it may stand for.
        parameters: Parameters, without the receivers.
        receivers: ``self`` and ``cls``, where they are parameters.
        functions: Functions that are defined in a function.
        imported: Local names, and where they come from.
        derived: Name -> the names, or calls, on which it depends what it stands for.
        through: Name -> the names of which it may be the class or a part.
        copies: Names of copies of parameters.
        tables: Names of literals with something in them that may be foreign.
    """

    outside: Mapping[str, int]
    reads_source: bool
    weights: dict[str, int] = field(default_factory=dict)
    parameters: set[str] = field(default_factory=set)
    receivers: set[str] = field(default_factory=set)
    functions: set[str] = field(default_factory=set)
    imported: list[tuple[str, Import]] = field(default_factory=list)
    derived: dict[str, set[str]] = field(default_factory=dict)
    through: dict[str, set[str]] = field(default_factory=dict)
    copies: set[str] = field(default_factory=set)
    tables: set[str] = field(default_factory=set)

    def standing(self, name: str) -> int:
        """The gravest thing that a name may stand for."""
        known = self.weights.get(name)
        return self.outside.get(name, MAYBE) if known is None else known

    def is_given(self, name: str) -> bool:
        """Whether a local name stands for a parameter, or for a class in it."""
        todo, seen = [name], {name}
        while todo:
            for giver in self.through.get(todo.pop(), ()):
                if giver in self.parameters:
                    return True
                if giver not in seen:
                    seen.add(giver)
                    todo.append(giver)
        return False

    def roots(self, name: str) -> set[str]:
        """The names, or calls, on which it depends in the end what a name stands for."""
        found: set[str] = set()
        imported = {local for local, _ in self.imported}
        todo, seen = [name], {name}
        while todo:
            current = todo.pop()
            if not current or current.startswith((RETURNED, PASSED)):
                found.add(current)
                continue
            if current in imported:
                found.add(current)
            derived = self.derived.get(current)
            if derived is not None:
                todo += [r for r in derived if r not in seen]
                seen |= derived
            elif (
                current not in imported
                and current != name
                and (current in self.parameters or current in self.receivers)
            ):
                continue  # the caller knows
            elif current in self.outside:
                if self.outside[current] == MAYBE:
                    found.add(current)
                elif self.outside[current] == HOLDER:
                    found.add("")
            elif current not in imported:
                known = self.weights.get(current)
                if known is None or known == MAYBE or (known == HOLDER and current != name):
                    found.add("")
        return found
