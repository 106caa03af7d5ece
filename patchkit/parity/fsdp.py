"""A reference trainer: Hugging Face model, FSDP2, exact replay, gate, AdamW.

One object per rank. Parameters are kept in float32 and computed with in bf16
(``MixedPrecisionPolicy``), so what the engine receives is the bf16 rounding of
the master weights: the very numbers that the trainer's own forward uses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from patchkit.engine import find_adapter, resolve_reference
from patchkit.errors import ConfigurationError
from patchkit.parity.gate import GateReport, ParityGate
from patchkit.parity.oracle import SelectedLogprobs
from patchkit.parity.workload import Clock, Rollout, micro_batches
from patchkit.runtime.weights import Receipt, reduce_receipt, tensors_receipt

SelectLogprobs = Callable[[Tensor, Tensor], Tensor]
# A micro-batch and its selected-token log-probabilities, graph attached.
_Forward = tuple[list[Rollout], list[Tensor]]


def stock_logprobs(logits_TV: Tensor, tokens_T: Tensor) -> Tensor:
    """What a trainer computes without patchkit: ``[T, V]`` and ``[T]`` to ``[T]`` float32."""
    return logits_TV.float().log_softmax(-1).gather(-1, tokens_T[:, None])[:, 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """How the reference trainer is built.

    Attributes:
        model: Folder with ``config.json`` and weights.
        micro_batch: Sequences per forward.
        learning_rate: AdamW's.
        attention: ``attn_implementation`` of the Hugging Face model.
        checkpointing: Activation checkpointing: None, ``"reentrant"`` or
            ``"non_reentrant"``.
        gate_timeout_s: Bound of the parity gate.
        clip: Half-width of PPO's trust region around a ratio of one; None clips nothing.
        device: ``cpu``, or ``cuda`` for the device that this process sees as its own.
    """

    model: Path
    micro_batch: int = 16
    learning_rate: float = 1e-3
    attention: str = "sdpa"
    checkpointing: str | None = "non_reentrant"
    gate_timeout_s: float = 60.0
    clip: float | None = None
    device: str = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one rank brings home from a step.

    Attributes:
        report: The gate's, the same on every rank.
        recompute: This rank's share, float32 ``[tokens]`` per sequence.
        first_forward: Likewise.
        figures: ``grad_norm`` and this rank's ``loss``; empty if no step was taken.
        seconds: This rank's time per stage.
    """

    report: GateReport
    recompute: list[Tensor]
    first_forward: list[Tensor]
    figures: dict[str, float]
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnprovenStep:
    """What one rank brings home from a step that nothing was shown about.

    Attributes:
        first_forward: This rank's share, float32 ``[tokens]`` per sequence.
        figures: As in :class:`StepResult`.
        seconds: Likewise.
    """

    first_forward: list[Tensor]
    figures: dict[str, float]
    seconds: dict[str, float]


