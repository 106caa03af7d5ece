"""The loop: sample, prove, step, deliver, again; and the stock pair's loop beside it."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import torch

from grpo_qwen3_moe.actors import RolloutActor, StockRolloutActor
from grpo_qwen3_moe.cluster import TrainerActors, actor, answer
from grpo_qwen3_moe.settings import LoopSettings
from grpo_qwen3_moe.task import Task
from patchkit.errors import Violation
from patchkit.parity import rollout_engine
from patchkit.parity.demo_setup import DemoSetup
from patchkit.parity.fsdp import TrainerSettings, selected
from patchkit.parity.metrics import compare_logprobs
from patchkit.parity.rollout_engine import Evidence
from patchkit.parity.trainer_group import RankSettings
from patchkit.parity.workload import Rollout, by_sequence
from patchkit.runtime.artifact import PHASES, Artifact
from patchkit.runtime.attestation import (
    Attestation,
    AttestationError,
    collect_attestations,
    rollout_processes,
    trainer_processes,
)
from patchkit.runtime.reach import require_reached
from patchkit.runtime.sync import SyncRecord
from patchkit.runtime.versions import Span, lag_report, require_on_policy
from patchkit.runtime.weights import Receipt

Observer = Callable[[str], None]

# With and without, in an order in which a machine that gets slower favours neither.
_PAIR = (True, False, False, True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One policy version.

    Attributes:
        version: It.
        reward: Mean over all answers.
        tokens: Tokens that were sampled and compared.
        mismatches: Tokens whose log-probability the trainer's first forward does not have.
        max_absdiff: Largest difference.
        k3: Mean k3 estimate of the divergence of trainer from rollout.
        clip_rate: Share of tokens whose ratio is outside PPO's clip range.
        grad_norm: Of the step; None where none was taken.
        seconds: Time per stage; what a stage of the trainer took is its slowest rank's.
    """

    version: int
    reward: float
    tokens: int
    mismatches: int
    max_absdiff: float
    k3: float
    clip_rate: float
    grad_norm: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "reward": self.reward,
            "tokens": self.tokens,
            "mismatches": self.mismatches,
            "max_absdiff": self.max_absdiff,
            "k3": self.k3,
            "clip_rate": self.clip_rate,
            "grad_norm": self.grad_norm,
            "seconds": {k: round(v, 4) for k, v in self.seconds.items()},
        }


