"""Toy modules on disk, so that source, import and spawn behave as in real life."""

from __future__ import annotations

import importlib
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from patchkit.engine import Adapter, Patch, installations
from patchkit.symbols import find_facts

_numbers = itertools.count()


class Toys:
    """Writes and imports modules with names that no test has used before."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.made: list[str] = []

    def write(self, source: str, name: str | None = None) -> str:
        name = name or f"toy{next(_numbers)}"
        self.made.append(name)
        path = self.root / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return name

    def __call__(self, source: str, name: str | None = None) -> ModuleType:
        return importlib.import_module(self.write(source, name))


@pytest.fixture
def mk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Toys]:
    toys = Toys(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield toys
    for name in toys.made:
        sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    """Every test leaves the process without installations, or fails."""
    yield
    left = [repr(i) for i in installations()]
    for installation in reversed(installations()):
        taken = [e.slot.name for e in installation._differing()]
        installation.uninstall(leave=tuple(taken))
    assert not left, f"left installed: {left}"


def patch(symbol: str, replacement: Any, action: Any = "replace", **more: Any) -> Patch:
    words = {"reason": "a test", "consequence": "none", "until": "never"}
    return Patch(symbol=symbol, action=action, replacement=replacement, **{**words, **more})


def reviewed(*symbols: str) -> dict[str, Any]:
    """What `patchkit adapt` would write for the symbols as they are now."""
    table: dict[str, Any] = {}
    for symbol in symbols:
        facts = find_facts(symbol)
        assert facts is not None, symbol
        table[symbol] = {facts.digest: ["1.0"]}
    return {"schema": 1, "symbols": table}


def rollout(*patches: Patch, name: str = "toy", **more: Any) -> Adapter:
    return Adapter(name=name, rollout=patches, **more)


def trainer(*patches: Patch, name: str = "toy", **more: Any) -> Adapter:
    return Adapter(name=name, trainer=patches, **more)


Maker = Callable[..., ModuleType]
