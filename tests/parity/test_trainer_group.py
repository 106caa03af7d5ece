"""The driver's end of the trainer's ranks."""

from __future__ import annotations

import time
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from patchkit.engine.errors import NotReachedError
from patchkit.parity.fsdp import FSDPTrainer
from patchkit.parity.trainer_group import TrainerGroup, TrainerGroupError

pytestmark = pytest.mark.stack


def build(settings: Any, installation: Any) -> Any:
    return SimpleNamespace(slow=lambda: time.sleep(2) or "slow", fast=lambda: "fast")


def test_a_late_answer_is_not_the_next_commands(monkeypatch):
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    with TrainerGroup.start(
        adapter="", profile="", world_size=1, build=f"{__name__}:build", options=None
    ) as group:
        group.ready()
        group.timeout_s = 0.5
        with pytest.raises(TrainerGroupError, match="no answer within"):
            group("slow")
        group.timeout_s = 60
        assert group("fast") == ["fast"]


def test_a_canary_run_that_failed_is_not_the_last():
    """A step that is tried again has to reach every patch as the first one had to."""
    runs = []

    @contextmanager
    def canary(*, watch_calls: bool):
        runs.append(watch_calls)
        yield
        if len(runs) == 1:
            raise NotReachedError("toy", [])

    trainer = FSDPTrainer.__new__(FSDPTrainer)
    trainer._installation, trainer._unproven = SimpleNamespace(canary=canary), True
    with pytest.raises(NotReachedError), trainer._canary():
        pass
    for _ in range(2):
        with trainer._canary():
            pass
    assert len(runs) == 2, "after one that succeeded there is none"
