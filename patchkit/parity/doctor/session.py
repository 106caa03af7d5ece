"""Both sides, running: record, compare, look closer.

One session holds one engine and one trainer group, and can examine them as often as
wanted: before and after a weight update, say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from patchkit.errors import ConfigurationError
from patchkit.parity import rollout_engine as engines
from patchkit.parity.doctor.causes import guess
from patchkit.parity.doctor.compare import (
    Cell,
    Comparison,
    aligned,
    aligned_rows,
    compare,
    measure,
)
from patchkit.parity.doctor.covering import applicable_patches, covering_patches
from patchkit.parity.doctor.diagnosis import Diagnosis
from patchkit.parity.doctor.layout import DEFAULT_LAYOUT, locate
from patchkit.parity.doctor.recording import (
    AFTER,
    HeldTensor,
    OperatorKey,
    OperatorRecord,
    Recording,
    gathered,
    gathered_tensor,
    merged,
    tensor_from_plain,
)
from patchkit.parity.doctor.rollout import DOCTOR_EXTENSION
from patchkit.parity.doctor.setup import DoctorError, DoctorSetup, Workload
from patchkit.parity.fsdp import TrainerSettings
from patchkit.parity.trainer_group import TrainerGroup
from patchkit.parity.workload import Rollout, by_sequence, mixed_prompts
from patchkit.runtime.attestation import collect_attestations, rollout_processes

__all__ = ["DoctorSession", "Pair"]

Observer = Callable[[str], None]
_SELECTED = OperatorKey(AFTER, "logprob")
_LOG_SOFTMAX = OperatorKey(AFTER, "log_softmax")


@dataclass(slots=True, kw_only=True)
class Pair:
    """One recording of each side, over the same tokens.

    Attributes:
        rollout: The engine's.
        trainer: The trainer's.
        rollouts: The sampled sequences.
        version: The trainer's policy version.
    """

    rollout: Recording
    trainer: Recording
    rollouts: list[Rollout]
    version: int


class DoctorSession:
    """An engine and a trainer under examination; a context manager.

    Args:
        setup: From :func:`patchkit.parity.doctor.set_up`, called before this module
            (which imports torch) was imported.
        observe: Called with the name of each stage as it begins.
        prepare: Called after both patch sets and before the engine is built; for tests
            that plant a difference.
    """

    def __init__(
        self,
        setup: DoctorSetup,
        observe: Observer = lambda stage: None,
        *,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self.setup, self.settings = setup, setup.settings
        self._observe = observe
        self._stack = ExitStack()
        self.exact = self.settings.pair == "exact"
        # What the next recording samples; may be changed between two.
        self.workload: Workload = self.settings.workload
        # False leaves the engine's prefix cache as it is: the one it would sample with.
        self.reset_cache = True
        self.previous: dict[int, Recording] = {}
        self._layout = (setup.adapter.doctor if setup.adapter else "") or ""
        self._spans: list[dict[OperatorKey, tuple[int, int] | None]] = []
        try:
            self._start(prepare)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> DoctorSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine and the trainer."""
        self._stack.close()

    # -- both sides ------------------------------------------------------------------------

    def _start(self, prepare: Callable[[], None] | None) -> None:
        setup, settings = self.setup, self.settings
        self._observe(
            f"start vLLM and FSDP2 ({settings.ranks} "
            f"{'rank' if settings.ranks == 1 else 'ranks'}), {settings.pair} pair"
        )
        self.trainer = self._stack.enter_context(
            TrainerGroup.start(
                adapter=setup.adapter.name if self.exact and setup.adapter else "",
                profile=setup.profile.name if self.exact and setup.profile else "",
                world_size=settings.ranks,
                build="patchkit.parity.doctor.trainer:build_doctor_trainer",
                options=TrainerSettings(
                    model=setup.model, attention=settings.attention, checkpointing=None
                ),
                environment=setup.trainer_environment,
            )
        )
        self.engine: engines.RolloutEngine | None = None
        if self.exact:
            self._start_exact(prepare)
        else:
            if prepare is not None:
                prepare()
            self.llm = self._stock_engine()
        self._stack.callback(_shut_down, self.llm)
        self.trainer.ready()

    def _start_exact(self, prepare: Callable[[], None] | None) -> None:
        from patchkit.runtime.worker import activate

        setup = self.setup
        assert setup.profile is not None and setup.adapter is not None
        # What vLLM's plugin does as well, a moment later: here, so that `prepare` comes after.
        activate()
        if prepare is not None:
            prepare()
        self.engine = engines.RolloutEngine(
            setup.profile,
            setup.model,
            weight_map=setup.adapter.weight_map or "",
            seed=self.settings.seed,
            extension=DOCTOR_EXTENSION,
        )
        self.llm = self.engine.llm
        if prepare is None:  # what is planted on top is just what an attestation refuses
            self._attest()

    def _attest(self) -> None:
        """The plugin is not trusted: every worker says what is installed in it."""
        setup = self.setup
        self.llm.collective_rpc("patchkit_attest")
        assert setup.contract is not None
        collect_attestations(
            setup.folder / "attestations",
            rollout_processes(tensor_parallel=self.settings.tensor_parallel_size),
            contract_digest=setup.contract.digest,
            environment=setup.contract.environment.compared,
        )

    def _stock_engine(self) -> Any:
        from vllm import LLM

        setup, seed = self.setup, self.settings.seed
        if setup.profile is not None:
            arguments = engines.engine_arguments(
                setup.profile, setup.model, seed=seed, weight_updates=False
            )
        else:
            longest = self.workload.longest + self.workload.new_tokens
            arguments = {
                "model": str(setup.model),
                "dtype": "bfloat16",
                "enforce_eager": True,
                "skip_tokenizer_init": True,
                "max_model_len": max(64, longest + 1),
                "max_num_seqs": 16,
                "max_num_batched_tokens": 64,
                "generation_config": "vllm",
                "seed": seed,
                "disable_log_stats": False,
                "tensor_parallel_size": self.settings.tensor_parallel_size,
            }
        return LLM(**arguments, worker_extension_cls=DOCTOR_EXTENSION)

    def begin_updates(self) -> None:
        """Adopt the initial weights as version 0, so that :meth:`update` can follow."""
        assert self.engine is not None, "weights are updated in the exact pair only"
        self.engine.sync.begin(self.trainer("receipt")[0], version=0)

    def update(self, rollouts: Sequence[Rollout], version: int) -> None:
        """One optimizer step of the trainer, delivered into the engine."""
        assert self.engine is not None, "weights are updated in the exact pair only"
        gains = [1.0 if r.number % 2 else -1.0 for r in rollouts]
        self.trainer("step", rollouts=list(rollouts), advantages=gains, exact=self.exact)
        self.deliver(version)

    def deliver(self, version: int) -> None:
        """The trainer's present weights into the engine, as this version."""
        assert self.engine is not None, "weights are updated in the exact pair only"
        folder = self.setup.folder / f"checkpoint-{version}"
        self.trainer("export", folder=folder)
        receipt = self.trainer("receipt")[0] if self.engine.sync.mode != "off" else None
        self.engine.sync.update(version, folder / "model.safetensors", receipt)

    # -- recording --------------------------------------------------------------------------

    def prompts(self) -> list[tuple[int, ...]]:
        """Prompts that are cut into chunks, share a prefix, and are very short."""
        s = self.workload
        vocabulary = int(_text_config(self.setup.config)["vocab_size"])
        return mixed_prompts(
            s.sequences,
            vocabulary=vocabulary,
            seed=self.settings.seed + 17,
            longest=s.longest,
            shared_prefix=min(16, s.longest),
        )

    def record(self, *, hold: Iterable[OperatorKey] = ()) -> Pair:
        """Sample with the engine, replay with the trainer, and record both."""
        wanted = list(hold)
        self._observe("sample with the engine, and record it")
        recording, rollouts = self.record_rollout(hold=wanted)
        self._observe("replay with the trainer, and record it")
        replayed = self.record_trainer(rollouts, hold=wanted)
        version = int(self.trainer("policy_version")[0])
        return Pair(rollout=recording, trainer=replayed, rollouts=rollouts, version=version)

    def _empty_cache(self) -> None:
        if self.reset_cache:
            self.llm.reset_prefix_cache()

    def _generate(self) -> tuple[list[tuple[int, ...]], list[Any]]:
        from vllm import SamplingParams

        prompts = self.prompts()
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(p)} for p in prompts],
            SamplingParams(
                temperature=1.0,
                max_tokens=self.workload.new_tokens,
                logprobs=0,
                detokenize=False,
                ignore_eos=True,
            ),
            use_tqdm=False,
        )
        return prompts, outputs

    def sample(self) -> list[Rollout]:
        """Sample the workload and record nothing."""
        self._empty_cache()
        prompts, outputs = self._generate()
        return [_rollout(i, p, o) for i, (p, o) in enumerate(zip(prompts, outputs, strict=True))]

    def record_rollout(
        self, *, hold: Sequence[OperatorKey] = ()
    ) -> tuple[Recording, list[Rollout]]:
        """The engine's side: sampled from one seed, with empty caches."""
        rpc = self.llm.collective_rpc
        held, seed = [list(key) for key in hold], self.settings.seed
        settings = (self.settings.tensor_bytes, held, seed, self._layout)
        self._empty_cache()
        rpc("patchkit_doctor_start", args=settings)
        try:
            prompts, outputs = self._generate()
        finally:
            answers = rpc("patchkit_doctor_stop")
        answer = answers[0]
        ranks = [Recording.from_plain(a["recording"]) for a in answers]
        self._spans = [{key: r.span for key, r in rank.operators.items()} for rank in ranks]
        numbers = _numbers(answer, outputs, prompts)
        self._sequence_numbers = numbers
        recording = gathered(ranks).renumbered(numbers)
        rollouts = [
            _rollout(number, prompt, output)
            for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
        ]
        softmax = recording.operators.pop(_LOG_SOFTMAX, None)
        recording.operators[_SELECTED] = _selected_record(
            recording, rollouts, [r.logprobs for r in rollouts], softmax.owners if softmax else ()
        )
        return recording, rollouts

    def record_trainer(
        self, rollouts: Sequence[Rollout], *, hold: Sequence[OperatorKey] = ()
    ) -> Recording:
        """The trainer's side, on the same tokens."""
        answers = self.trainer(
            "record",
            rollouts=list(rollouts),
            exact=self.exact,
            budget=self.settings.tensor_bytes,
            hold=list(hold),
        )
        recording = merged([Recording.from_plain(a["recording"]) for a in answers])
        logprobs = by_sequence([a["logprobs"] for a in answers])
        owners = tuple(self.trainer("owners_of_logprobs")[0])
        recording.operators[_SELECTED] = _selected_record(recording, rollouts, logprobs, owners)
        return recording

    # -- looking closer ---------------------------------------------------------------------

    def tensors(self, pair: Pair, key: OperatorKey) -> tuple[HeldTensor, HeldTensor] | None:
        """Values of an operator on both sides, where both held them."""
        if key == _SELECTED:
            return _selected_tensors(pair)
        if key not in pair.rollout.held or key not in pair.trainer.held:
            return None
        mine = self.llm.collective_rpc("patchkit_doctor_tensor", args=(key.layer, key.op))
        spans = [rank.get(key) for rank in self._spans]
        a = gathered_tensor([tensor_from_plain(part) for part in mine], spans)
        parts = [tensor_from_plain(t) for t in self.trainer("tensor", layer=key.layer, op=key.op)]
        b_parts = [p for p in parts if p is not None]
        if a is None or not b_parts:
            return None
        # The worker numbers requests as they came; the recording was renumbered since.
        numbers = self._sequence_numbers
        a.rows[:, 0] = [numbers.get(s, -1) for s in a.rows[:, 0].tolist()]
        b = HeldTensor(
            np.concatenate([p.rows for p in b_parts]),
            torch.cat([p.values for p in b_parts]),
            b_parts[0].dtype,
        )
        return a, b

    def save_tensors(self, pair: Pair, key: OperatorKey, folder: Path) -> Path:
        """Write an operator's values of both sides, rows that both have, for a closer look.

        A safetensors file: ``rows`` ``[N, 2]`` (sequence, position), ``rollout`` and
        ``trainer`` ``[N, W]``.
        """
        from safetensors.torch import save_file

        held = self.tensors(pair, key)
        if held is None:
            known = sorted(
                {k.op for k in pair.rollout.operators} & {k.op for k in pair.trainer.operators}
            )
            raise ConfigurationError(
                f"doctor: no values of {key} were held on both sides; operators that both sides "
                f"have: {', '.join(known)} (write operator@layer)"
            )
        a, b = aligned(*held)
        rows = torch.from_numpy(aligned_rows(*held))
        name = str(key).replace(" of layer ", "@").replace(".", "-")
        path = folder / f"{name}.safetensors"
        tensors = {"rows": rows, "rollout": a.contiguous(), "trainer": b.contiguous()}
        save_file(
            tensors, path, metadata={"rollout dtype": held[0].dtype, "trainer dtype": held[1].dtype}
        )
        return path

    def _vector(self, key: OperatorKey) -> torch.Tensor | None:
        found = self.trainer("vector", layer=key.layer, op=key.op)[0]
        return None if found is None else torch.tensor(found)

    def examine(self, *, hold: Iterable[OperatorKey] = ()) -> Diagnosis:
        """Record both sides, compare, and explain the first difference."""
        pair = self.record(hold=hold)
        return self.diagnose(pair)

    def diagnose(self, pair: Pair) -> Diagnosis:
        """Compare a pair and explain its first difference."""
        self._observe("compare")
        comparison = compare(pair.rollout, pair.trainer, previous=self.previous)
        first = comparison.first
        if first is not None and self.tensors(pair, first.key) is None:
            pair, comparison = self._again(pair, comparison, first)
            first = comparison.first
        for cell in comparison.cells:
            if cell.status == "differs":
                measure(cell, self.tensors(pair, cell.key))
        causes = []
        if first is not None:
            self._observe(f"look closer at the {first.label}")
            causes = guess(
                first,
                comparison,
                config=_text_config(self.setup.config),
                fetch=lambda key: self.tensors(pair, key),
                vector=self._vector,
                cached={r.number: r.cached_tokens for r in pair.rollouts},
            )
        self.previous[pair.version] = pair.trainer
        return Diagnosis.of(
            self.setup,
            pair.rollout,
            pair.trainer,
            pair.rollouts,
            comparison,
            causes,
            self._covering(first),
        )

    def _again(self, pair: Pair, comparison: Comparison, first: Cell) -> tuple[Pair, Comparison]:
        """Record again with the values of the first difference and of what it read."""
        place = comparison.cells.index(first)
        near = [c.key for c in comparison.cells[max(0, place - 8) : place + 1]]
        self._observe(f"record again, and hold the values of the {first.label}")
        again = self.record(hold=near)
        if [r.tokens for r in again.rollouts] != [r.tokens for r in pair.rollouts]:
            pair.rollout.notes.append(
                "the engine sampled other tokens from the same seeds when it was recorded again: "
                "it is not repeatable, and the values shown are of the second run"
            )
            again.rollout.notes += pair.rollout.notes[-1:]
        found = compare(again.rollout, again.trainer, previous=self.previous)
        return (again, found) if found.first is not None else (pair, comparison)

    def _covering(self, first: Cell | None) -> tuple[list[Any], list[Any]]:
        adapter, profile = self.setup.adapter, self.setup.profile
        if first is None or adapter is None or profile is None:
            return [], []
        rollout, trainer = applicable_patches(adapter, profile.name)
        found = covering_patches(first, rollout, trainer)
        if first.key == _SELECTED and adapter.logprobs and not found[1]:
            return found[0], [adapter.logprobs]
        return found


