"""Two real FSDP2 ranks: one rank's trouble stops both, before backward, and leaves them usable."""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from patchkit.parity.fsdp import TrainerSettings
from patchkit.parity.trainer_group import TrainerGroup, TrainerGroupError
from patchkit.parity.workload import Rollout, mixed_prompts

pytestmark = [pytest.mark.e2e, pytest.mark.stack]

NEW = 12


def start(model: Path, *, gate_s: float = 20.0, collective_s: float = 60.0) -> TrainerGroup:
    return TrainerGroup.start(
        adapter="qwen3_moe",
        profile="cpu_tree",
        world_size=2,
        build="patchkit.parity.fsdp:build_trainer",
        options=TrainerSettings(model=model, gate_timeout_s=gate_s),
        environment={"OMP_NUM_THREADS": "1", "PATCHKIT_ENABLE": ""},
        timeout_s=120.0,
        collective_timeout_s=collective_s,
    )


@pytest.fixture(scope="module")
def group(tiny_model: Path) -> Iterator[TrainerGroup]:
    with start(tiny_model) as ranks:
        for manifest in ranks.ready():
            assert manifest["profile"] == "cpu_tree"
        yield ranks


def scored(group: TrainerGroup, version: int, seed: int = 0) -> list[Rollout]:
    """Sequences with the log-probabilities that an exact engine would have reported."""
    prompts = mixed_prompts(7, vocabulary=512, seed=seed, longest=80)
    rollouts = [
        Rollout(
            number=i,
            prompt=prompt,
            tokens=tuple(range(9 + i, 9 + i + NEW)),
            logprobs=(0.0,) * NEW,
            start_version=version,
            end_version=version,
        )
        for i, prompt in enumerate(prompts)
    ]
    shares = group("replay", rollouts=rollouts, exact=True)
    return [
        replace(r, logprobs=tuple(shares[i % 2][i // 2].tolist())) for i, r in enumerate(rollouts)
    ]


def one_ulp_up(value: float) -> float:
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return struct.unpack("<f", struct.pack("<i", bits + 1))[0]


def step(group: TrainerGroup, rollouts: list[Rollout], **options: Any) -> list[Any]:
    return group("step", rollouts=rollouts, advantages=[1.0, -1.0] * 3 + [0.5], **options)


def version(group: TrainerGroup) -> int:
    return group("receipt")[0].version


def refused(group: TrainerGroup, rollouts: list[Rollout], **options: Any) -> str:
    """The step is refused on both ranks with one and the same list; nothing moved."""
    before = group("receipt")[0]
    with pytest.raises(TrainerGroupError) as caught:
        step(group, rollouts, **options)
    errors = caught.value.errors
    assert sorted(errors) == [0, 1]
    assert str(errors[0]) == str(errors[1])
    after = group("receipt")[0]
    assert (after.version, after.digest) == (before.version, before.digest)
    return str(errors[0])


def test_a_last_bit_on_one_rank_stops_both_and_the_next_step_works(group: TrainerGroup) -> None:
    now = version(group)
    rollouts = scored(group, now)
    damaged = list(rollouts)
    logprobs = list(damaged[1].logprobs)
    logprobs[4] = one_ulp_up(logprobs[4])
    damaged[1] = replace(damaged[1], logprobs=tuple(logprobs))
    told = refused(group, damaged)
    position = len(rollouts[1].prompt) + 4
    assert "rank 1: rollout and recompute" in told
    assert f"sequence 1, position {position}" in told
    assert "rank 0:" not in told.replace("rank 0 ", "")

    answers = step(group, rollouts)
    assert answers[0].report.recompute.mismatch_count == 0
    assert answers[0].report.recompute.token_count == 7 * NEW
    assert version(group) == now + 1


def test_a_skipped_recompute_is_refused(group: TrainerGroup) -> None:
    assert "recompute" in refused(group, scored(group, version(group)), recompute=False)


def test_tokens_of_another_policy_version_are_refused(group: TrainerGroup) -> None:
    now = version(group)
    rollouts = scored(group, now)
    stale = [*rollouts[:2], replace(rollouts[2], start_version=now - 1), *rollouts[3:]]
    assert f"version {now - 1}" in refused(group, stale)


def test_an_exception_in_one_ranks_forward_ends_both_within_the_bounds(tiny_model: Path) -> None:
    with start(tiny_model, gate_s=4.0, collective_s=6.0) as ranks:
        ranks.ready()
        rollouts = scored(ranks, 0)
        broken = [*rollouts[:3], replace(rollouts[3], tokens=(10**6,) * NEW), *rollouts[4:]]
        began = time.monotonic()
        with pytest.raises(TrainerGroupError) as caught:
            step(ranks, broken)
        assert time.monotonic() - began < 60
        # Rank 1 raised; rank 0 was left alone in FSDP's own collective.
        assert sorted(caught.value.errors) == [0, 1]


def test_a_killed_rank_is_named_within_its_bound(tiny_model: Path) -> None:
    with start(tiny_model) as ranks:
        ranks.ready()
        os.kill(ranks.processes[1].pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(TrainerGroupError) as caught:
            step(ranks, [])
        assert time.monotonic() - began < 60
        assert caught.value.lost == {1: -signal.SIGKILL}
