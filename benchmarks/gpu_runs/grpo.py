"""Whole GRPO steps on one GPU, colocated: sample, old log-probabilities, step, weights.

``stock`` is vLLM as it comes and Hugging Face's own forward; a profile of ours adds
what it proves with: exact operators, parity gate, receipts on both sides. Both load new
weights the same way. Engine and trainer share the GPU by a fixed split of its memory.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu_runs import rollout
from benchmarks.gpu_runs.ending import ends_process


@ends_process
def run(model: Path, kind: str, steps: int, target: Path, rendezvous: str) -> None:
    """Write seconds per stage and step; ends the process."""
    import torch
    import torch.distributed as dist

    import patchkit
    from benchmarks.gpu_runs.trainer import Trainer

    exact = rollout.patched(kind)
    torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl", init_method=rendezvous, rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    control = dist.new_group(backend="gloo")
    import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    # Stock code runs outside exact_context: there every patch leaves it as it was.
    patchkit.install(adapter="qwen3_moe", side="trainer", profile=kind if exact else "vllm_bi")
    llm = _engine(model, kind)
    trainer = Trainer(model, budget=8192)
    deliver = _exact_delivery(trainer, llm, control) if exact else _stock_delivery(
        trainer, llm, control
    )  # fmt: skip
    deliver(0)
    report: dict[str, Any] = {"kind": kind, "steps": []}
    for number in range(steps):
        asked = rollout.prompts(500 + number, 128)
        seconds: dict[str, float] = {}
        clock = _Clock(seconds)
        samples, _, _ = rollout.sample(llm, asked + asked, 256)
        # Padded batches are best made of sequences of one length; packed ones do not care.
        samples.sort(key=lambda s: len(s.prompt))
        clock("sample")
        old = trainer.replay(samples) if exact else trainer.stock_replay(samples)
        torch.cuda.synchronize()
        clock("old_logprobs")
        advantages = [random.Random(i).gauss(0, 1) for i in range(len(samples))]
        prove = _prover(samples, old, number) if exact else None
        trainer.step(samples, advantages, prove=prove, exact=exact)
        clock("step_with_gate" if exact else "step")
        deliver(number + 1)
        clock("weights")
        report["steps"].append(
            {
                "tokens": sum(len(s.tokens) for s in samples),
                "all_tokens": sum(len(s.prompt) + len(s.tokens) for s in samples),
                "total_s": round(sum(seconds.values()), 3),
                **{name: round(value, 3) for name, value in seconds.items()},
            }
        )
        print(report["steps"][-1], flush=True)
        report["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        target.write_text(json.dumps(report, indent=1))


class _Clock:
    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds, self._last = seconds, time.perf_counter()

    def __call__(self, stage: str) -> None:
        now = time.perf_counter()
        self._seconds[stage] = now - self._last
        self._last = now


def _engine(model: Path, kind: str) -> Any:
    from vllm import LLM

    from patchkit.runtime.sync import IPC_BACKEND, register_backend

    register_backend()
    arguments = rollout.arguments(model, kind, chunk=8192, cache_gib=4.0)
    arguments["weight_transfer_config"] = {"backend": IPC_BACKEND}
    if not rollout.patched(kind):
        arguments["worker_extension_cls"] = "benchmarks.gpu_runs.stock_worker.StockWorker"
    return LLM(**arguments)


def _parts(trainer: Any, control: Any, version: int) -> Any:
    from patchkit.runtime.sharing import by_module, parts
    from patchkit_adapters.qwen3_moe.cuda_weights import NAMES

    trainer.reshard()
    groups = by_module(trainer.model, "model.layers")
    return parts(trainer.model, version, groups=groups, group=control, names=NAMES)


def _exact_delivery(trainer: Any, llm: Any, control: Any) -> Callable[[int], None]:
    from benchmarks.gpu_runs.claim import weight_map
    from patchkit.runtime.sync import WeightSync
    from patchkit.runtime.weights import reduce_receipt, tensors_receipt

    sync = WeightSync(llm, weight_map=weight_map(), mode="enforce", caches="reset")

    def deliver(version: int) -> None:
        trainer.reshard()
        own = tensors_receipt("trainer", trainer.model.named_parameters(), version=version)
        whole = reduce_receipt(own, control)
        if version:
            sync.update_from(version, _parts(trainer, control, version), whole)
        else:
            sync.begin(whole)

    return deliver


def _stock_delivery(trainer: Any, llm: Any, control: Any) -> Callable[[int], None]:
    def deliver(version: int) -> None:
        if version == 0:
            return
        llm.start_weight_update()
        for part in _parts(trainer, control, version):
            llm.update_weights({"update_info": part})
        llm.finish_weight_update()
        llm.reset_prefix_cache()

    return deliver


def _prover(samples: list[Any], old: dict[int, Any], version: int) -> Callable[..., None]:
    from patchkit.parity.gate import ParityGate
    from patchkit.parity.oracle import SelectedLogprobs

    gate = ParityGate(timeout_s=120)

    def chosen(indices: list[int], values: Any) -> SelectedLogprobs:
        return SelectedLogprobs.from_sequences(
            values,
            [samples[i].tokens for i in indices],
            [len(samples[i].prompt) for i in indices],
            sequence_numbers=indices,
        )

    def prove(indices: list[int], values: Any) -> None:
        parts = values.detach().cpu().split([len(samples[i].tokens) for i in indices])
        with gate.step(version=version) as step:
            step.rollout = chosen(indices, [samples[i].logprobs for i in indices])
            step.recompute = chosen(indices, [old[i] for i in indices])
            step.first_forward = chosen(indices, parts)
            step.start_versions = step.end_versions = version

    return prove
