"""The rollout side of the reference loop: a real vLLM engine that samples.

Importing this module imports nothing heavy; the environment of :func:`environment`
has to stand before vLLM (or torch) is imported, because both read it once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchkit.errors import PatchkitError
from patchkit.parity.workload import Rollout
from patchkit.runtime.reach import end_canary


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How the engine is built.

    Attributes:
        model: Folder with ``config.json`` and weights.
        tensor_parallel_size: Workers that share each layer.
        max_model_len: Longest sequence, prompt and sampled tokens together.
        max_num_batched_tokens: Tokens of one step; longer prompts are chunked.
        max_num_seqs: Concurrent requests.
        block_size: Tokens of one page of the KV cache.
        num_blocks: Pages of the KV cache; few of them force preemptions.
        seed: The sampler's.
    """

    model: Path
    tensor_parallel_size: int = 1
    max_model_len: int = 320
    max_num_batched_tokens: int = 64
    max_num_seqs: int = 16
    block_size: int = 32
    num_blocks: int | None = 40
    seed: int = 0


def environment(tensor_parallel_size: int) -> dict[str, str]:
    """Variables of an engine process on CPU."""
    variables = {
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # The engine core runs in this process; tensor-parallel workers have their own.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }
    if tensor_parallel_size > 1:
        # Automatic binding asserts on NUMA nodes where several workers share one.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return variables


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM`` that both a stock and an exact engine get."""
    return {
        "model": str(settings.model),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "tensor_parallel_size": settings.tensor_parallel_size,
        "max_model_len": settings.max_model_len,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "block_size": settings.block_size,
        "num_gpu_blocks_override": settings.num_blocks,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "logprobs_mode": "raw_logprobs",
        "generation_config": "vllm",
        "seed": settings.seed,
        "disable_log_stats": False,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the engine's scheduler went through, from its own counters.

    Attributes:
        chunked_prefills: Prompts that needed more than one step.
        cached_tokens: Prompt tokens served from the prefix cache.
        preemptions: Requests thrown out of a full cache and computed again.
    """

    chunked_prefills: int
    cached_tokens: int
    preemptions: int

    def as_dict(self) -> dict[str, int]:
        return {
            "chunked_prefills": self.chunked_prefills,
            "cached_tokens": self.cached_tokens,
            "preemptions": self.preemptions,
        }


class RolloutEngine:
    """One vLLM engine with weight synchronisation.

    Args:
        settings: See :class:`EngineSettings`.
        weight_map: The adapter's weight map, for receipts.
    """

    def __init__(self, settings: EngineSettings, *, weight_map: str) -> None:
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        from patchkit.runtime.extension import WORKER_EXTENSION
        from patchkit.runtime.sync import BACKEND, WeightSync, register_backend

        register_backend()
        self.settings = settings
        self.llm = LLM(
            **engine_arguments(settings),
            worker_extension_cls=WORKER_EXTENSION,
            weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        )
        self.sync = WeightSync(self.llm, weight_map=weight_map)

    def generate(
        self, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int]
    ) -> tuple[list[Rollout], Evidence]:
        """Sample on-policy: temperature 1, the whole vocabulary, nothing masked.

        Args:
            prompts: Token ids.
            new_tokens: Tokens to sample for each prompt.
        """
        from vllm import SamplingParams

        self.sync.state.require_usable("generate")
        version = self.sync.version
        if version is None:
            raise PatchkitError("generate: no policy version yet; call sync.begin() first")
        before = self._preemptions()
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(p)} for p in prompts],
            [
                SamplingParams(
                    temperature=1.0, max_tokens=n, logprobs=0, detokenize=False, ignore_eos=True
                )
                for n in new_tokens
            ],
            use_tqdm=False,
        )
        rollouts = [
            Rollout(
                number=number,
                prompt=tuple(prompt),
                tokens=tuple(output.outputs[0].token_ids),
                logprobs=tuple(
                    entry[token].logprob
                    for token, entry in zip(
                        output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True
                    )
                ),
                start_version=version,
                end_version=self.sync.version or version,
                cached_tokens=output.num_cached_tokens or 0,
            )
            for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
        ]
        limit = self.settings.max_num_batched_tokens
        evidence = Evidence(
            chunked_prefills=sum(len(r.prompt) - r.cached_tokens > limit for r in rollouts),
            cached_tokens=sum(r.cached_tokens for r in rollouts),
            preemptions=self._preemptions() - before,
        )
        return rollouts, evidence

    def hits(self) -> list[dict[str, int]]:
        """End the canary in this process and in every worker; calls per patch of each."""
        here = end_canary()
        workers = self.llm.collective_rpc("patchkit_hits")
        # With one worker in this process, both are the same counts.
        return [here] if self.settings.tensor_parallel_size == 1 else [here, *workers]

    def _preemptions(self) -> int:
        return sum(
            int(metric.value)
            for metric in self.llm.get_metrics()
            if metric.name == "vllm:num_preemptions"
        )

    def close(self) -> None:
        """Stop the engine and its workers."""
        core = getattr(self.llm.llm_engine, "engine_core", None)
        if core is not None:
            core.shutdown()


def apply(variables: Mapping[str, str]) -> None:
    """Put variables into this process's environment.

    Raises:
        PatchkitError: torch was imported already and has read its own.
    """
    import sys

    changed = {k: v for k, v in variables.items() if os.environ.get(k) != v}
    if changed and "torch" in sys.modules:
        raise PatchkitError(
            "the engine's environment has to stand before torch is imported; missing: "
            + ", ".join(f"{k}={v}" for k, v in sorted(changed.items()))
        )
    os.environ.update(changed)
