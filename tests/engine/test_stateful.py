"""Random histories against a model of what must be true.

Installs, undos, verifications, reloads, foreign patches, late imports, aliases
and copies in any order. The model knows layers on slots; the engine must agree
with it about every result and every refusal.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import pickle
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from patchkit.engine import Installation, install, installations
from patchkit.engine.errors import (
    AlreadyInstalledError,
    PreflightError,
    UndoRefusedError,
    VerificationError,
)

from .conftest import patch, rollout

_numbers = itertools.count()
_temporary = tempfile.TemporaryDirectory(prefix="patchkit-stateful-")  # gone with the process
_folder = Path(_temporary.name)

UP = """
def f(): return ['old']
def g(): return ['old']
class C:
    def m(self): return ['old']
"""
LATER = "def h(): return ['old']\n"


@dataclass(eq=False)
class Node:
    """A layer: what a holder of it gets is what is below, plus the layer's mark while alive."""

    mark: str
    below: Node | None = None
    alive: bool = True

    def value(self) -> list[str]:
        under = self.below.value() if self.below is not None else []
        return [*under, self.mark] if self.alive else under


@dataclass
class Installed:
    handle: Installation
    nodes: dict[str, Node]
    moved: list[tuple[Any, Node]] = field(default_factory=list)  # what was rebound, and to what
    reloaded: bool = False
    broken: bool = False


def adding(mark: str) -> Any:
    def factory(original):
        def f():
            return [*original(), mark]

        def m(self):
            return [*original(self), mark]

        return m if "self" in original.__code__.co_varnames else f

    return factory


