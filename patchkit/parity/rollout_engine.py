"""The rollout side of the reference loop: a real vLLM engine that samples.

Importing this module imports neither torch nor vLLM: the contract's environment and
that of :func:`environment` have to stand before, because both read it once.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchkit.errors import ConfigurationError, PatchkitError
from patchkit.parity.workload import Rollout
from patchkit.runtime.reach import end_canary
from patchkit.runtime.versions import output_spans

if TYPE_CHECKING:
    from patchkit.runtime.profile import Profile


def environment(tensor_parallel_size: int) -> dict[str, str]:
    """Variables of an engine process on this kind of machine, beside the contract's."""
    variables = {
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


def engine_arguments(
    profile: Profile,
    model: Path,
    *,
    seed: int = 0,
    num_blocks: int | None = None,
    weight_updates: bool = True,
) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM`` for token ids in and out.

    Args:
        profile: Decides everything that decides bits.
        model: Folder with the checkpoint.
        seed: The sampler's.
        num_blocks: Pages of the KV cache; few of them force preemptions.
        weight_updates: Whether weights will be delivered into the running engine.

    Raises:
        ConfigurationError: vLLM would not find the weights: it looks for them with a pattern.
    """
    if glob.escape(str(model)) != str(model):
        raise ConfigurationError(
            f"{model}: vLLM takes *, ? and [ in a checkpoint's folder for a pattern, and finds no "
            "weights; name a folder without them"
        )
    arguments = profile.engine_arguments(str(model))
    if not weight_updates:
        del arguments["weight_transfer_config"]
    return {
        **arguments,
        "skip_tokenizer_init": True,
        "num_gpu_blocks_override": num_blocks,
        "seed": seed,
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
        profile: What the engine has to be; what was built is compared with it.
        model: Folder with the checkpoint.
        weight_map: The adapter's weight map, for receipts.
        seed: The sampler's.
        num_blocks: Pages of the KV cache; few of them force preemptions.
        extension: The workers' extension class; one that inherits from patchkit's.
        accept_all2all: ``Contract.accepted_all2all``, where something was accepted.

    Raises:
        EngineRefusedError: The engine, or one of its workers, is not the profile's.

    Once a process of the engine has ended, every method raises
    :class:`~patchkit.runtime.liveness.EngineLostError`, also while it waits.
    """

    def __init__(
        self,
        profile: Profile,
        model: Path,
        *,
        weight_map: str,
        seed: int = 0,
        num_blocks: int | None = None,
        extension: str = "",
        accept_all2all: Mapping[str, str] | None = None,
    ) -> None:
        from vllm import LLM

        from patchkit.runtime.engine_gate import require_engine
        from patchkit.runtime.extension import WORKER_EXTENSION
        from patchkit.runtime.liveness import EngineWatch, WatchedEngine
        from patchkit.runtime.state import EngineState
        from patchkit.runtime.sync import WeightSync, register_backend

        register_backend()
        self._watch: EngineWatch | None = None
        self.profile = profile
        self.llm = LLM(
            **engine_arguments(profile, model, seed=seed, num_blocks=num_blocks),
            worker_extension_cls=extension or WORKER_EXTENSION,
        )
        try:
            require_engine(self.llm, profile, accept_all2all=accept_all2all)
        except BaseException:
            self.close()
            raise
        weights = profile.content.weights
        state = EngineState()
        # Processes of its own attested when the plugin was loaded in them.
        run_dir = os.environ.get("PATCHKIT_RUN_DIR")
        watch = EngineWatch.of_run(run_dir) if run_dir else EngineWatch(())
        self._watch, self._watched = watch, WatchedEngine(self.llm, watch, state)
        self.sync = WeightSync(
            self._watched,
            weight_map=weight_map,
            mode=weights.receipts,
            caches=weights.caches,
            state=state,
        )

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
        outputs = self._watched.generate(
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
            self._rollout(number, prompt, output, version)
            for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
        ]
        limit = self.profile.content.engine.max_num_batched_tokens
        evidence = Evidence(
            chunked_prefills=sum(len(r.prompt) - r.cached_tokens > limit for r in rollouts),
            cached_tokens=sum(r.cached_tokens for r in rollouts),
            preemptions=self._preemptions() - before,
        )
        return rollouts, evidence

    def _rollout(self, number: int, prompt: Sequence[int], output: Any, version: int) -> Rollout:
        completion = output.outputs[0]
        # Where the engine labels its outputs, its word counts and not ours.
        spans = output_spans(completion) if hasattr(self.llm, "update_weight_version") else ()
        return Rollout(
            number=number,
            prompt=tuple(prompt),
            tokens=tuple(completion.token_ids),
            logprobs=tuple(
                entry[token].logprob
                for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)
            ),
            start_version=spans[0].version if spans else version,
            end_version=spans[-1].version if spans else self.sync.version or version,
            cached_tokens=output.num_cached_tokens or 0,
            spans=spans,
        )

    def hits(self) -> list[dict[str, int]]:
        """End the canary in this process and in every worker; calls per patch of each."""
        here = end_canary()
        workers = self._watched.collective_rpc("patchkit_hits")
        # With one worker in this process, both are the same counts.
        return [here] if self.profile.content.topology.rollout.ranks == 1 else [here, *workers]

    def _preemptions(self) -> int:
        return sum(
            int(metric.value)
            for metric in self.llm.get_metrics()
            if metric.name == "vllm:num_preemptions"
        )

    def close(self) -> None:
        """Stop the engine and its workers."""
        if self._watch is not None:
            self._watch.close()
        core = getattr(self.llm.llm_engine, "engine_core", None)
        if core is not None:
            core.shutdown()
