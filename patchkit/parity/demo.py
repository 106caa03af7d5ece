"""The main job on one machine: sample, replay, prove, step, update, prove again.

Real vLLM samples; a real FSDP2 group replays the same tokens on the exact path;
the gate compares every float32 selected-token log-probability; one optimizer step
follows; its weights arrive in the running engine; everything is compared again.
Beside each comparison stands what the stock pair makes of the same tokens.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patchkit.engine import find_adapter, resolve_reference
from patchkit.errors import PatchkitError
from patchkit.parity import rollout_engine as engines
from patchkit.parity.metrics import ParityMetrics, merge_metrics
from patchkit.parity.stock_scorer import StockScorer
from patchkit.parity.trainer_group import TrainerGroup
from patchkit.parity.workload import Rollout, mixed_prompts
from patchkit.runtime.attestation import collect_attestations, rollout_processes
from patchkit.runtime.weights import Receipt

PHASES = ("initial_checkpoint", "post_update_reload")

# Tokens sampled per sequence, by turns: with 64 sequences 4,608 in all.
_NEW_TOKENS = (48, 72, 96, 72)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """What to run.

    Attributes:
        adapter: Adapter's name.
        profile: Which of its profiles; the adapter's own default if empty.
        tensor_parallel_size: vLLM workers.
        ranks: FSDP ranks of the trainer.
        sequences: Sampled per phase.
        folder: Where models, logs and the artifact go; one new folder a run.
        seed: Of prompts and weights.
        stock: Also score the tokens with the stock pair.
        model_changes: Settings of the tiny model that differ from the adapter's.
    """

    adapter: str
    folder: Path
    profile: str = ""
    tensor_parallel_size: int = 1
    ranks: int = 2
    sequences: int = 64
    seed: int = 0
    stock: bool = True
    attention: str = "sdpa"
    checkpointing: str | None = "non_reentrant"
    model_changes: dict[str, Any] = field(default_factory=dict)


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
    manifests: dict[str, Any] = field(default_factory=dict)
    artifact: Path | None = None


Observer = Callable[[str], None]


def build_trainer(settings: Any, installation: Any) -> Any:
    """Build one trainer rank; named by reference in its settings."""
    import patchkit
    from patchkit.parity.fsdp import FSDPTrainer

    adapter = find_adapter(settings.adapter)
    return FSDPTrainer(
        settings.options,
        exact=patchkit.exact_context,
        select_logprobs=resolve_reference(adapter.logprobs),
    )


def rewards(rollouts: Sequence[Rollout], vocabulary: int) -> list[float]:
    """Advantages of a toy task: prefer the lower half of the vocabulary."""
    share = [sum(t < vocabulary // 2 for t in r.tokens) / len(r.tokens) for r in rollouts]
    mean = sum(share) / len(share)
    spread = (sum((s - mean) ** 2 for s in share) / len(share)) ** 0.5 or 1.0
    return [(s - mean) / spread for s in share]


def run_demo(settings: DemoSettings, observe: Observer = lambda stage: None) -> DemoResult:
    """Run both phases.

    Args:
        settings: What to run.
        observe: Called with the name of each stage as it begins.

    Raises:
        PatchkitError: Whatever was refused or differed, before any claim is made.
    """
    adapter = find_adapter(settings.adapter)
    missing = [n for n in ("tiny_model", "logprobs", "weight_map") if not getattr(adapter, n)]
    if missing:
        raise PatchkitError(
            f"adapter {adapter.name!r} has no {', '.join(missing)}; the demo needs a tiny model, "
            "the trainer's log-probabilities and a weight map: declare them on the adapter"
        )
    profile = settings.profile or adapter.default_profile
    result = DemoResult(settings=settings)
    folder = settings.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    engines.apply(engines.environment(settings.tensor_parallel_size))
    os.environ.update(
        PATCHKIT_ENABLE="1",
        PATCHKIT_ADAPTER=adapter.name,
        PATCHKIT_PROFILE=profile,
        PATCHKIT_RUN_DIR=str(folder / "attestations"),
    )
    (folder / "attestations").mkdir(exist_ok=True)

    @contextmanager
    def timed(stage: str, label: str) -> Iterator[None]:
        observe(label)
        start = time.monotonic()
        yield
        result.seconds[stage] = result.seconds.get(stage, 0.0) + time.monotonic() - start

    with ExitStack() as stack:
        model = folder / "checkpoint-0"
        with timed("model", "make a tiny model with random weights"):
            resolve_reference(adapter.tiny_model)(model, seed=settings.seed, **settings.model_changes)
        vocabulary = _vocabulary(model)

        from patchkit.parity.fsdp import TrainerSettings

        trainer = stack.enter_context(
            TrainerGroup.start(
                adapter=adapter.name,
                profile=profile,
                world_size=settings.ranks,
                build="patchkit.parity.demo:build_trainer",
                options=TrainerSettings(
                    model=model,
                    attention=settings.attention,
                    checkpointing=settings.checkpointing,
                ),
                environment={"OMP_NUM_THREADS": "1", "PATCHKIT_ENABLE": ""},
            )
        )
        engine_settings = engines.EngineSettings(
            model=model,
            tensor_parallel_size=settings.tensor_parallel_size,
            seed=settings.seed,
        )
        with timed("engine", f"start vLLM (TP {settings.tensor_parallel_size}) with the plugin on"):
            engine = engines.RolloutEngine(engine_settings, weight_map=adapter.weight_map or "")
            stack.callback(engine.close)
            engine.llm.collective_rpc("patchkit_attest")
            result.attestations = collect_attestations(
                folder / "attestations",
                rollout_processes(tensor_parallel=settings.tensor_parallel_size),
            )
        with timed("trainer", f"start FSDP2 on {settings.ranks} ranks"):
            result.manifests["trainer"] = trainer.ready()
        scorer = None
        if settings.stock:
            scorer = StockScorer(engine_settings, log=folder / "stock.log")
            stack.callback(scorer.close)
        with timed("sync", "compare the loaded weights of both sides"):
            result.syncs.append(engine.sync.begin(_receipt(trainer), version=0))

        checkpoint = model
        for version, name in enumerate(PHASES):
            with timed("rollout", f"{name}: sample"):
                prompts = mixed_prompts(
                    settings.sequences,
                    vocabulary=vocabulary,
                    seed=settings.seed + 1000 * version,
                    longest=200,
                )
                lengths = [_NEW_TOKENS[i % len(_NEW_TOKENS)] for i in range(len(prompts))]
                rollouts, evidence = engine.generate(prompts, lengths)
            if scorer is not None:
                scorer.send(checkpoint, rollouts)
            stock = None
            if scorer is not None:
                # Before the step: afterwards the trainer holds other weights.
                with timed("stock", f"{name}: the stock pair on the same tokens"):
                    scored = scorer.receive()
                    stock = merge_metrics(
                        trainer("stock_metrics", rollouts=rollouts, engine=scored)
                    )
            with timed("step", f"{name}: replay, gate, backward, optimizer step"):
                answers = trainer(
                    "step", rollouts=rollouts, advantages=rewards(rollouts, vocabulary)
                )
                report, figures = answers[0]
            result.phases.append(
                PhaseResult(
                    name=name,
                    version=version,
                    recompute=report.recompute,
                    first_forward=report.first_forward,
                    stock=stock,
                    evidence=evidence,
                    step=figures,
                    rollouts=tuple(rollouts),
                )
            )
            if version + 1 < len(PHASES):
                with timed("sync", f"{name}: deliver the new weights"):
                    checkpoint = folder / f"checkpoint-{version + 1}"
                    trainer("export", folder=checkpoint)
                    result.syncs.append(
                        engine.sync.update(
                            version + 1, checkpoint / "model.safetensors", _receipt(trainer)
                        )
                    )
        observe("done")
    return result


def _receipt(trainer: TrainerGroup) -> Receipt:
    """The trainer's receipt; every rank returns the same."""
    receipt: Receipt = trainer("receipt")[0]
    return receipt


def _vocabulary(model: Path) -> int:
    import orjson

    return int(orjson.loads((model / "config.json").read_bytes())["vocab_size"])


def new_run_folder(parent: Path) -> Path:
    """A folder for one run, named by the time; never one that exists."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{i}" for i in range(1, 100))):
        folder = parent / f"{stamp}{suffix}"
        try:
            os.makedirs(folder)
        except FileExistsError:
            continue
        return folder
    raise PatchkitError(f"{parent}: a hundred runs within one second")
