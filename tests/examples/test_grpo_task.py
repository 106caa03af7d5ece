"""The example's toy task: fixed by its seed, and scored within groups."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from grpo_qwen3_moe.task import Task

TASK = Task(vocabulary=64, prompts=3, group=4, prompt_tokens=9)


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    assert TASK.batch(0, 1) == TASK.batch(0, 1)
    assert TASK.batch(0, 1) != TASK.batch(0, 2)
    assert TASK.batch(0, 1) != TASK.batch(1, 1)
    batch = TASK.batch(0, 1)
    assert len(batch) == 12
    assert [len(set(batch[i : i + 4])) for i in (0, 4, 8)] == [1, 1, 1]
    assert all(3 <= token < 64 for prompt in batch for token in prompt)


@pytest.mark.parametrize(("answer", "reward"), [((2, 4), 1.0), ((1, 3), 0.0), ((1, 2, 4, 6), 0.75)])
def test_the_reward_is_the_share_of_even_ids(answer: tuple[int, ...], reward: float) -> None:
    assert TASK.rewards([answer]) == [reward]


def test_answers_are_compared_within_their_group_only() -> None:
    found = TASK.advantages([1.0, 0.0, 1.0, 0.0, 0.5, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 0.8])
    assert found[:4] == pytest.approx([1, -1, 1, -1], rel=1e-4)
    assert found[4:8] == [0.0] * 4
    assert sum(found[8:]) == pytest.approx(0.0, abs=1e-6)
    assert found[11] == max(found[8:]) > 1.5
