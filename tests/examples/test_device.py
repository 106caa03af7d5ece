"""What the loop says about a device before it makes or starts anything."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from grpo_qwen3_moe.__main__ import require_device
from grpo_qwen3_moe.settings import LoopSettings

from patchkit.engine import find_adapter, resolve_reference
from patchkit.errors import ConfigurationError


def settings(**changes: object) -> LoopSettings:
    return LoopSettings(folder=Path("nowhere"), **changes)  # type: ignore[arg-type]


def test_a_cpu_needs_nothing() -> None:
    require_device(settings(), 0)


@pytest.mark.parametrize(
    ("changes", "devices", "words"),
    [
        ({}, 0, "need 3, this machine has 0"),
        ({"ranks": 1, "tensor_parallel_size": 2}, 2, "need 3, this machine has 2"),
        ({"gpus_per_actor": 0.5}, 1, "need 1.5"),
        ({}, 8, "name a profile"),
    ],
)
def test_what_cannot_run_is_refused_at_once(
    changes: dict[str, object], devices: int, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        require_device(settings(device="cuda", **changes), devices)


def test_enough_gpus_and_a_profile_pass() -> None:
    require_device(settings(device="cuda", profile="vllm_bi", ranks=1), 2)
    require_device(settings(device="cuda", profile="vllm_bi", ranks=1, gpus_per_actor=0.5), 1)


@pytest.mark.stack
@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_log_probabilities_are_those_of_the_device(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool
) -> None:
    pytest.importorskip("torch")
    chosen = []
    for name in ("patchkit.providers", "patchkit.providers.cuda"):
        fake = SimpleNamespace(selected_token_logprobs=lambda *_, name=name: chosen.append(name))
        monkeypatch.setitem(sys.modules, name, fake)
    select = resolve_reference(find_adapter("qwen3_moe").logprobs)
    select(SimpleNamespace(is_cuda=on_gpu), None)
    assert chosen == ["patchkit.providers.cuda" if on_gpu else "patchkit.providers"]