def _shut_down(llm: Any) -> None:
    core = getattr(llm.llm_engine, "engine_core", None)
    if core is not None:
        core.shutdown()


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    text: dict[str, Any] = config.get("text_config") or config
    return text


def _numbers(
    answer: dict[str, Any], outputs: Sequence[Any], prompts: Sequence[Sequence[int]]
) -> dict[int, int]:
    """The worker's number of a request to the sequence's; requests are told by their ids.

    The engine appends to an id what makes it unique, and hands the caller's own back.
    """
    found = {}
    for sequence, (output, prompt) in enumerate(zip(outputs, prompts, strict=True)):
        names = [
            name
            for name, tokens in answer["prompts"].items()
            if (name == output.request_id or name.startswith(f"{output.request_id}-"))
            and tokens == list(prompt)
        ]
        if len(names) != 1:
            raise DoctorError(
                f"doctor: request {output.request_id} was seen {len(names)} times in the worker "
                f"({', '.join(names) or 'not at all'}); rows cannot be told apart. Report the "
                "vLLM version"
            )
        found[answer["requests"][names[0]]] = sequence
    return found


def _rollout(number: int, prompt: Sequence[int], output: Any) -> Rollout:
    completion = output.outputs[0]
    tokens = tuple(completion.token_ids)
    return Rollout(
        number=number,
        prompt=tuple(prompt),
        tokens=tokens,
        logprobs=tuple(
            entry[token].logprob for token, entry in zip(tokens, completion.logprobs, strict=True)
        ),
        start_version=0,
        end_version=0,
        cached_tokens=output.num_cached_tokens or 0,
    )


