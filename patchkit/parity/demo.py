"""The main job on one machine: sample, replay, prove, step, update, prove again.

Real vLLM samples; a real FSDP2 group replays the same tokens on the exact path;
the gate compares every float32 selected-token log-probability; one optimizer step
follows; its weights arrive in the running engine; everything is compared again.
Beside each comparison stands what the stock pair makes of the same tokens.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import torch

from patchkit.parity import rollout_engine as engines
from patchkit.parity.demo_setup import DemoSettings, DemoSetup, Observer
from patchkit.parity.fsdp import StepResult, TrainerSettings, selected
from patchkit.parity.metrics import ParityMetrics, compare_logprobs
from patchkit.parity.stock_scorer import StockScorer
from patchkit.parity.trainer_group import TrainerGroup
from patchkit.parity.workload import Rollout, by_sequence, mixed_prompts
from patchkit.runtime.artifact import Artifact
from patchkit.runtime.attestation import (
    collect_attestations,
    rollout_processes,
    trainer_processes,
)
from patchkit.runtime.reach import require_reached
from patchkit.runtime.weights import Receipt

PHASES = ("initial_checkpoint", "post_update_reload")

# Tokens sampled per sequence, by turns: with 64 sequences 4,608 in all.
_NEW_TOKENS = (48, 72, 96, 72)
# Pages of the KV cache: too few for sixteen sequences, so that some are preempted.
_PAGES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseResult:
    """One phase of the run.

    Attributes:
        name: One of :data:`PHASES`.
        version: Policy version compared.
        recompute: Rollout against the trainer's recompute, exact path.
        first_forward: Rollout against the first training forward, exact path.
        stock: Stock vLLM against the stock trainer, same tokens; None if not run.
        evidence: What the scheduler went through.
        step: Figures of the optimizer step.
        rollouts: The sampled sequences.
    """

    name: str
    version: int
    recompute: ParityMetrics
    first_forward: ParityMetrics
    stock: ParityMetrics | None
    evidence: engines.Evidence
    step: dict[str, float]
    rollouts: tuple[Rollout, ...]


@dataclass(slots=True, kw_only=True)
class DemoResult:
    """Everything the run showed."""

    settings: DemoSettings
    phases: list[PhaseResult] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    syncs: list[Any] = field(default_factory=list)
    attestations: list[Any] = field(default_factory=list)
    manifests: list[Any] = field(default_factory=list)
    hits: dict[str, int] = field(default_factory=dict)
    artifact: Path | None = None


def rewards(rollouts: Sequence[Rollout], vocabulary: int) -> list[float]:
    """Advantages of a toy task: prefer the lower half of the vocabulary."""
    share = [sum(t < vocabulary // 2 for t in r.tokens) / len(r.tokens) for r in rollouts]
    mean = sum(share) / len(share)
    spread = (sum((s - mean) ** 2 for s in share) / len(share)) ** 0.5 or 1.0
    return [(s - mean) / spread for s in share]


def run_demo(setup: DemoSetup, observe: Observer = lambda stage: None) -> DemoResult:
    """Run both phases.

    Args:
        setup: From :func:`patchkit.parity.demo_setup.set_up`, called before this module
            (which imports torch) was imported.
        observe: Called with the name of each stage as it begins.

    Raises:
        PatchkitError: Whatever was refused or differed, before any claim is made.
    """
    with ExitStack() as stack:
        return _Run(setup, observe, stack).run()


class _Run:
    """The stages of one demo; they share processes, so they share an object."""

    def __init__(self, setup: DemoSetup, observe: Observer, stack: ExitStack) -> None:
        self.settings, self.adapter = setup.settings, setup.adapter
        self.folder, self.model, self.contract = setup.folder, setup.model, setup.contract
        self.profile = setup.contract.profile
        self.vocabulary = int(orjson.loads((self.model / "config.json").read_bytes())["vocab_size"])
        self.result = DemoResult(settings=setup.settings)
        self._observe, self._stack = observe, stack

    @contextmanager
    def _timed(self, stage: str, label: str) -> Iterator[None]:
        self._observe(label)
        start = time.monotonic()
        yield
        seconds = self.result.seconds
        seconds[stage] = seconds.get(stage, 0.0) + time.monotonic() - start

    def run(self) -> DemoResult:
        self._start()
        checkpoint = self.model
        for version, name in enumerate(PHASES):
            self._phase(version, name, checkpoint)
            if version + 1 < len(PHASES):
                checkpoint = self._refit(version + 1, name)
        with self._timed("artifact", "write the verification artifact"):
            self.result.artifact = self.artifact.write(self.folder / "artifact.json")
        return self.result

    def _start(self) -> None:
        """All processes, and proof that each of them is patched and under the contract."""
        settings, rollout = self.settings, self.profile.content.topology.rollout
        trainers = {**self.contract.environment.variables, "PATCHKIT_ENABLE": ""}
        self.trainer = self._stack.enter_context(
            TrainerGroup.start(
                adapter=self.adapter.name,
                profile=self.profile.name,
                world_size=self.profile.content.topology.trainer.ranks,
                build="patchkit.parity.fsdp:build_trainer",
                options=TrainerSettings(
                    model=self.model,
                    attention=settings.attention,
                    checkpointing=settings.checkpointing,
                ),
                environment=trainers,
            )
        )
        self.scorer = None
        if settings.stock:
            # One worker, whatever the rollout has: the friendlier comparison (another
            # tensor-parallel size only adds to what differs), and two cores suffice.
            alone = self.profile.changed(**{"topology.rollout.tensor": 1})
            arguments = engines.engine_arguments(
                alone, self.model, seed=settings.seed, weight_updates=False
            )
            self.scorer = StockScorer(
                arguments, environment=os.environ, log=self.folder / "stock.log"
            )
            self._stack.callback(self.scorer.close)
        ranks = self.profile.content.topology.trainer.ranks
        with self._timed("start", f"start vLLM (TP {rollout.tensor}) and FSDP2 ({ranks} ranks)"):
            self.engine = engines.RolloutEngine(
                self.profile,
                self.model,
                weight_map=self.adapter.weight_map or "",
                seed=settings.seed,
                num_blocks=_PAGES,
                accept_all2all=self.contract.accepted_all2all,
            )
            self._stack.callback(self.engine.close)
            self.engine.llm.collective_rpc("patchkit_attest")
            compared = self.contract.environment.compared
            self.result.attestations = collect_attestations(
                self.folder / "attestations",
                rollout_processes(tensor_parallel=rollout.tensor),
                contract_digest=self.contract.digest,
                environment=compared,
            )
            self.result.manifests = self.trainer.ready()
            trained = collect_attestations(
                self.folder / "attestations",
                trainer_processes(ranks),
                contract_digest=self.contract.digest,
                environment={**compared, "PATCHKIT_ENABLE": ""},
            )
        self.artifact = Artifact(
            self.contract.as_dict(),
            unreviewed={s for m in self.result.manifests for s in m["unreviewed"]},
        )
        self.artifact.add_attestations([*self.result.attestations, *trained])
        with self._timed("sync", "compare the weights that both sides hold"):
            self._synced(self.engine.sync.begin(self._receipt(), version=0))

    # -- phases ---------------------------------------------------------------------------

    def _phase(self, version: int, name: str, checkpoint: Path) -> None:
        """Sample, replay, compare, step; the stock pair scores the same tokens meanwhile."""
        with self._timed("rollout", f"{name}: sample"):
            prompts = mixed_prompts(
                self.settings.sequences,
                vocabulary=self.vocabulary,
                seed=self.settings.seed + 1000 * version,
                longest=200,
            )
            lengths = [_NEW_TOKENS[i % len(_NEW_TOKENS)] for i in range(len(prompts))]
            rollouts, evidence = self.engine.generate(prompts, lengths)
        if version == 0:
            manifest = self.result.attestations[0].manifest
            self.result.hits = require_reached(manifest, self.engine.hits())
        stock_replay = None
        if self.scorer is not None:
            self.scorer.send(checkpoint, rollouts)
            with self._timed("stock", f"{name}: stock replay"):
                # Before the step: afterwards the trainer holds other weights.
                stock_replay = by_sequence(self.trainer("replay", rollouts=rollouts, exact=False))
        with self._timed("step", f"{name}: replay, gate, backward, optimizer step"):
            steps: list[StepResult] = self.trainer(
                "step", rollouts=rollouts, advantages=rewards(rollouts, self.vocabulary)
            )
        stock = None
        rolled = selected(rollouts, [r.logprobs for r in rollouts])
        if self.scorer is not None and stock_replay is not None:
            with self._timed("stock", f"{name}: wait for the stock engine's scores"):
                stock = compare_logprobs(
                    selected(rollouts, self.scorer.receive()).logprobs,
                    torch.cat(stock_replay),
                    positions=rolled.positions,
                    token_ids=rolled.token_ids,
                    sequences=rolled.sequences,
                    names=("stock rollout", "stock replay"),
                )
        phase = PhaseResult(
            name=name,
            version=version,
            recompute=steps[0].report.recompute,
            first_forward=steps[0].report.first_forward,
            stock=stock,
            evidence=evidence,
            step=steps[0].figures,
            rollouts=tuple(rollouts),
        )
        self.result.phases.append(phase)
        self.artifact.add_round(
            name,
            version=version,
            sequences=rolled.sequences,
            positions=rolled.positions,
            token_ids=rolled.token_ids,
            rollout=rolled.logprobs,
            recompute=torch.cat(by_sequence([s.recompute for s in steps])),
            first_forward=torch.cat(by_sequence([s.first_forward for s in steps])),
            stock=None if stock_replay is None else torch.cat(stock_replay),
            start_versions=[r.start_version for r in rollouts],
            end_versions=[r.end_version for r in rollouts],
            notes={
                **evidence.as_dict(),
                **steps[0].figures,
                **({"stock_pair": stock.as_dict()} if stock else {}),
            },
        )

    def _refit(self, version: int, name: str) -> Path:
        """Deliver the trainer's weights into the running engine, as a transaction."""
        checkpoint = self.folder / f"checkpoint-{version}"
        with self._timed("sync", f"{name}: deliver the new weights"):
            self.trainer("export", folder=checkpoint)
            self._synced(
                self.engine.sync.update(version, checkpoint / "model.safetensors", self._receipt())
            )
        return checkpoint

    def _receipt(self) -> Receipt:
        """The trainer's receipt; every rank returns the same."""
        receipt: Receipt = self.trainer("receipt")[0]
        return receipt

    def _synced(self, record: Any) -> None:
        self.result.syncs.append(record)
        self.artifact.add_refit(record)
