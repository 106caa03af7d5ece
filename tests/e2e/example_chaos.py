"""Kill the engine while it samples, then a trainer rank while it steps; tell what was seen.

A process of its own: the contract has to stand before torch is imported.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from grpo_qwen3_moe.__main__ import prepare
from grpo_qwen3_moe.logs import open_log
from grpo_qwen3_moe.settings import Bounds, LoopSettings

BOUNDS = Bounds(gate_s=8.0, collective_s=10.0, grace_s=15.0)


class Killer:
    """Kills a process some time after a stage began; armed once."""

    def __init__(self) -> None:
        self.stage, self.pid, self.after_s = "", 0, 0.0

    def arm(self, stage: str, pid: int, after_s: float) -> None:
        self.stage, self.pid, self.after_s = stage, pid, after_s

    def __call__(self, stage: str) -> None:
        if stage == self.stage:
            self.stage = ""
            threading.Timer(self.after_s, os.kill, (self.pid, signal.SIGKILL)).start()


def main(folder: Path, workers: int = 1) -> dict[str, Any]:
    settings = LoopSettings(
        folder=folder / "run",
        prompts=8,
        group=8,
        new_tokens=48,
        bounds=BOUNDS,
        cost_pairs=0,
        tensor_parallel_size=workers,
    )
    settings.folder.mkdir()
    log = open_log(settings.folder)
    setup = prepare(settings)

    import ray
    from grpo_qwen3_moe.cluster import ActorLostError, connect
    from grpo_qwen3_moe.loop import OnPolicyLoop

    from patchkit.parity.trainer_group import TrainerGroupError
    from patchkit.runtime.liveness import EngineLostError

    connect(settings, setup.contract.environment)
    killer = Killer()

    def pids(role: str) -> dict[int, int]:
        files = sorted(settings.folder.glob(f"attestations/{role}-*.json"))
        found = [json.loads(f.read_text()) for f in files]
        return {a["rank"]: a["pid"] for a in found}

    told: dict[str, Any] = {}
    with OnPolicyLoop(settings, setup, log, killer) as loop:

        def versions() -> list[int]:
            return loop.tell("policy_version")

        loop.round(0)
        loop.refit(1)

        before = {"versions_before": versions(), "receipt_before": loop.tell("receipt")[0].digest}
        # With one worker it is the actor's own process, with more a process of the engine.
        victim = pids("worker")[workers - 1]
        killer.arm("sample", victim, 0.5)
        began = time.monotonic()
        try:
            loop.round(1)
        except (ActorLostError, EngineLostError) as error:
            told["engine"] = {
                "error": str(error),
                "victim": victim,
                "noticed_s": time.monotonic() - began,
                **before,
                "versions_after": versions(),
                "receipt_after": loop.tell("receipt")[0].digest,
            }
        loop.restart_rollout(1)
        again = loop.round(1)
        told["engine"]["restarted_round"] = {
            "version": again.version,
            "mismatches": again.mismatches,
        }

        if workers == 1:
            loop.refit(2)
            killer.arm("step", pids("trainer")[1], 0.3)
            began = time.monotonic()
            before_rank = versions()[0]
            try:
                loop.round(2)
            except TrainerGroupError as error:
                assert loop.trainer is not None
                told["rank"] = {
                    "error": str(error),
                    "lost": sorted(error.lost),
                    "noticed_s": time.monotonic() - began,
                    "bound_s": BOUNDS.gate_s + BOUNDS.collective_s + BOUNDS.grace_s,
                    "version_before": before_rank,
                    "version_after": loop.trainer.one(0, "policy_version"),
                }
    ray.shutdown()
    return told


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    json.dump(main(Path(sys.argv[1]), *map(int, sys.argv[2:])), answers)