@dataclass(eq=False)
class Alias:
    module: Any
    node: Node


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        number = next(_numbers)
        self.name, self.later = f"state_up{number}", f"state_later{number}"
        (_folder / f"{self.name}.py").write_text(UP)
        (_folder / f"{self.later}.py").write_text(LATER)
        sys.path.insert(0, str(_folder))
        importlib.invalidate_caches()
        self.up = importlib.import_module(self.name)
        n, later = self.name, self.later
        self.adapters = {
            "A": rollout(
                patch(f"{n}:f", adding("A"), "wrap"),
                patch(f"{n}:C.m", adding("A"), "wrap"),
                name="A",
            ),
            "B": rollout(patch(f"{n}:f", adding("B"), "wrap"), name="B", after=("A",)),
            "D": rollout(
                patch(f"{n}:g", adding("D"), "wrap"),
                patch(f"{later}:h", adding("D"), "wrap"),
                name="D",
            ),
        }
        self.places = {"A": ("f", "m"), "B": ("f",), "D": ("g", "h")}
        self.top = {place: Node("old") for place in ("f", "g", "m", "h")}
        self.installed: dict[str, Installed] = {}
        self.aliases: list[Alias] = []
        self.foreign: list[Node] = []
        self.foreign_functions: list[Any] = []
        self.imported = False

    def teardown(self) -> None:
        for name in ("B", "A", "D"):
            if name in self.installed:
                handle = self.installed[name].handle
                handle.uninstall(leave=tuple(e.slot.name for e in handle._differing()))
        assert installations() == []
        assert not [f for f in sys.meta_path if type(f).__name__ == "ImportWatch"]
        sys.path.remove(str(_folder))
        names = [self.name, self.later, *(a.module.__name__ for a in self.aliases)]
        for name in names:
            sys.modules.pop(name, None)
            (_folder / f"{name}.py").unlink()

    # -- the engine's operations ------------------------------------------------

    def can_install(self, name: str) -> bool:
        allowed = {"A": {"old"}, "B": {"old", "A"}, "D": {"old"}}[name]
        tops = [self.top[place] for place in self.places[name] if self.live(place)]
        # A dead layer is a leftover that a foreign patcher put back into the slot.
        return all(top.alive and top.mark in allowed for top in tops)

    def live(self, place: str) -> bool:
        return place != "h" or self.imported

    @rule(name=st.sampled_from("ABD"))
    def install(self, name: str) -> None:
        known = self.installed.get(name)
        if known is not None:
            if known.broken:
                with pytest.raises(AlreadyInstalledError):
                    install(self.adapters[name], "rollout")
            else:
                assert install(self.adapters[name], "rollout") is known.handle
            return
        if not self.can_install(name):
            with pytest.raises(PreflightError, match="has patched it"):
                install(self.adapters[name], "rollout")
            return
        made = Installed(install(self.adapters[name], "rollout"), {})
        self.installed[name] = made
        for place in self.places[name]:
            if self.live(place):
                self.push(made, name, place)
        waiting = name == "D" and not self.imported
        assert made.handle.state == ("pending" if waiting else "active")

    def push(self, made: Installed, name: str, place: str) -> None:
        old = self.top[place]
        made.nodes[place] = self.top[place] = Node(name, old)
        for alias in self.aliases:
            if alias.node is old:
                alias.node = made.nodes[place]
                made.moved.append((alias, made.nodes[place]))
        for node in self.foreign:
            if node.below is old and node is not self.top[place]:
                node.below = made.nodes[place]
                made.moved.append((node, made.nodes[place]))

    def on_top(self, made: Installed) -> bool:
        return all(self.top[p] is n for p, n in made.nodes.items()) and all(
            (o.node if isinstance(o, Alias) else o.below) is n for o, n in made.moved
        )

    @precondition(lambda self: self.installed)
    @rule(data=st.data())
    def verify(self, data: Any) -> None:
        made = self.installed[data.draw(st.sampled_from(sorted(self.installed)))]
        if self.on_top(made) and not made.reloaded:
            made.handle.verify()
            made.broken = False
        else:
            with pytest.raises(VerificationError):
                made.handle.verify()
            made.broken = True

    @precondition(lambda self: self.installed)
    @rule(data=st.data(), leave=st.booleans())
    def uninstall(self, data: Any, leave: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.installed)))
        made = self.installed[name]
        if not self.on_top(made) and not leave:
            with pytest.raises(UndoRefusedError):
                made.handle.uninstall()
            return
        taken = [e.slot.name for e in made.handle._differing()]
        made.handle.uninstall(leave=tuple(taken))
        for place, node in made.nodes.items():
            if self.top[place] is node:
                assert node.below is not None
                self.top[place] = node.below
            node.alive = False
        for holder, node in made.moved:
            if isinstance(holder, Alias) and holder.node is node:
                assert node.below is not None
                holder.node = node.below
            elif isinstance(holder, Node) and holder.below is node:
                holder.below = node.below
        del self.installed[name]
        assert made.handle.state == "undone"

    # -- the rest of the world ----------------------------------------------------

    @rule()
    def reload(self) -> None:
        importlib.reload(self.up)
        for place in ("f", "g", "m"):
            self.top[place] = Node("old")
        for made in self.installed.values():
            made.reloaded = made.broken = True

    @rule()
    def foreign_patch(self) -> None:
        inside = self.up.f

        def foreign():
            return [*inside(), "X"]

        self.up.f = foreign
        self.foreign_functions.append(foreign)
        self.top["f"] = Node("X", self.top["f"])
        self.foreign.append(self.top["f"])

    @precondition(lambda self: self.top["f"].mark == "X")
    @rule()
    def foreign_goes(self) -> None:
        self.up.f = self.up.f.__closure__[0].cell_contents
        below = self.top["f"].below
        assert below is not None
        self.top["f"] = below

    @precondition(lambda self: len(self.aliases) < 4)
    @rule(other=st.booleans())
    def take_alias(self, other: bool) -> None:
        name = f"{self.name}_user{len(self.aliases)}"
        (_folder / f"{name}.py").write_text(
            f"from {self.name} import f as {'fast' if other else 'f'}\n"
        )
        importlib.invalidate_caches()
        self.aliases.append(Alias(importlib.import_module(name), self.top["f"]))

    @precondition(lambda self: not self.imported)
    @rule()
    def import_late(self) -> None:
        importlib.import_module(self.later)
        self.imported = True
        waiting = self.installed.get("D")
        if waiting is not None:
            self.push(waiting, "D", "h")
            if not waiting.reloaded:
                assert waiting.handle.state == "active"
                waiting.broken = False

    # -- what must be true ---------------------------------------------------------

    @invariant()
    def results_are_those_of_the_model(self) -> None:
        assert self.up.f() == self.top["f"].value()
        assert self.up.g() == self.top["g"].value()
        assert self.up.C().m() == self.top["m"].value()
        for alias in self.aliases:
            f = getattr(alias.module, "fast", None) or alias.module.f
            assert f() == alias.node.value()
        if self.imported:
            assert sys.modules[self.later].h() == self.top["h"].value()

    @invariant()
    def copies_and_pickles_are_like_the_original(self) -> None:
        instance = copy.deepcopy(self.up.C())
        assert instance.m() == self.top["m"].value()
        assert pickle.loads(pickle.dumps(self.up.g)) is self.up.g
        assert pickle.loads(pickle.dumps(self.up.C)) is self.up.C

    @invariant()
    def what_is_installed_is_known(self) -> None:
        assert {i.adapter.name for i in installations()} == set(self.installed)


_checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=200, stateful_step_count=12, deadline=None, suppress_health_check=_checks
)


class _Nightly(Histories):
    pass


TestManyHistories = pytest.mark.timeout(7200)(pytest.mark.nightly(_Nightly.TestCase))
TestManyHistories.settings = settings(
    max_examples=10_000, stateful_step_count=12, deadline=None, suppress_health_check=_checks
)