class _Loop:
    """What both loops share: the task, the trainer's ranks, and the figures."""

    def __init__(
        self, settings: LoopSettings, setup: DemoSetup, log: Any, observe: Observer
    ) -> None:
        self.settings, self.setup = settings, setup
        self.folder, self.adapter = setup.folder, setup.adapter
        self.profile = setup.contract.profile
        config = orjson.loads((setup.model / "config.json").read_bytes())
        self.task = Task(
            vocabulary=config["vocab_size"],
            prompts=settings.prompts,
            group=settings.group,
            new_tokens=settings.new_tokens,
        )
        self.rounds: list[Round] = []
        self.log, self._observe = log, observe
        self._seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage, and tell whoever watches that it begins."""
        self._observe(name)
        began = time.monotonic()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began

    def trainers(self, adapter: str, environment: dict[str, str]) -> TrainerActors:
        settings = self.settings
        store = tempfile.mkdtemp(prefix="patchkit-trainer-", dir=self.folder)
        return TrainerActors(
            RankSettings(
                adapter=adapter,
                profile=self.profile.name,
                world_size=settings.ranks,
                rendezvous=str(Path(store) / "store"),
                environment={},
                build="patchkit.parity.fsdp:build_trainer",
                options=TrainerSettings(
                    model=self.setup.model,
                    learning_rate=settings.learning_rate,
                    clip=settings.clip,
                    gate_timeout_s=settings.bounds.gate_s,
                    device=settings.device,
                ),
                collective_timeout_s=settings.bounds.collective_s,
                device=settings.device,
            ),
            environment,
            settings.bounds,
            gpus=self.gpus,
        )

    @property
    def gpus(self) -> float:
        return self.settings.gpus_per_actor if self.settings.device == "cuda" else 0.0

    def judge(
        self,
        version: int,
        rollouts: list[Rollout],
        rewards: list[float],
        first: list[torch.Tensor],
        figures: dict[str, float],
    ) -> Round:
        """The figures of a version, the same for both loops, from the arrays themselves."""
        rolled, replayed = selected(rollouts, [r.logprobs for r in rollouts]), torch.cat(first)
        found = compare_logprobs(
            rolled.logprobs,
            replayed,
            positions=rolled.positions,
            token_ids=rolled.token_ids,
            sequences=rolled.sequences,
        )
        ratio = torch.exp(replayed - rolled.logprobs)
        made = Round(
            version=version,
            reward=statistics.fmean(rewards),
            tokens=found.token_count,
            mismatches=found.mismatch_count,
            max_absdiff=found.max_absdiff,
            k3=found.k3_mean,
            clip_rate=float(((ratio - 1).abs() > self.settings.clip).float().mean()),
            grad_norm=figures.get("grad_norm"),
            seconds=dict(self._seconds),
        )
        self._seconds.clear()
        self.rounds.append(made)
        self.log.info("version", loop=type(self).__name__, **made.as_dict())
        return made

    def slowest(self, steps: list[Any]) -> None:
        for stage in steps[0].seconds:
            self._seconds[f"trainer_{stage}"] = max(s.seconds[stage] for s in steps)


class OnPolicyLoop(_Loop):
    """The loop under the contract.

    Use it as a context manager; :func:`~grpo_qwen3_moe.cluster.connect` comes first.
    """

    rollout: Any = None
    trainer: TrainerActors | None = None
    engine_manifest: Attestation | None = None
    _reached = False
    _restarts = 0

    def __enter__(self) -> OnPolicyLoop:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- start ----------------------------------------------------------------------------

    def start(self) -> None:
        """All processes, and proof of what each of them is.

        Raises:
            PatchkitError: Before a token is sampled.
        """
        contract = self.setup.contract
        environment = contract.environment
        attested = Path(environment.variables["PATCHKIT_RUN_DIR"])
        self.artifact = Artifact(contract.as_dict())
        with self.stage("start"):
            # The plugin belongs to engines; a trainer's patches are installed by start_rank.
            self.trainer = self.trainers(
                self.adapter.name, {**environment.variables, "PATCHKIT_ENABLE": ""}
            )
            self._start_engine(self.setup.model, attested)
            self.trainer.ready()
            self._admit(
                collect_attestations(
                    attested,
                    trainer_processes(self.settings.ranks),
                    contract_digest=contract.digest,
                    environment={
                        k: v for k, v in environment.compared.items() if k != "PATCHKIT_ENABLE"
                    },
                )
            )
        with self.stage("receipts"):
            self._synced(self.ask("begin", self._receipt(), 0))
        self.log.info("started", contract=contract.digest, seconds=dict(self._seconds))
        self._seconds.clear()

    def _start_engine(self, model: Path, attested: Path) -> None:
        """One engine, and what its processes attest; each start has a folder of its own."""
        settings, contract = self.settings, self.setup.contract
        tensor = settings.tensor_parallel_size
        variables = {
            **contract.environment.variables,
            **rollout_engine.environment(tensor),
            "PATCHKIT_CANARY": "1",
            "PATCHKIT_RUN_DIR": str(attested),
        }
        self.rollout = actor(RolloutActor, variables, cpus=tensor, gpus=self.gpus * tensor)
        self.ask(
            "start",
            self.profile,
            model,
            self.adapter.weight_map or "",
            settings.seed,
            bound_s=settings.bounds.start_s,
        )
        found = collect_attestations(
            attested,
            rollout_processes(tensor_parallel=tensor),
            contract_digest=contract.digest,
            environment=contract.environment.compared,
        )
        before, self.engine_manifest = self.engine_manifest, found[0]
        if before is not None and before.manifest_digest != found[0].manifest_digest:
            raise AttestationError(
                "the engine that was started again is another one",
                [
                    Violation(
                        subject=found[0].who,
                        problem="its runtime manifest differs from the first start's",
                        expected=before.manifest_digest,
                        found=found[0].manifest_digest,
                        remedy="something was installed or upgraded since; start a new run",
                    )
                ],
            )
        self._admit(found)
        self._reached = False

    def _admit(self, attestations: list[Attestation]) -> None:
        self.artifact.add_attestations(attestations)
        for a in attestations:
            self.log.info("attested", process=a.who, manifest=a.manifest_digest, state=a.state)

    def restart_rollout(self, version: int) -> None:
        """A new engine in place of a lost one, from the checkpoint of ``version``.

        It is believed no more than the first: its processes attest anew, and what it
        loaded is compared with the trainer's receipt.
        """
        import ray

        ray.kill(self.rollout)
        self._restarts += 1
        folder = self.folder / f"attestations-{self._restarts}"
        model = self.folder / f"checkpoint-{version}" if version else self.setup.model
        with self.stage("restart the engine"):
            self._start_engine(model, folder)
            record = self.ask("begin", self._receipt(), version)
        # The artifact has the transaction of this version already.
        self._log_sync(record, restarted=True)

    def ask(self, command: str, *arguments: Any, bound_s: float = 0.0) -> Any:
        """Ask the rollout actor, within a bound."""
        reference = getattr(self.rollout, command).remote(*arguments)
        bound_s = bound_s or self.settings.bounds.command_s
        return answer("rollout actor", command, reference, bound_s)

    def tell(self, command: str, **arguments: Any) -> list[Any]:
        """Ask every trainer rank."""
        assert self.trainer is not None
        return self.trainer(command, **arguments)

    # -- one version ----------------------------------------------------------------------

    def run(self) -> None:
        """All versions: each is sampled and proven, each but the last is trained on."""
        last = self.settings.refits
        for version in range(last + 1):
            self.round(version, step=version < last)
            if version < last:
                self.refit(version + 1)

    def round(self, version: int, *, step: bool = True) -> Round:
        """Sample, prove every token, and (unless it is the last) take one step."""
        rollouts, evidence, rewards = self._sample(version)
        spans = [r.spans or (Span(r.start_version, 0, len(r.tokens)),) for r in rollouts]
        require_on_policy(spans, version)
        lag = lag_report(spans, version)
        if not self._reached:
            assert self.engine_manifest is not None
            require_reached(self.engine_manifest.manifest, self.ask("hits"))
            self._reached = True
        with self.stage("step"):
            if step:
                steps = self.tell(
                    "step", rollouts=rollouts, advantages=self.task.advantages(rewards)
                )
            else:
                steps = self.tell("prove", rollouts=rollouts)
        self.slowest(steps)
        recompute = by_sequence([s.recompute for s in steps])
        first = by_sequence([s.first_forward for s in steps])
        rolled = selected(rollouts, [r.logprobs for r in rollouts])
        made = self.judge(version, rollouts, rewards, first, steps[0].figures)
        self.artifact.add_round(
            PHASES[min(version, 1)],
            version=version,
            sequences=rolled.sequences,
            positions=rolled.positions,
            token_ids=rolled.token_ids,
            rollout=rolled.logprobs,
            recompute=torch.cat(recompute),
            first_forward=torch.cat(first),
            start_versions=[r.start_version for r in rollouts],
            end_versions=[r.end_version for r in rollouts],
            notes={
                "reward": made.reward,
                **steps[0].figures,
                **evidence.as_dict(),
                "lag": lag.as_dict(),
            },
        )
        return made

    def _sample(self, version: int) -> tuple[list[Rollout], Evidence, list[float]]:
        prompts = self.task.batch(self.settings.seed, version)
        with self.stage("sample"):
            rollouts, evidence = self.ask(
                "generate", prompts, [self.task.new_tokens] * len(prompts)
            )
        return rollouts, evidence, self.task.rewards([r.tokens for r in rollouts])

    def refit(self, version: int, *, receipts: bool = True, recorded: bool = True) -> Path:
        """Deliver the trainer's weights into the running engine, as a transaction.

        Args:
            version: Of these weights.
            receipts: False leaves both sides' receipts out, and shows nothing.
            recorded: Whether it belongs to the run that the artifact is about.
        """
        checkpoint = self.folder / f"checkpoint-{version}"
        with self.stage("export"):
            self.tell("export", folder=checkpoint)
        receipt = None
        if receipts:
            with self.stage("receipt"):
                receipt = self._receipt()
        with self.stage("update"):
            record = self.ask("update", version, checkpoint / "model.safetensors", receipt)
        if recorded:
            self._synced(record)
        if version > 1:
            # The first and the newest are needed to start again from; a disk is not endless.
            shutil.rmtree(self.folder / f"checkpoint-{version - 1}")
        return checkpoint

    def _receipt(self) -> Receipt:
        receipt: Receipt = self.tell("receipt")[0]  # every rank returns the same
        return receipt

    def _synced(self, record: SyncRecord) -> None:
        self.artifact.add_refit(record)
        self._log_sync(record)

    def _log_sync(self, record: SyncRecord, **more: Any) -> None:
        self.log.info(
            "synced",
            **more,
            version=record.version,
            mode=record.mode,
            trainer=record.trainer.digest if record.trainer else None,
            workers=[w.digest for w in record.workers],
            seconds=record.seconds,
        )

    # -- what it costs --------------------------------------------------------------------

    def cost(self) -> dict[str, Any]:
        """Time whole rounds with and without recompute, gate and receipts, by turns.

        These rounds come after the run: the ones without show nothing and are part
        of no claim. Both kinds take the exact path, so it is not in the ratio.
        """
        timed: dict[bool, list[float]] = {True: [], False: []}
        version = self.settings.refits
        order = [_PAIR[i % 4] for i in range(2 * self.settings.cost_pairs)]
        for proven in order:
            self._observe(f"cost of the gate: round {'with' if proven else 'without'}")
            began = time.monotonic()
            rollouts, _, rewards = self._sample(version)
            advantages = self.task.advantages(rewards)
            if proven:
                self.tell("step", rollouts=rollouts, advantages=advantages)
            else:
                self.tell("step_unproven", rollouts=rollouts, advantages=advantages, exact=True)
            version += 1
            # Receipts of these refits are made and compared, but stay out of the artifact,
            # whose versions have a round each.
            self.refit(version, receipts=proven, recorded=False)
            timed[proven].append(time.monotonic() - began)
        self._seconds.clear()
        stages = _median_stages(self.rounds)
        found: dict[str, Any] = {
            "pairs": self.settings.cost_pairs,
            "with_s": round(statistics.median(timed[True]), 4),
            "without_s": round(statistics.median(timed[False]), 4),
            "all_with_s": [round(s, 4) for s in timed[True]],
            "all_without_s": [round(s, 4) for s in timed[False]],
            "stages_s": {k: round(v, 4) for k, v in stages.items()},
        }
        found["ratio"] = round(statistics.median(timed[True]) / statistics.median(timed[False]), 4)
        # Independent of the timed rounds, and of what else the machine did meanwhile.
        whole = sum(stages[name] for name in ("sample", "step", "export", "receipt", "update"))
        proof = sum(stages[name] for name in ("trainer_recompute", "trainer_gate", "receipt"))
        found["ratio_by_stages"] = round(whole / (whole - proof), 4)
        self.log.info("cost", **found)
        return found

    def close(self) -> None:
        """End all actors, whatever state they are in."""
        import ray

        if self.rollout is not None:
            try:
                self.ask("close", bound_s=10.0)
            except Exception as error:  # it is killed anyway; a lost actor cannot close itself
                self.log.warning("close", error=str(error))
            ray.kill(self.rollout)
        if self.trainer is not None:
            self.trainer.close()


class StockLoop(_Loop):
    """The same task with an unpatched engine and an unpatched trainer; nothing is claimed."""

    def run(self) -> None:
        settings = self.settings
        plain = {**self.setup.contract.environment.variables, "PATCHKIT_ENABLE": ""}
        engine = {**plain, **rollout_engine.environment(settings.tensor_parallel_size)}
        trainer = self.trainers("", plain)
        tensor = settings.tensor_parallel_size
        rollout = actor(StockRolloutActor, engine, cpus=tensor, gpus=self.gpus * tensor)
        bounds, checkpoint = settings.bounds, self.setup.model
        try:
            trainer.ready()
            for version in range(settings.refits + 1):
                prompts = self.task.batch(settings.seed, version)
                with self.stage("stock: sample"):
                    reference = rollout.generate.remote(
                        self.profile,
                        checkpoint,
                        version,
                        prompts,
                        [self.task.new_tokens] * len(prompts),
                        settings.seed + version,
                    )
                    rollouts = answer(
                        "stock rollout actor", "generate", reference, bounds.command_s
                    )
                rewards = self.task.rewards([r.tokens for r in rollouts])
                with self.stage("stock: step"):
                    steps = trainer(
                        "step_unproven",
                        rollouts=rollouts,
                        advantages=self.task.advantages(rewards),
                        exact=False,
                    )
                self.slowest(steps)
                first = by_sequence([s.first_forward for s in steps])
                self.judge(version, rollouts, rewards, first, steps[0].figures)
                if version < settings.refits:
                    with self.stage("stock: export"):
                        checkpoint = self.folder / "stock" / f"checkpoint-{version + 1}"
                        trainer("export", folder=checkpoint)
                        if version:
                            shutil.rmtree(checkpoint.with_name(f"checkpoint-{version}"))
        finally:
            import ray

            ray.kill(rollout)
            trainer.close()


def _median_stages(rounds: list[Round]) -> dict[str, float]:
    """Medians in the order of a round; what the trainer's ranks did is inside ``step``."""
    names = {name: None for r in reversed(rounds) for name in r.seconds}
    return {
        name: statistics.median(r.seconds[name] for r in rounds if name in r.seconds)
        for name in names
    }
