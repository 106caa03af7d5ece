"""A process that says nothing is a fault of the trial; a patch that is missed says something."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from patchkit.engine import Adapter
from patchkit.errors import PatchkitError
from patchkit.parity import ablation

CASE = ablation.AblationCase(symbol="shop:f", side="rollout")
ADAPTER = Adapter(name="toy")


def forked(monkeypatch: pytest.MonkeyPatch, child: Any) -> ablation.AblationCase:
    monkeypatch.setattr(ablation, "_child", child)
    case, _ = ablation._forked(ADAPTER, CASE, None, Path(), None)  # type: ignore[arg-type]
    return case


def test_an_answer_comes_home(monkeypatch: pytest.MonkeyPatch):
    answer = ablation.AblationCase(symbol="shop:f", side="rollout", tokens=3, mismatches=1)
    found = forked(monkeypatch, lambda *a: (answer, None))
    assert (found.tokens, found.mismatches, found.noticed) == (3, 1, True)


@pytest.mark.parametrize("status", [0, 3])
def test_a_process_that_ends_without_a_word_is_an_error(
    monkeypatch: pytest.MonkeyPatch, status: int
):
    with pytest.raises(PatchkitError, match=f"without shop:f ended with status {status}"):
        forked(monkeypatch, lambda *a: os._exit(status))


def test_a_harness_that_raises_is_an_error_too(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> None:
        raise RuntimeError

    with pytest.raises(PatchkitError, match="ended with status 70"):
        forked(monkeypatch, broken)


def test_native_code_that_crashes_without_the_patch_has_noticed(monkeypatch: pytest.MonkeyPatch):
    found = forked(monkeypatch, lambda *a: os.kill(os.getpid(), signal.SIGKILL))
    assert found.error == "killed by signal 9"
    assert found.noticed


def test_no_submodule_refuses_what_the_missing_patch_changes():
    assert ablation.without(ADAPTER, "rollout", "shop:f").modules == ()
