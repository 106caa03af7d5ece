"""A run under contract: rollout, replay and training forward bit for bit, and its artifact.

Everything the runtime has takes part: preflight, engine gate, request gate, attestations,
canary, parity gate before each backward, weight updates as transactions with receipts,
and the verification artifact, which is verified again once it is written.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu_runs import rollout
from benchmarks.gpu_runs.ending import ends_process

PHASES = ("initial_checkpoint", "post_update_reload")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What to run; plain data for the ranks.

    Attributes:
        model: Checkpoint folder; without weights the engine is started empty and gets the
            trainer's.
        kind: Profile of adapter ``qwen3_moe``.
        tensor_parallel: Workers, and ranks of the trainer.
        expert_parallel: Whether workers hold whole experts.
        prompts: Per version; each is asked twice.
        tokens: Sampled for each.
        cache_gib: Of each worker; little of it makes preemptions.
        optimizer: ``adamw`` or ``sgd``.
        budget: Tokens of the trainer's batches.
        fingerprint: Also write the bits of fixed requests, to compare engines by.
        anyway: Go on when the engine, an attestation or the canary is refused, to see
            what else differs; no artifact is written then.
        canary: Whether to count that every patch is reached.
        seed: Of the prompts; runs of one claim need different ones.
        out: Where results go.
        name: Of the results.
    """

    model: Path
    kind: str
    tensor_parallel: int
    expert_parallel: bool
    prompts: tuple[int, ...]
    tokens: int
    cache_gib: float
    optimizer: str
    learning_rate: float
    budget: int
    fingerprint: bool
    anyway: bool
    canary: bool
    seed: int
    out: Path
    name: str
    rendezvous: str = ""
    contract: dict[str, Any] = field(default_factory=dict)
    contract_digest: str = ""
    compared: dict[str, str] = field(default_factory=dict)


def set_up(claim: Claim, scratch: Path) -> Claim:
    """Validate the profile against this machine and set the environment.

    To be called before anything imported torch.
    """
    from dataclasses import replace

    from patchkit.runtime.contract import observe, preflight

    profile = profile_of(claim)
    run_dir = scratch / f"attestations-{claim.name}-{os.getpid()}"
    contract = preflight(profile, observe(profile, claim.model), opt_in=True, run_dir=run_dir)

    contract.environment.apply()
    own = rollout.environment("stock", scratch, tag="-" + claim.name)
    os.environ.update({k: v for k, v in own.items() if k not in contract.environment.variables})
    os.environ["PATCHKIT_CANARY"] = str(int(claim.canary))
    # With several workers the core shares the front end's process, and its canary; with
    # one, the core has to be apart: it is the worker, and maps the trainer's memory.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if claim.tensor_parallel == 1 else "0"
    return replace(
        claim,
        contract=contract.as_dict(),
        contract_digest=contract.digest,
        compared=contract.environment.compared,
    )


def weight_map() -> str:
    """The adapter's."""
    from patchkit.engine import find_adapter

    found = find_adapter("qwen3_moe").weight_map
    assert found is not None
    return found


def profile_of(claim: Claim) -> Any:
    """The adapter's profile at the claim's topology."""
    from patchkit.engine import find_adapter
    from patchkit.runtime.profile import load_profile

    folder = find_adapter("qwen3_moe").profiles
    assert folder is not None
    ranks = claim.tensor_parallel
    return load_profile(folder / f"{claim.kind}.toml").changed(
        **{
            "topology.rollout.tensor": ranks,
            "topology.rollout.expert": ranks if claim.expert_parallel else 1,
            "topology.trainer.data": ranks,
        }
    )


@ends_process
def run(rank: int, claim: Claim) -> None:
    """One rank of the trainer; rank 0 also drives the engine."""
    _Run(rank, claim).run()


