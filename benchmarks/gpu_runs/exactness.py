"""Rollout, replay and training forward bit for bit, before and after weight updates."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_runs.rollout import Sample, arguments, counters, prompts, sample
from benchmarks.gpu_runs.trainer import Trainer

WEIGHT_MAP = "patchkit_adapters.qwen3_moe.weights:weight_map"


def run(rank: int, *arguments: Any) -> None:
    """:func:`_run`, ending the process at once when it fails.

    An ordinary exit would wait for the engine's processes, which wait for work.
    """
    try:
        _run(rank, *arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _run(
    rank: int,
    world: int,
    model: Path,
    kind: str,
    expert_parallel: bool,
    count: int,
    length: int,
    updates: int,
    cache_gib: float,
    target: Path,
    rendezvous: str,
    turn: Path | None,
) -> None:
    """One rank of the trainer; rank 0 also drives the engine and writes ``target``."""
    import patchkit
    from patchkit_adapters.qwen3_moe.cuda_trainer import match_rollout

    begin = time.perf_counter()

    def say(text: str) -> None:
        if rank == 0:
            print(f"[{time.perf_counter() - begin:6.1f}] {text}", flush=True)

    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=rendezvous, rank=rank, world_size=world,
        device_id=torch.device("cuda", rank),
    )  # fmt: skip
    # Waiting on the GPU would take it from the engine that is being waited for.
    control = dist.new_group(backend="gloo")
    installation = patchkit.install(adapter="qwen3_moe", side="trainer", profile="vllm_bi")
    match_rollout(tensor_parallel=world, expert_parallel=expert_parallel)
    llm: Any = None
    if rank == 0:
        from vllm import LLM

        llm = LLM(
            **arguments(
                model, kind, tensor_parallel=world, expert_parallel=expert_parallel,
                chunk=2048, cache_gib=cache_gib,
            )
        )  # fmt: skip
        say("engine is up")
    dist.barrier(control)
    trainer = Trainer(model)
    say("trainer is up")
    if turn is not None and rank == 0:
        # Held until the process ends: of several runs on these GPUs one samples at a time.
        lock = open(turn, "w")  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_EX)
        say("its turn")
    dist.barrier(control)
    report: dict[str, Any] = {
        "kind": kind,
        "tensor_parallel": world,
        "expert_parallel": expert_parallel,
        "trainer_manifest": installation.manifest.digest,
        "phases": [],
    }
    if rank == 0:
        report["workers"] = [_short(a) for a in llm.collective_rpc("patchkit_attest")]
    for version in range(updates + 1):
        phase: dict[str, Any] = {"version": version}
        if version:
            phase["sync"] = _deliver(trainer, llm, version, control)
            say(f"version {version} delivered: {phase['sync']}")
        else:
            phase["sync"] = {"differences": _receipts(trainer, llm, 0, control)}
        samples = _sampled(llm, version, count, length, phase, control)
        say(f"version {version} sampled: {phase.get('sampling')}")
        start = time.perf_counter()
        replayed = _gathered(trainer.replay(samples), control)
        phase["replay_s"] = round(time.perf_counter() - start, 3)
        if rank == 0:
            phase["rollout_replay"] = _compared(samples, replayed)
            say(f"version {version} rollout against replay: {phase['rollout_replay']}")
        if version < updates:
            advantages = [random.Random(i).gauss(0, 1) for i in range(len(samples))]
            start = time.perf_counter()
            step = trainer.step(samples, advantages)
            phase["step_s"] = round(time.perf_counter() - start, 3)
            phase["grad_norm"] = step["grad_norm"]
            trained = _gathered(step["logprobs"], control)
            if rank == 0:
                phase["rollout_training"] = _compared(samples, trained)
                say(f"version {version} rollout against training: {phase['rollout_training']}")
        installation.verify()
        report["phases"].append(phase)
        if rank == 0:
            target.write_text(json.dumps(report, indent=1))
    if rank == 0:
        pairs = [p[k] for p in report["phases"] for k in p if k.startswith("rollout_")]
        report["tokens"] = sum(p["rollout_replay"]["tokens"] for p in report["phases"])
        report["mismatches"] = sum(p["mismatches"] for p in pairs)
        report["workers_after"] = [_short(a) for a in llm.collective_rpc("patchkit_attest")]
        target.write_text(json.dumps(report, indent=1))
        say(f"tokens {report['tokens']}, mismatches {report['mismatches']}")
    dist.barrier(control)
    # Engine and process group end with the process; a destructor could hang.
    os._exit(0)


def _short(attestation: dict[str, Any]) -> dict[str, Any]:
    return {k: attestation.get(k) for k in ("role", "rank", "state", "manifest_digest", "place")}


def _sampled(
    llm: Any, version: int, count: int, length: int, phase: dict[str, Any], control: Any
) -> list[Sample]:
    """Every prompt twice in one call: the second time its prefix is in the cache."""
    box: list[Any] = [None]
    if llm is not None:
        asked = prompts(100 + version, count)
        samples, seconds, cached = sample(llm, asked + asked, length)
        phase["sampling"] = {
            "tokens": sum(len(s.tokens) for s in samples),
            "seconds": round(seconds, 3),
            "cached_prompt_tokens": cached,
            **counters(llm),
        }
        box = [[(s.prompt, s.tokens, s.logprobs) for s in samples]]
    dist.broadcast_object_list(box, src=0, group=control)
    return [Sample(*parts) for parts in box[0]]


def _gathered(mine: dict[int, torch.Tensor], control: Any) -> dict[int, torch.Tensor]:
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine, group=control)
    return {index: values for part in everybody for index, values in part.items()}


def _compared(samples: list[Sample], found: dict[int, torch.Tensor]) -> dict[str, Any]:
    from patchkit.parity.metrics import compare_logprobs

    rollout = torch.tensor([v for s in samples for v in s.logprobs], dtype=torch.float32)
    metrics = compare_logprobs(
        rollout,
        torch.cat([found[i] for i in range(len(samples))]),
        positions=[len(s.prompt) + i for s in samples for i in range(len(s.tokens))],
        token_ids=[t for s in samples for t in s.tokens],
        sequences=[i for i, s in enumerate(samples) for _ in s.tokens],
        first=3,
    )
    data = metrics.as_dict()
    return {
        "tokens": data["token_count"],
        "mismatches": data["mismatch_count"],
        "max_absdiff": data["max_absdiff"],
        "k3_mean": data["k3_mean"],
        "first": [str(m) for m in metrics.first_mismatches],
        "violations": [str(v) for v in metrics.violations],
    }


def _whole(trainer: Trainer) -> list[tuple[str, torch.Tensor]]:
    return [
        (name, p.full_tensor() if hasattr(p, "full_tensor") else p.detach())
        for name, p in trainer.model.named_parameters()
    ]


def _deliver(trainer: Trainer, llm: Any, version: int, control: Any) -> dict[str, Any]:
    from patchkit_adapters.qwen3_moe.cuda_weights import share

    start = time.perf_counter()
    with torch.no_grad():
        uuid, handles, kept = share(_whole(trainer))
    everybody: list[Any] = [None] * trainer.world
    dist.all_gather_object(everybody, (uuid, handles), group=control)
    result: dict[str, Any] = {}
    if llm is not None:
        llm.collective_rpc("patchkit_load_shared", args=(pickle.dumps(dict(everybody)),))
        result["prefix_cache_reset"] = llm.reset_prefix_cache()
        result["load_s"] = round(time.perf_counter() - start, 3)
    dist.barrier(control)
    del kept
    torch.cuda.ipc_collect()
    result["differences"] = _receipts(trainer, llm, version, control)
    result["seconds"] = round(time.perf_counter() - start, 3)
    return result


def _receipts(trainer: Trainer, llm: Any, version: int, control: Any) -> Any:
    """What the workers hold against what the trainer has; an empty list is agreement."""
    from patchkit.runtime.weights import (
        Receipt,
        compare_receipts,
        reduce_receipt,
        tensors_receipt,
    )

    own = tensors_receipt(
        f"trainer {trainer.rank}", trainer.model.named_parameters(), version=version
    )
    whole = reduce_receipt(own, control)
    if llm is None:
        return None
    workers = llm.collective_rpc("patchkit_receipt", args=(WEIGHT_MAP, version))
    violations = compare_receipts(whole, [Receipt.from_dict(w) for w in workers])
    return [str(v) for v in violations[:5]]
