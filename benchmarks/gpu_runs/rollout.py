"""vLLM engines for the runs: arguments, environment, sampling, throughput."""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What is compared. The first two are vLLM alone.
KINDS = ("stock", "batch_invariant", "vllm_bi", "vllm_bi_fast")
CAPTURED = [1, 2, 4, 8, 16, 32, 64, 128, 192, 256]
VOCABULARY = 151936


def patched(kind: str) -> bool:
    return kind.startswith("vllm_bi")


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
    cache_gib: float = 4.0,
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
    }
    if patched(kind):
        # Without this the norm is inductor's own and the patch is never reached.
        compilation["custom_ops"] = ["none", "+rms_norm"]
        found["worker_extension_cls"] = (
            "patchkit_adapters.qwen3_moe.cuda_weights.CudaWorkerExtension"
        )
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


def serve(model: Path, kind: str, seed: int) -> None:
    """:func:`_serve`, ending at once: an ordinary exit would wait for the engine's processes."""
    code = 1
    try:
        _serve(model, kind, seed)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def _serve(model: Path, kind: str, seed: int) -> None:
    """Load an engine, then measure on request: ``CONCURRENT SECONDS`` on stdin, JSON on stdout."""
    os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    from vllm import LLM

    begin = time.perf_counter()
    llm = LLM(**arguments(model, kind))
    loaded = time.perf_counter() - begin
    for concurrent in (64, 256):
        sample(llm, prompts(90 + concurrent, concurrent), 32, logprobs=False)
        sample(llm, prompts(91 + concurrent, concurrent), 32, logprobs=True)
    print("READY " + json.dumps({"kind": kind, "load_s": round(loaded, 1)}), flush=True)
    for line in sys.stdin:
        if not line.strip():
            break
        concurrent, seconds = int(line.split()[0]), float(line.split()[1])
        tokens, spent = 0, 0.0
        while spent < seconds:
            seed += 1
            found, took, _ = sample(llm, prompts(seed, concurrent), 256)
            tokens += sum(len(s.tokens) for s in found)
            spent += took
        result = {"kind": kind, "concurrent": concurrent, "tokens": tokens, "seconds": spent}
        print("MEASURED " + json.dumps(result), flush=True)
