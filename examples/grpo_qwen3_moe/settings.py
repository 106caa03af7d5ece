"""What a run of the loop is; plain data that every process may have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How long anything may take before the run stops and names who did not answer.

    Attributes:
        start_s: Starting an actor and building its engine or model.
        command_s: One command of an actor.
        gate_s: The parity gate's wait for the other ranks.
        collective_s: A rank's wait in a collective that another rank has left.
        grace_s: Once one rank is known to be lost: how long the others may still answer.
    """

    start_s: float = 300.0
    command_s: float = 300.0
    gate_s: float = 30.0
    collective_s: float = 60.0
    grace_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """One run.

    Attributes:
        folder: Checkpoints, logs, attestations, artifact.
        adapter: Adapter for both sides.
        profile: Its profile; the adapter's default if empty.
        seed: Of weights, prompts and sampling.
        refits: Weight updates; one more policy version than that is sampled and proven.
        prompts: Different prompts per step.
        group: Answers per prompt.
        new_tokens: Tokens per answer.
        tensor_parallel_size: vLLM workers.
        ranks: FSDP2 ranks.
        learning_rate: AdamW's.
        clip: PPO's clip range.
        device: ``cpu`` or ``cuda``.
        gpus_per_actor: Ray's ``num_gpus`` of each trainer rank and, times the
            tensor-parallel size, of the engine; fractions share a GPU.
        address: ``local`` for a cluster of the run's own, else a running cluster's.
        cost_pairs: Pairs of rounds with and without gate and receipts, timed afterwards.
        bounds: Time limits.
    """

    folder: Path
    adapter: str = "qwen3_moe"
    profile: str = ""
    seed: int = 0
    refits: int = 10
    prompts: int = 8
    group: int = 16
    new_tokens: int = 16
    tensor_parallel_size: int = 1
    ranks: int = 2
    learning_rate: float = 1e-2
    clip: float = 0.2
    device: str = "cpu"
    gpus_per_actor: float = 1.0
    address: str = "local"
    cost_pairs: int = 5
    bounds: Bounds = Bounds()
