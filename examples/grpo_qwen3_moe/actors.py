"""What runs inside the Ray actors.

Importing this module imports neither torch nor vLLM: a Ray worker unpickles its class
first, and the patches have to be there before either. The environment is there even
earlier: it is the worker process's own, given by ``runtime_env``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchkit.errors import ConfigurationError
from patchkit.parity.rollout_engine import Evidence, RolloutEngine, engine_arguments
from patchkit.parity.trainer_group import RankSettings, sendable, start_rank
from patchkit.parity.workload import Rollout
from patchkit.runtime.worker import FRONT_END

if TYPE_CHECKING:
    from patchkit.runtime.profile import Profile
    from patchkit.runtime.sync import SyncRecord
    from patchkit.runtime.weights import Receipt


class RolloutActor:
    """One patched vLLM engine and the weight synchronisation of that engine."""

    _engine: RolloutEngine | None = None

    def start(self, profile: Profile, model: Path, weight_map: str, seed: int) -> None:
        """Build the engine, compare it with the profile, and attest."""
        # vLLM's own Ray workers are actors, too; this one is where the engine is asked.
        os.environ[FRONT_END] = str(os.getpid())
        self._engine = RolloutEngine(profile, model, weight_map=weight_map, seed=seed)
        self._engine.llm.collective_rpc("patchkit_attest")

    @property
    def engine(self) -> RolloutEngine:
        if self._engine is None:
            raise ConfigurationError("rollout actor: start() comes first")
        return self._engine

    def begin(self, receipt: Receipt, version: int) -> SyncRecord:
        return self.engine.sync.begin(receipt, version=version)

    def update(self, version: int, file: Path, receipt: Receipt | None) -> SyncRecord:
        """Deliver a version; without a receipt nothing is claimed about what was loaded."""
        sync = self.engine.sync
        usual = sync.mode
        if receipt is None:
            sync.mode = "off"
        try:
            return sync.update(version, file, receipt)
        finally:
            sync.mode = usual

    def generate(
        self, prompts: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> tuple[list[Rollout], Evidence]:
        return self.engine.generate(prompts, lengths)

    def hits(self) -> list[dict[str, int]]:
        return self.engine.hits()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


class StockRolloutActor:
    """The same vLLM without a patch: a new engine for every checkpoint.

    On CPU a stock engine corrupts expert weights when it reloads them (it packed
    the first ones for its kernels and does not pack the next ones), so the only
    safe way to a new version is a new engine.
    """

    def generate(
        self,
        profile: Profile,
        model: Path,
        version: int,
        prompts: Sequence[Sequence[int]],
        lengths: Sequence[int],
        seed: int,
    ) -> list[Rollout]:
        from vllm import LLM, SamplingParams

        llm = LLM(**engine_arguments(profile, model, seed=seed, weight_updates=False))
        try:
            outputs = llm.generate(
                [{"prompt_token_ids": list(p)} for p in prompts],
                [
                    SamplingParams(
                        temperature=1.0, max_tokens=n, logprobs=0, detokenize=False, ignore_eos=True
                    )
                    for n in lengths
                ],
                use_tqdm=False,
            )
        finally:
            llm.llm_engine.engine_core.shutdown()
        rollouts = []
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            made = output.outputs[0]
            rollouts.append(
                Rollout(
                    number=number,
                    prompt=tuple(prompt),
                    tokens=tuple(made.token_ids),
                    logprobs=tuple(
                        e[t].logprob for t, e in zip(made.token_ids, made.logprobs, strict=True)
                    ),
                    start_version=version,
                    end_version=version,
                )
            )
        return rollouts


class TrainerActor:
    """One FSDP2 rank."""

    _worker: Any = None

    def start(self, rank: int, settings: RankSettings) -> tuple[bool, Any]:
        """Patches, process group, model; the answer is the runtime manifest."""
        try:
            self._worker, manifest = start_rank(rank, settings)
        except Exception as error:
            return False, sendable(error)
        return True, manifest

    def call(self, command: str, arguments: dict[str, Any]) -> tuple[bool, Any]:
        """Run one method of the trainer; an exception is an answer, too."""
        try:
            return True, getattr(self._worker, command)(**arguments)
        except Exception as error:
            return False, sendable(error)
