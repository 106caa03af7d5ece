"""What gate and receipts cost as ranks, tokens and parameters grow.

``python benchmarks/gate.py [RANKS …]`` starts real gloo processes and prints one JSON
object per measurement. Everything runs on one machine: with more ranks than cores
the times contain the wait for a core, so they bound what a cluster would see of
the arithmetic, not of a network.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from patchkit.parity.gate import ParityGate
from patchkit.parity.oracle import SelectedLogprobs
from patchkit.runtime.attestation import Attestation, Process, compare_attestations
from patchkit.runtime.weights import (
    ParameterReceipt,
    Piece,
    Receipt,
    compare_receipts,
    parameter_digest,
    reduce_receipt,
)

PASSES = 20


def _median(action, times: int) -> float:
    seconds = []
    for _ in range(times):
        begun = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def _tokens(count: int) -> SelectedLogprobs:
    return SelectedLogprobs(
        logprobs=-torch.rand(count),
        sequences=torch.zeros(count, dtype=torch.int64),
        positions=torch.arange(count),
        token_ids=torch.zeros(count, dtype=torch.int64),
    )


def _receipt(rank: int, world: int, parameters: int) -> Receipt:
    rows = 4 * world
    return Receipt(
        holder=f"rank {rank}",
        version=1,
        parameters={
            f"layer.{i}.weight": ParameterReceipt(
                name=f"layer.{i}.weight",
                dtype="bfloat16",
                shape=(rows, 8),
                pieces=(Piece((4 * rank, 0), (4, 8), i + rank),),
            )
            for i in range(parameters)
        },
    )


def _rank(rank: int, world: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=300),
    )
    gate = ParityGate(timeout_s=120)

    def passage(tokens: SelectedLogprobs) -> None:
        with gate.step(version=1) as step:
            step.start_versions = step.end_versions = 1
            step.rollout = step.recompute = step.first_forward = tokens

    found = {}
    for count in (256, 16384):
        tokens = _tokens(count)
        passage(tokens)
        found[f"gate_{count}_tokens_s"] = _median(lambda t=tokens: passage(t), PASSES)
    dist.barrier()
    mine = _receipt(rank, world, 500)
    found["receipts_sum_500_s"] = _median(lambda: reduce_receipt(mine), 5)
    found["receipts_gather_500_s"] = _median(lambda: reduce_receipt(mine, method="gather"), 3)
    dist.barrier()
    if rank == 0:
        print(
            json.dumps({"ranks": world, **{k: round(v, 6) for k, v in found.items()}}), flush=True
        )
    dist.barrier()
    os._exit(0)


def measure_ranks(world: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        processes = [context.Process(target=_rank, args=(r, world, folder)) for r in range(world)]
        for p in processes:
            p.start()
        for p in processes:
            p.join()


def measure_driver() -> None:
    """What the driver does alone, up to sizes that no one machine can run."""
    for workers, parameters in ((8, 500), (64, 500), (1024, 500)):
        trainer = Receipt(
            holder="trainer",
            version=1,
            parameters={
                n: ParameterReceipt(
                    name=n,
                    dtype=p.dtype,
                    shape=(4 * workers, 8),
                    pieces=(Piece((0, 0), (4 * workers, 8), sum(i + r for r in range(workers))),),
                )
                for i, (n, p) in enumerate(_receipt(0, workers, parameters).parameters.items())
            },
        )
        receipts = [_receipt(r, workers, parameters) for r in range(workers)]
        begun = time.perf_counter()
        violations = compare_receipts(trainer, receipts)
        seconds = time.perf_counter() - begun
        assert violations == []
        print(
            json.dumps(
                {
                    "compare_receipts_s": round(seconds, 4),
                    "workers": workers,
                    "parameters": parameters,
                }
            )
        )
    for count in (8, 1024):
        attestations = [
            Attestation(
                role="worker",
                rank=r,
                pid=r,
                host="h",
                adapter="a",
                contract_digest="c",
                manifest_digest="m",
                state="active",
                environment={f"V{i}": "1" for i in range(20)},
            )
            for r in range(count)
        ]
        expected = [Process("worker", r) for r in range(count)]
        environment = {f"V{i}": "1" for i in range(20)}
        begun = time.perf_counter()
        assert not compare_attestations(attestations, expected, environment=environment)
        seconds = time.perf_counter() - begun
        print(json.dumps({"compare_attestations_s": round(seconds, 5), "processes": count}))
    torch.set_num_threads(1)
    weight = torch.randn(4096, 4096).to(torch.bfloat16)
    seconds = _median(lambda: parameter_digest(weight, (4096, 4096), (0, 0)), 5)
    print(json.dumps({"digest_elements_per_s_and_core": round(weight.numel() / seconds)}))


if __name__ == "__main__":
    measure_driver()
    for size in [int(a) for a in sys.argv[1:]] or [2, 4, 8, 16, 32]:
        measure_ranks(size)
