"""vLLM engines for the runs: arguments, environment, sampling, throughput."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_runs.ending import ends_process
from benchmarks.gpu_runs.model import has_weights

# What is compared. The first two are vLLM alone.
KINDS = (
    "stock",
    "batch_invariant",
    "vllm_bi",
    "vllm_bi_fast",
    "tp_independent",
    "tp_independent_4",
)
# Kinds whose bits are to be equal.
SAME_BITS = {"vllm_bi": ("vllm_bi", "vllm_bi_fast")}
CAPTURED = [1, 2, 4, 8, 16, 32, 64, 128, 192, 256]
VOCABULARY = 151936


def patched(kind: str) -> bool:
    return kind not in ("stock", "batch_invariant")


def environment(kind: str, scratch: Path, *, tag: str = "") -> dict[str, str]:
    """Variables for a process that starts an engine of this kind."""
    place = scratch / f"{kind}{tag}"
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CACHE_ROOT": str(place / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"),
        "TRITON_CACHE_DIR": str(place / "triton"),
        "PYTHONUNBUFFERED": "1",
        # These machines share NVLink switches: multicast stays off.
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }
    if kind != "stock":
        variables["VLLM_BATCH_INVARIANT"] = "1"
    if patched(kind):
        variables |= {
            "PATCHKIT_ENABLE": "1",
            "PATCHKIT_ADAPTER": "qwen3_moe",
            "PATCHKIT_PROFILE": kind,
            "PATCHKIT_RUN_DIR": str(place / "run"),
        }
    return variables


def arguments(
    model: Path,
    kind: str,
    *,
    tensor_parallel: int = 1,
    expert_parallel: bool = False,
    sequences: int = 256,
    chunk: int = 8192,
    cache_gib: float = 2.0,
) -> dict[str, Any]:
    """For ``vllm.LLM``."""
    compilation: dict[str, Any] = {
        "cudagraph_capture_sizes": [size for size in CAPTURED if size <= sequences]
    }
    found: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "max_model_len": 1024,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": chunk,
        "logprobs_mode": "processed_logprobs",
        "dtype": "bfloat16",
        "seed": 0,
        "disable_log_stats": False,
        "kv_cache_memory_bytes": int(cache_gib * 2**30),
        "gpu_memory_utilization": 0.08,
        "tensor_parallel_size": tensor_parallel,
        "enable_expert_parallel": expert_parallel,
        "compilation_config": compilation,
        # Speed does not ask for weights; whoever asks for bits has them in the folder.
        "load_format": "auto" if has_weights(model) else "dummy",
    }
    if patched(kind):
        # Without this the norm is inductor's own and the patch is never reached.
        compilation["custom_ops"] = ["none", "+rms_norm"]
        found["worker_extension_cls"] = "patchkit.runtime.extension.WorkerExtension"
    return found


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled sequence with the engine's log-probabilities."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def prompts(seed: int, count: int, low: int = 16, high: int = 255) -> list[list[int]]:
    """Random prompts; their lengths are the same for every seed, so that no shape is new."""
    tokens, lengths = random.Random(seed), random.Random(7)
    return [
        [tokens.randrange(3, VOCABULARY) for _ in range(lengths.randint(low, high))]
        for _ in range(count)
    ]


def sample(
    llm: Any, asked: list[list[int]], length: int, *, logprobs: bool = True
) -> tuple[list[Sample], float, int]:
    """Samples, seconds, and how many prompt tokens came from the prefix cache."""
    from vllm import SamplingParams

    settings = SamplingParams(
        temperature=1.0,
        max_tokens=length,
        logprobs=0 if logprobs else None,
        detokenize=False,
        ignore_eos=True,
    )
    begin = time.perf_counter()
    answers = llm.generate([{"prompt_token_ids": p} for p in asked], settings, use_tqdm=False)
    seconds = time.perf_counter() - begin
    found = []
    for prompt, answer in zip(asked, answers, strict=True):
        output = answer.outputs[0]
        tokens = list(output.token_ids)
        values = (
            [step[token].logprob for token, step in zip(tokens, output.logprobs, strict=True)]
            if logprobs
            else []
        )
        found.append(Sample(prompt, tokens, values))
    return found, seconds, sum(answer.num_cached_tokens or 0 for answer in answers)


def counters(llm: Any) -> dict[str, float]:
    """The engine's counters that show which path a run took."""
    wanted = ("vllm:num_preemptions", "vllm:prefix_cache_hits", "vllm:prefix_cache_queries")
    return {m.name: m.value for m in llm.get_metrics() if m.name in wanted}


def fingerprint(llm: Any, path: Path) -> dict[str, Any]:
    """The bits of fixed requests, written to ``path``, and their digests.

    ``scored`` are log-probabilities of given tokens (prefill), ``drawn`` of tokens that
    the engine sampled itself, each request with a seed of its own (decode). Engines with
    equal weights and equal bits have equal fingerprints.
    """
    import hashlib

    import torch
    from vllm import SamplingParams

    fixed: dict[str, Any] = {"temperature": 1.0, "detokenize": False, "ignore_eos": True}
    given = prompts(900, 256, 256, 256)
    answers = llm.generate(
        [{"prompt_token_ids": p} for p in given],
        SamplingParams(max_tokens=1, prompt_logprobs=0, seed=0, **fixed),
        use_tqdm=False,
    )
    scored = [
        step[token].logprob
        for prompt, answer in zip(given, answers, strict=True)
        for token, step in zip(prompt[1:], answer.prompt_logprobs[1:], strict=True)
    ]
    asked = prompts(901, 128)
    answers = llm.generate(
        [{"prompt_token_ids": p} for p in asked],
        [SamplingParams(max_tokens=128, logprobs=0, seed=i, **fixed) for i in range(len(asked))],
        use_tqdm=False,
    )
    outputs = [answer.outputs[0] for answer in answers]
    drawn = [
        step[token].logprob
        for output in outputs
        for token, step in zip(output.token_ids, output.logprobs, strict=True)
    ]
    bits = {
        "scored": torch.tensor(scored, dtype=torch.float32),
        "drawn": torch.tensor(drawn, dtype=torch.float32),
        "drawn_tokens": torch.tensor([t for o in outputs for t in o.token_ids]),
    }
    torch.save(bits, path)
    return {
        name: {
            "count": values.numel(),
            "sha256": hashlib.sha256(values.numpy().tobytes()).hexdigest(),
        }
        for name, values in bits.items()
    }


