"""A Ray actor that owns an engine is no worker of that engine; its children are none of it."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from patchkit.runtime.worker import FRONT_END, process_role


@pytest.fixture
def ray_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(get_actor_id=lambda: "a1")
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv(FRONT_END, raising=False)


@pytest.mark.parametrize(
    ("named", "role"),
    [("", ("worker", -1)), (str(os.getpid()), ("driver", 0)), ("1", ("worker", -1))],
)
def test_only_the_process_that_is_named_is_the_front_end(
    ray_actor: None, monkeypatch: pytest.MonkeyPatch, named: str, role: tuple[str, int]
) -> None:
    if named:
        monkeypatch.setenv(FRONT_END, named)
    assert process_role() == role