class _Run:
    """The stages of one run; they share an engine and a trainer."""

    def __init__(self, rank: int, claim: Claim) -> None:
        import torch.distributed as dist

        self.rank, self.claim, self.world = rank, claim, claim.tensor_parallel
        self.begin = time.perf_counter()
        self.dist = dist
        self.llm: Any = None
        self.sync: Any = None
        self.artifact: Any = None
        self.report: dict[str, Any] = {
            "kind": claim.kind,
            "tensor_parallel": self.world,
            "expert_parallel": claim.expert_parallel,
            "optimizer": claim.optimizer,
            "contract": claim.contract_digest,
            "refused": [],
            "phases": [],
            "finished": False,
        }

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"[{time.perf_counter() - self.begin:6.1f}] {text}", flush=True)

    def write(self) -> None:
        if self.rank == 0:
            path = self.claim.out / f"{self.claim.name}.json"
            path.write_text(json.dumps(self.report, indent=1))

    def refusable(self, what: str, work: Callable[[], Any]) -> Any:
        """Do it; a refusal ends the run, or is noted where the run goes on anyway."""
        from patchkit.errors import PatchkitError

        try:
            return work()
        except PatchkitError as refusal:
            if not self.claim.anyway:
                raise
            self.report["refused"].append({"what": what, "why": str(refusal)})
            self.say(f"REFUSED, {what}: {refusal}")
            return None

    # -- start ---------------------------------------------------------------------------

    def run(self) -> None:
        self._start()
        for version, count in enumerate(self.claim.prompts):
            self._version(version, count, last=version + 1 == len(self.claim.prompts))
        self._finish()

    def _start(self) -> None:
        import torch

        import patchkit
        from benchmarks.gpu_runs.trainer import Trainer
        from patchkit.parity.gate import ParityGate
        from patchkit.runtime.attestation import attest
        from patchkit_adapters.qwen3_moe.cuda import VLLM_BI
        from patchkit_adapters.qwen3_moe.cuda_trainer import match_rollout

        claim = self.claim
        torch.cuda.set_device(self.rank)
        self.dist.init_process_group(
            "nccl", init_method=claim.rendezvous, rank=self.rank, world_size=self.world,
            device_id=torch.device("cuda", self.rank), timeout=timedelta(seconds=400),
        )  # fmt: skip
        # Waiting on the GPU would take it from the engine that is being waited for.
        self.control = self.dist.new_group(backend="gloo", timeout=timedelta(seconds=400))
        self.installation = patchkit.install(
            adapter="qwen3_moe", side="trainer", profile=claim.kind
        )
        if claim.kind in VLLM_BI:  # the others' bits do not depend on it
            match_rollout(tensor_parallel=self.world, expert_parallel=claim.expert_parallel)
        # An engine in this process freezes the collector; what is patched must be here first.
        import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
        if self.rank == 0:
            self._engine()
            self.say("engine is up")
        self.dist.barrier(self.control)
        self.trainer = Trainer(
            claim.model,
            optimizer=claim.optimizer,
            learning_rate=claim.learning_rate,
            budget=claim.budget,
        )
        self.gate = ParityGate(timeout_s=300)
        attest(role="trainer", rank=self.rank, installation=self.installation)
        self.say("trainer is up")
        self.dist.barrier(self.control)
        if self.rank == 0:
            self.refusable("attestations", self._attestations)
        self._deliver(0)
        if claim.fingerprint and self.rank == 0:
            start = time.perf_counter()
            self.report["fingerprint"] = rollout.fingerprint(
                self.llm, claim.out / f"{claim.name}.bits"
            )
            self.say(f"fingerprint in {time.perf_counter() - start:.1f} s")
        self.dist.barrier(self.control)

    def _engine(self) -> None:
        from vllm import LLM

        from benchmarks.gpu_runs.model import has_weights
        from patchkit.runtime.engine_gate import require_engine
        from patchkit.runtime.extension import WORKER_EXTENSION
        from patchkit.runtime.sync import WeightSync, register_backend

        profile = profile_of(self.claim)
        register_backend()
        arguments = profile.engine_arguments(str(self.claim.model))
        compilation = arguments.setdefault("compilation_config", {})
        compilation["cudagraph_capture_sizes"] = rollout.CAPTURED
        self.llm = LLM(
            **arguments,
            skip_tokenizer_init=True,
            seed=0,
            disable_log_stats=False,
            kv_cache_memory_bytes=int(self.claim.cache_gib * 2**30),
            gpu_memory_utilization=0.08,
            load_format="auto" if has_weights(self.claim.model) else "dummy",
            worker_extension_cls=WORKER_EXTENSION,
        )
        self.refusable("engine", lambda: require_engine(self.llm, profile))
        weights = profile.content.weights
        self.sync = WeightSync(
            self.llm, weight_map=weight_map(), mode=weights.receipts, caches=weights.caches
        )

    def _attestations(self) -> None:
        from patchkit.runtime.artifact import Artifact
        from patchkit.runtime.attestation import (
            collect_attestations,
            rollout_processes,
            trainer_processes,
        )

        self.llm.collective_rpc("patchkit_attest")
        found = collect_attestations(
            os.environ["PATCHKIT_RUN_DIR"],
            [*rollout_processes(tensor_parallel=self.world), *trainer_processes(self.world)],
            contract_digest=self.claim.contract_digest,
            environment=self.claim.compared,
        )
        self.report["attested"] = [
            {"process": str(a.process), "state": a.state, "manifest": a.manifest_digest}
            for a in found
        ]
        self.rollout_manifest = next(a.manifest for a in found if a.role == "worker")
        self.artifact = Artifact(
            self.claim.contract, unreviewed={s for a in found for s in a.unreviewed}
        )
        self.artifact.add_attestations(found)

    # -- weights -------------------------------------------------------------------------

    def _deliver(self, version: int) -> None:
        """Versions after the first, and the first of an engine that was started empty."""
        from benchmarks.gpu_runs.model import has_weights
        from patchkit.runtime.sharing import by_module, parts
        from patchkit.runtime.weights import reduce_receipt, tensors_receipt
        from patchkit_adapters.qwen3_moe.cuda_weights import NAMES

        start = time.perf_counter()
        self.trainer.reshard()
        model = self.trainer.model
        own = tensors_receipt(f"trainer {self.rank}", model.named_parameters(), version=version)
        whole = reduce_receipt(own, self.control)
        shared = parts(
            model, version, groups=by_module(model, "model.layers"), group=self.control, names=NAMES
        )
        delivered = version > 0 or not has_weights(self.claim.model)
        if self.rank > 0:
            if delivered:
                for _ in shared:
                    pass
        else:
            if version:
                record = self.sync.update_from(version, shared, whole)
            else:
                record = self.sync.begin(whole, parts=shared if delivered else None)
            seconds = {k: round(v, 3) for k, v in record.seconds.items()}
            self.report.setdefault("syncs", []).append(
                {
                    "version": version,
                    "digest": whole.digest,
                    "violations": len(record.violations),
                    "seconds": seconds,
                    "total_s": round(time.perf_counter() - start, 3),
                }
            )
            if self.artifact is not None:
                self.artifact.add_refit(record)
            self.say(f"version {version}: {self.report['syncs'][-1]}")
        self.dist.barrier(self.control)

    # -- one version ---------------------------------------------------------------------

    def _version(self, version: int, count: int, *, last: bool) -> None:
        if version:
            self._deliver(version)
        phase: dict[str, Any] = {"version": version}
        samples = self._sampled(version, count, phase)
        start = time.perf_counter()
        mine = self._replay(samples, first=version == 0)
        replayed = self._gathered(mine)
        phase["replay_s"] = round(time.perf_counter() - start, 3)
        if self.rank == 0:
            phase["rollout_replay"] = compared(samples, replayed)
            self.say(f"version {version} rollout against replay: {phase['rollout_replay']}")
        self.report["phases"].append(phase)
        self.write()
        advantages = [random.Random(i).gauss(0, 1) for i in range(len(samples))]
        start = time.perf_counter()
        step = self.trainer.step(samples, advantages, prove=self._prover(samples, mine, version))
        phase["step_s"] = round(time.perf_counter() - start, 3)
        phase["grad_norm"] = step["grad_norm"]
        trained = self._gathered(step["logprobs"])
        if self.rank == 0:
            phase["rollout_training"] = compared(samples, trained)
            self.say(f"version {version} rollout against training: {phase['rollout_training']}")
            self._keep(version, samples, replayed, trained, phase)
        self.installation.verify()
        self.write()

    def _sampled(self, version: int, count: int, phase: dict[str, Any]) -> list[rollout.Sample]:
        """Every prompt twice in one call: the second time its prefix is in the cache."""
        box: list[Any] = [None]
        if self.rank == 0:
            self.sync.state.require_usable("sampling")
            before = rollout.counters(self.llm)
            asked = rollout.prompts(100 + 1000 * self.claim.seed + version, count)
            samples, seconds, cached = rollout.sample(self.llm, asked + asked, self.claim.tokens)
            after = rollout.counters(self.llm)
            phase["sampling"] = {
                "tokens": sum(len(s.tokens) for s in samples),
                "seconds": round(seconds, 3),
                "cached_prompt_tokens": cached,
                "preemptions": int(after["vllm:num_preemptions"] - before["vllm:num_preemptions"]),
                # A step takes this many; what waits is cut where a step is full.
                "prompt_tokens": sum(len(s.prompt) for s in samples),
            }
            self.say(f"version {version} sampled: {phase['sampling']}")
            if version == 0 and self.claim.canary:
                self.refusable("canary", self._canary)
            box = [[(s.prompt, s.tokens, s.logprobs) for s in samples]]
        self.dist.broadcast_object_list(box, src=0, group=self.control)
        return [rollout.Sample(*parts) for parts in box[0]]

    def _canary(self) -> None:
        """End the canary of this process and of the workers; every patch must have run."""
        from patchkit.runtime.reach import end_canary, require_reached

        counts = [end_canary(), *self.llm.collective_rpc("patchkit_hits")]
        self.report["hits_by_process"] = counts
        if self.artifact is not None:
            self.report["hits"] = require_reached(self.rollout_manifest, counts)

    def _replay(self, samples: list[rollout.Sample], *, first: bool) -> dict[int, Any]:
        if not first:
            return self.trainer.replay(samples)
        with self.installation.canary(watch_calls=False) as canary:
            found = self.trainer.replay(samples)
        self.report["trainer_hits"] = dict(canary.hits)
        return found

    def _prover(
        self, samples: Sequence[rollout.Sample], mine: dict[int, Any], version: int
    ) -> Callable[[Sequence[int], Any], None]:
        """The parity gate, between the forward and the backward of each batch."""
        from patchkit.parity.oracle import SelectedLogprobs

        def chosen(indices: Sequence[int], values: Sequence[Any]) -> SelectedLogprobs:
            return SelectedLogprobs.from_sequences(
                values,
                [samples[i].tokens for i in indices],
                [len(samples[i].prompt) for i in indices],
                sequence_numbers=list(indices),
            )

        def prove(indices: Sequence[int], values: Any) -> None:
            parts = values.detach().cpu().split([len(samples[i].tokens) for i in indices])
            with self.gate.step(version=version) as step:
                step.rollout = chosen(indices, [samples[i].logprobs for i in indices])
                step.recompute = chosen(indices, [mine[i] for i in indices])
                step.first_forward = chosen(indices, parts)
                step.start_versions = step.end_versions = version

        return prove

    def _gathered(self, mine: dict[int, Any]) -> dict[int, Any]:
        everybody: list[Any] = [None] * self.world
        self.dist.all_gather_object(everybody, mine, group=self.control)
        return {index: values for part in everybody for index, values in part.items()}

    def _keep(
        self,
        version: int,
        samples: list[rollout.Sample],
        replayed: dict[int, Any],
        trained: dict[int, Any],
        phase: dict[str, Any],
    ) -> None:
        if self.artifact is None:
            return
        import torch

        self.artifact.add_round(
            PHASES[version > 0],
            version=version,
            sequences=[i for i, s in enumerate(samples) for _ in s.tokens],
            positions=[len(s.prompt) + i for s in samples for i in range(len(s.tokens))],
            token_ids=[t for s in samples for t in s.tokens],
            rollout=torch.tensor([v for s in samples for v in s.logprobs], dtype=torch.float32),
            recompute=torch.cat([replayed[i] for i in range(len(samples))]),
            first_forward=torch.cat([trained[i] for i in range(len(samples))]),
            start_versions=[version] * len(samples),
            end_versions=[version] * len(samples),
            notes={**phase["sampling"], "grad_norm": phase["grad_norm"]},
        )

    def _finish(self) -> None:
        if self.rank == 0:
            pairs = [p[k] for p in self.report["phases"] for k in p if k.startswith("rollout_")]
            self.report["tokens"] = sum(
                p["rollout_replay"]["tokens"] for p in self.report["phases"]
            )
            self.report["mismatches"] = sum(p["mismatches"] for p in pairs)
            if self.artifact is not None and not self.report["refused"]:
                self.refusable("artifact", self._seal)
            self.report["finished"] = True
            self.write()
            self.say(f"tokens {self.report['tokens']}, mismatches {self.report['mismatches']}")
        self.dist.barrier(self.control)

    def _seal(self) -> None:
        from patchkit.runtime.artifact import load_artifact, verify_artifact

        path = self.artifact.write(self.claim.out / f"{self.claim.name}.artifact.json")
        verified = verify_artifact(path)
        self.report["artifact"] = {
            "digest": load_artifact(path)["digest"],
            "verdict": verified.verdict,
            "exact": verified.exact,
        }
        self.say(f"artifact: {self.report['artifact']}")


def compared(samples: list[rollout.Sample], found: dict[int, Any]) -> dict[str, Any]:
    """Tokens, mismatches and the first of them."""
    import torch

    from patchkit.parity.metrics import compare_logprobs

    metrics = compare_logprobs(
        torch.tensor([v for s in samples for v in s.logprobs], dtype=torch.float32),
        torch.cat([found[i] for i in range(len(samples))]),
        positions=[len(s.prompt) + i for s in samples for i in range(len(s.tokens))],
        token_ids=[t for s in samples for t in s.tokens],
        sequences=[i for i, s in enumerate(samples) for _ in s.tokens],
        first=3,
    )
    data = metrics.as_dict()
    return {
        "tokens": data["token_count"],
        "mismatches": data["mismatch_count"],
        "max_absdiff": data["max_absdiff"],
        "k3_mean": data["k3_mean"],
        "first": [str(m) for m in metrics.first_mismatches],
        "violations": [str(v) for v in metrics.violations],
    }
