"""The driver's end of the trainer's ranks."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

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