def compare_bits(paths: list[Path]) -> list[dict[str, Any]]:
    """Every fingerprint against the first: how many values have other bits."""
    import torch

    def bits(values: Any) -> Any:
        return values.view(torch.int32) if values.dtype == torch.float32 else values

    loaded = [torch.load(path) for path in paths]
    found = []
    for path, one in zip(paths[1:], loaded[1:], strict=True):
        entry: dict[str, Any] = {"first": paths[0].stem, "second": path.stem}
        for name, values in one.items():
            other = loaded[0][name]
            entry[name] = {
                "values": values.numel(),
                "differ": int((bits(values) != bits(other)).sum()),
            }
        found.append(entry)
    return found


@ends_process
def start_once(
    model: Path, kind: str, path: Path, *, tensor_parallel: int, expert_parallel: bool
) -> None:
    """One start of an engine, its fingerprint, and the end of the process."""
    from vllm import LLM

    begin = time.perf_counter()
    llm = LLM(
        **arguments(
            model,
            kind,
            tensor_parallel=tensor_parallel,
            expert_parallel=expert_parallel,
            chunk=2048,
            cache_gib=1.0,
        )
    )
    loaded = time.perf_counter() - begin
    found = {
        "kind": kind,
        "tensor_parallel": tensor_parallel,
        "expert_parallel": expert_parallel,
        "load_s": round(loaded, 1),
        "fingerprint": fingerprint(llm, path.with_suffix(".bits")),
    }
    path.write_text(json.dumps(found, indent=1))


@ends_process
def profile(model: Path, kind: str, path: Path, *, tokens: int = 64) -> None:
    """Where a decode step's time on the GPU goes, 64 and 256 at once: kernels by their time.

    The engine runs in this process, so that the profiler sees it. Prompts are short: one
    step of prefill, then decode only.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record
    from vllm import LLM

    llm = LLM(**arguments(model, kind))
    found: dict[str, Any] = {"kind": kind, "tokens": tokens}
    for concurrent in (64, 256):
        asked = prompts(40, concurrent, 16, 16)
        for _ in range(2):
            sample(llm, asked, tokens)
        walls = [sample(llm, asked, tokens)[1] for _ in range(3)]
        with record(activities=[ProfilerActivity.CUDA]) as recorded:
            sample(llm, asked, tokens)
        kernels = sorted(
            (
                (event.self_device_time_total, event.count, event.key)
                for event in recorded.key_averages()
            ),
            reverse=True,
        )
        found[f"at_once_{concurrent}"] = {
            "wall_ms_per_step": round(1e3 * min(walls) / tokens, 3),
            "gpu_ms_per_step": round(sum(k[0] for k in kernels) / 1e3 / tokens, 3),
            "kernels": [
                {"ms": round(time_us / 1e3, 3), "calls": calls, "name": name[:120]}
                for time_us, calls, name in kernels[:30]
            ],
        }
        path.write_text(json.dumps(found, indent=1))


@ends_process
def serve(model: Path, kind: str, seed: int, **topology: Any) -> None:
    """Load an engine, then measure on request: ``CONCURRENT SECONDS`` on stdin, JSON on stdout."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    from vllm import LLM

    begin = time.perf_counter()
    llm = LLM(**arguments(model, kind, **topology))
    loaded = time.perf_counter() - begin
    for concurrent in (64, 256):
        sample(llm, prompts(90 + concurrent, concurrent), 32, logprobs=False)
        # Long enough to fill the cache: from the first sample on, blocks are used again.
        sample(llm, prompts(91 + concurrent, concurrent), 256)
    print("READY " + json.dumps({"kind": kind, "load_s": round(loaded, 1)}), flush=True)
    for line in sys.stdin:
        if not line.strip():
            break
        concurrent, seconds = int(line.split()[0]), float(line.split()[1])
        tokens, spent = 0, 0.0
        calls: list[dict[str, Any]] = []
        while spent < seconds:
            seed += 1
            found, took, _ = sample(llm, prompts(seed, concurrent), 256)
            made = sum(len(s.tokens) for s in found)
            calls.append({"tokens_per_s": round(made / took), **gpu_state()})
            tokens += made
            spent += took
        result = {"kind": kind, "concurrent": concurrent, "tokens": tokens, "seconds": spent}
        print("MEASURED " + json.dumps(result | {"calls": calls}), flush=True)


def gpu_state() -> dict[str, str]:
    """Clock, temperature and power of this process's first GPU, and what holds its clock back."""
    asked = ("clocks.sm", "temperature.gpu", "power.draw", "clocks_event_reasons.active")
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", f"--id={first}", "--format=csv,noheader,nounits"]
    answer = subprocess.run(
        [*command, f"--query-gpu={','.join(asked)}"], capture_output=True, text=True, check=False
    )
    return dict(zip(asked, answer.stdout.strip().split(", "), strict=False))