def _selected_record(
    recording: Recording,
    rollouts: Sequence[Rollout],
    logprobs: Sequence[Sequence[float]],
    owners: tuple[str, ...],
) -> OperatorRecord:
    """The log-probability of each sampled token, at the position whose logits it is of."""
    rows, values = [], []
    for rollout, found in zip(rollouts, logprobs, strict=True):
        for i, value in enumerate(found):
            rows.append((rollout.number, len(rollout.prompt) - 1 + i))
            values.append(value)
    bits = np.asarray(values, np.float32).view(np.int32).astype(np.int64)
    order = max((r.order for r in recording.operators.values()), default=0) + 1
    return OperatorRecord(
        order=order,
        rows=np.asarray(rows, np.int64),
        digests=bits,
        dtype="float32",
        shape=(),
        steps=np.full(len(rows), -1, np.int32),
        owners=owners,
    )


def _selected_tensors(pair: Pair) -> tuple[HeldTensor, HeldTensor]:
    made = []
    for recording in (pair.rollout, pair.trainer):
        record = recording.operators[_SELECTED]
        values = record.digests.astype(np.int32).view(np.float32).copy()
        made.append(HeldTensor(record.rows, torch.from_numpy(values)[:, None], "float32"))
    return made[0], made[1]


def parse_operator(text: str) -> OperatorKey:
    """``self_attn.o_proj@1``, or ``lm_head`` for what is in no layer."""
    op, at, layer = text.partition("@")
    if not at:
        found = locate(op, DEFAULT_LAYOUT)
        assert found is not None
        return found
    if not layer.isdigit():
        raise ConfigurationError(
            f"operator {text!r}: expected operator@layer, as in self_attn.o_proj@1; "
            "`patchkit doctor --json` lists the operators"
        )
    return OperatorKey(int(layer), op)