class FSDPTrainer:
    """One rank of the trainer; needs an initialised process group.

    Args:
        settings: See :class:`TrainerSettings`.
        exact: Enters the exact path (``patchkit.exact_context``).
        select_logprobs: The adapter's log-probabilities, used on the exact path.
        installation: The trainer side's installation; its first step is a canary run.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        *,
        exact: Callable[[], AbstractContextManager[Any]],
        select_logprobs: SelectLogprobs,
        installation: Any = None,
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from transformers import AutoModelForCausalLM

        self.settings = settings
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._exact, self._select = exact, select_logprobs
        self._installation, self._unproven = installation, installation is not None
        self.version = 0
        self.model = AutoModelForCausalLM.from_pretrained(
            settings.model, dtype=torch.float32, attn_implementation=settings.attention
        )
        self.model.train()
        if settings.checkpointing:
            self.model.gradient_checkpointing_enable(
                {"use_reentrant": settings.checkpointing == "reentrant"}
            )
        self.model.to(settings.device)
        mesh = init_device_mesh(settings.device, (self.world_size,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        units = set(self.model._no_split_modules)
        for module in list(self.model.modules()):
            if type(module).__name__ in units:
                fully_shard(module, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.learning_rate)
        self.gate = ParityGate(timeout_s=settings.gate_timeout_s)

    # -- forwards ----------------------------------------------------------------------

    def _forward(self, batch: Sequence[Rollout], *, exact: bool) -> list[Tensor]:
        """Selected-token log-probabilities, one float32 ``[tokens]`` per sequence."""
        longest = max((len(r) for r in batch), default=1)
        device = self.settings.device
        ids = torch.zeros(max(1, len(batch)), longest, dtype=torch.long, device=device)
        for row, rollout in enumerate(batch):
            ids[row, : len(rollout)] = torch.tensor(rollout.prompt + rollout.tokens)
        select = self._select if exact else stock_logprobs
        with self._exact() if exact else nullcontext():
            logits = self.model(input_ids=ids, use_cache=False).logits
            found = [
                # The logits at a position belong to the token that follows it.
                select(
                    logits[row, len(r.prompt) - 1 : len(r) - 1],
                    torch.tensor(r.tokens, device=device),
                )
                for row, r in enumerate(batch)
            ]
        # A rank without sequences still takes part in backward.
        return found or [logits.float().sum()[None] * 0.0]

    def _batches(self, rollouts: Sequence[Rollout]) -> Iterator[list[Rollout]]:
        return micro_batches(rollouts, self.rank, self.world_size, self.settings.micro_batch)

    def _mine(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        return list(rollouts[self.rank :: self.world_size])

    @torch.no_grad()
    def replay(self, rollouts: Sequence[Rollout], *, exact: bool) -> list[Tensor]:
        """Score this rank's share of the rollouts without gradient."""
        found: list[Tensor] = []
        for batch in self._batches(rollouts):
            found += [lp.cpu() for lp in self._forward(batch, exact=exact)[: len(batch)]]
        return found

    def batches(self, rollouts: Sequence[Rollout]) -> Iterator[list[Rollout]]:
        """This rank's micro-batches, for an observer that replays them one by one."""
        return self._batches(rollouts)

    @torch.no_grad()
    def replay_batch(self, batch: Sequence[Rollout], *, exact: bool) -> list[Tensor]:
        """Score one micro-batch of :meth:`batches` without gradient."""
        return [lp.cpu() for lp in self._forward(batch, exact=exact)]

    @contextmanager
    def _canary(self) -> Iterator[None]:
        """Until one succeeds: a run at whose end every required patch must have been reached."""
        if not self._unproven:
            yield
            return
        with self._installation.canary(watch_calls=False):
            yield
        self._unproven = False

    # -- the step ----------------------------------------------------------------------

    def prove(self, rollouts: Sequence[Rollout], *, recompute: bool = True) -> StepResult:
        """Recompute, first training forward, gate; no step.

        Raises:
            ParityError: On all ranks.
        """
        return self._prove(rollouts, recompute=recompute)[0]

    def step(
        self,
        rollouts: Sequence[Rollout],
        advantages: Sequence[float],
        *,
        recompute: bool = True,
    ) -> StepResult:
        """Recompute, first training forward, gate, then backward and optimizer.

        The first forwards of all micro-batches are compared before the first
        backward runs, so that no gradient of an unproven batch is ever taken.

        Args:
            rollouts: All sequences of the step; each rank takes its share.
            advantages: One per sequence.
            recompute: False leaves the recompute out, which the gate refuses.

        Returns:
            The gate's report, this rank's log-probabilities, and figures of the step.

        Raises:
            ParityError: On all ranks; weights and optimizer are as before.
        """
        proven, forwards = self._prove(rollouts, recompute=recompute)
        clock = Clock()
        figures = self._update(rollouts, advantages, forwards)
        clock("update")
        return StepResult(
            report=proven.report,
            recompute=proven.recompute,
            first_forward=proven.first_forward,
            figures=figures,
            seconds={**proven.seconds, **clock.seconds},
        )

    def step_unproven(
        self, rollouts: Sequence[Rollout], advantages: Sequence[float], *, exact: bool
    ) -> UnprovenStep:
        """Forward, backward and optimizer without recompute and gate.

        What a trainer without patchkit does (``exact=False``), and what the gate's
        cost is measured against (``exact=True``). Nothing is claimed about it.
        """
        clock = Clock()
        forwards = [(b, self._forward(b, exact=exact)) for b in self._batches(rollouts)]
        clock("first_forward")
        figures = self._update(rollouts, advantages, forwards)
        clock("update")
        return UnprovenStep(
            first_forward=_detached(forwards), figures=figures, seconds=clock.seconds
        )

    def _prove(
        self, rollouts: Sequence[Rollout], *, recompute: bool
    ) -> tuple[StepResult, list[_Forward]]:
        mine = self._mine(rollouts)
        forwards: list[_Forward] = []
        clock = Clock()
        with self.gate.step(version=self.version) as gate:
            gate.rollout = selected(mine, [r.logprobs for r in mine])
            gate.start_versions = [r.start_version for r in mine]
            gate.end_versions = [r.end_version for r in mine]
            gate.optimizer_version = self.version
            with self._canary() if recompute else nullcontext():
                replayed = self.replay(rollouts, exact=True) if recompute else []
            if recompute:
                gate.recompute = selected(mine, replayed)
            clock("recompute")
            for batch in self._batches(rollouts):
                forwards.append((batch, self._forward(batch, exact=True)))
            first = _detached(forwards)
            gate.first_forward = selected(mine, first)
            clock("first_forward")
        clock("gate")
        assert gate.report is not None
        proven = StepResult(
            report=gate.report,
            recompute=replayed,
            first_forward=first,
            figures={},
            seconds=clock.seconds,
        )
        return proven, forwards

    def _update(
        self,
        rollouts: Sequence[Rollout],
        advantages: Sequence[float],
        forwards: Sequence[_Forward],
    ) -> dict[str, float]:
        """Backward and optimizer step from forwards that were run already."""
        advantage = dict(zip((r.number for r in rollouts), advantages, strict=True))
        total = sum(len(r.tokens) for r in rollouts)
        device, clip = self.settings.device, self.settings.clip
        loss = torch.zeros((), device=device)
        for batch, lps in forwards:
            if not batch:
                loss = loss + lps[0].sum()
            for rollout, lp in zip(batch, lps, strict=False):
                # On-policy: the ratio is one exactly, its gradient is not.
                ratio = torch.exp(lp - torch.tensor(rollout.logprobs, device=device))
                gain = ratio * advantage[rollout.number]
                if clip is not None:
                    near = ratio.clamp(1 - clip, 1 + clip) * advantage[rollout.number]
                    gain = torch.minimum(gain, near)
                loss = loss - gain.sum() * (self.world_size / total)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e9)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if not bool(torch.isfinite(norm)):
            self.optimizer.zero_grad()
            raise FloatingPointError(f"gradient norm is {float(norm)}; no optimizer step was taken")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.version += 1
        return {"grad_norm": float(norm), "loss": float(loss.detach())}

    def policy_version(self) -> int:
        """Optimizer steps taken so far; asks no other rank."""
        return self.version

    # -- weights -----------------------------------------------------------------------

    def receipt(self) -> Receipt:
        """What the engine must hold at this version, digested where the shards are."""
        from torch.distributed.fsdp import FSDPModule

        # After a forward without a backward (a replay, a refused step) the outermost
        # module still holds whole parameters, on every rank.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        holder = f"trainer rank {self.rank}"
        parameters = self.model.named_parameters()
        own = tensors_receipt(holder, parameters, dtype=torch.bfloat16, version=self.version)
        saved = tensors_receipt(holder, self._saved_buffers().items()).parameters
        if self.rank:
            # Every rank holds them whole, and the receipts are added up.
            saved = {name: replace(buffer, pieces=()) for name, buffer in saved.items()}
        return reduce_receipt(replace(own, parameters={**own.parameters, **saved}))

    def _saved_buffers(self) -> dict[str, Tensor]:
        """Buffers that belong to a checkpoint; mixed precision leaves their dtype alone."""
        saved = set(self.model.state_dict())
        return {name: buffer for name, buffer in self.model.named_buffers() if name in saved}

    def export(self, folder: Path) -> None:
        """Write a checkpoint in bf16 that the engine (and a stock one) can load."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        state: dict[str, Any] = get_model_state_dict(
            self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        if self.rank == 0:
            from safetensors.torch import save_file

            folder.mkdir(parents=True, exist_ok=True)
            tied = set(getattr(self.model, "_tied_weights_keys", None) or ())
            if not self.model.config.tie_word_embeddings:
                tied = set()
            buffers = self._saved_buffers()
            tensors = {
                name: (value if name in buffers else value.to(torch.bfloat16)).contiguous()
                for name, value in state.items()
                if name not in tied
            }
            temporary = folder / "model.safetensors.partial"
            save_file(tensors, temporary, metadata={"format": "pt"})
            os.replace(temporary, folder / "model.safetensors")
            for name in ("config.json", "generation_config.json"):
                source = self.settings.model / name
                if source.exists():
                    (folder / name).write_bytes(source.read_bytes())
        dist.barrier()


def _detached(forwards: Sequence[_Forward]) -> list[Tensor]:
    return [lp.detach().cpu() for batch, lps in forwards for lp in lps[: len(batch)]]


def build_trainer(settings: Any, installation: Any) -> FSDPTrainer:
    """Build one trainer rank; named by reference in its settings.

    Without an adapter it is a stock trainer, which has no exact path to enter.
    """
    if installation is None:
        return FSDPTrainer(settings.options, exact=_no_exact_path, select_logprobs=stock_logprobs)
    import patchkit

    return FSDPTrainer(
        settings.options,
        exact=patchkit.exact_context,
        select_logprobs=resolve_reference(find_adapter(settings.adapter).logprobs),
        installation=installation,
    )


def _no_exact_path() -> AbstractContextManager[Any]:
    raise ConfigurationError(
        "a stock trainer has no exact path; start the group with an adapter, or use "
        "step_unproven(exact=False) and replay(exact=False)"
    )


def selected(rollouts: Sequence[Rollout], logprobs: Sequence[Any]) -> SelectedLogprobs:
    """Log-probabilities with the sequences, positions and tokens they belong to."""
    return SelectedLogprobs.from_sequences(
        logprobs,
        [r.tokens for r in rollouts],
        [len(r.prompt) for r in rollouts],
        sequence_numbers=[r.number for r in rollouts],
    )
