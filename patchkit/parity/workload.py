"""Rollouts on their way from the engine to the trainer, and a workload that is hard to pass.

Everything is token ids and absolute positions; text never comes into it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from patchkit.runtime.versions import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sampled sequence.

    Attributes:
        number: Its number in the step; decides which rank replays it.
        prompt: Prompt token ids.
        tokens: Sampled token ids.
        logprobs: The engine's selected-token log-probability of each sampled token
            (float32 values).
        start_version: Policy version of the engine when sampling started.
        end_version: Policy version of the engine when it ended.
        cached_tokens: Prompt tokens served from the prefix cache.
        spans: Which version drew which token, where the engine itself says so.
    """

    number: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    start_version: int
    end_version: int
    cached_tokens: int = 0
    spans: tuple[Span, ...] = ()

    def __len__(self) -> int:
        return len(self.prompt) + len(self.tokens)


def mixed_prompts(
    count: int, *, vocabulary: int, seed: int, longest: int, shared_prefix: int = 64
) -> list[tuple[int, ...]]:
    """Prompts of very different lengths, half of them behind one common prefix.

    Args:
        count: How many.
        vocabulary: Token ids are drawn from ``[3, vocabulary)``.
        seed: Decides everything.
        longest: Longest prompt; must leave room behind the shared prefix.
        shared_prefix: Length of the prefix, so that the engine's cache is hit.
    """
    rng = random.Random(seed)

    def draw(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, vocabulary) for _ in range(length))

    prefix = draw(shared_prefix)
    prompts = []
    for index in range(count):
        if index % 2:
            prompts.append(prefix + draw(rng.randint(0, longest - shared_prefix)))
        else:
            prompts.append(draw(rng.choice((1, 2, 7, 31, 32, 33, rng.randint(1, longest)))))
    return prompts


def micro_batches(
    rollouts: Sequence[Rollout], rank: int, world_size: int, size: int
) -> Iterator[list[Rollout]]:
    """This rank's rollouts, in equally many micro-batches on every rank.

    FSDP gathers parameters in every forward, so ranks that ran different numbers
    of forwards would wait for each other for ever.
    """
    mine = list(rollouts[rank::world_size])
    most = -(-len(rollouts) // world_size)
    for start in range(0, most, size):
        yield mine[start : start + size]


def by_sequence(shares: Sequence[Sequence[Any]]) -> list[Any]:
    """Undo the ranks' interleaved shares: sequence i was replayed by rank i modulo ranks."""
    total = sum(len(share) for share in shares)
    return [shares[i % len(shares)][i // len(shares)] for i in range(total)]


class Clock:
    """Seconds per stage: each call ends the stage that it names."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def __call__(self, stage: str) -> None:
        now = time.monotonic()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now
