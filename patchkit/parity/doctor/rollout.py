"""The rollout side: what the doctor does inside a vLLM worker.

Modules are watched with forward hooks, which sit on instances: no class and no patched
symbol changes, so ``Installation.verify()`` goes on holding. What is no module (the
router, the sampler's log-softmax) gets a method of its own on the *instance*. Everything
is gone when the recording ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchkit.engine import resolve_reference
from patchkit.errors import ConfigurationError
from patchkit.parity.doctor.layout import (
    DEFAULT_LAYOUT,
    Layout,
    locate,
    module_facts,
    owner_names,
)
from patchkit.parity.doctor.recording import (
    AFTER,
    OperatorKey,
    Recorder,
    tensor_as_plain,
)
from patchkit.runtime.extension import WorkerExtension

__all__ = ["DOCTOR_EXTENSION", "DoctorExtension", "RolloutTaps"]

DOCTOR_EXTENSION = "patchkit.parity.doctor.rollout.DoctorExtension"


def _is(module: object, *names: str) -> bool:
    """Whether a class of one of these bare names is among the module's bases."""
    return any(cls.__name__ in names for cls in type(module).__mro__)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple | list) else value


class RolloutTaps:
    """Hooks of one model while they are on.

    Args:
        runner: vLLM's model runner.
        recorder: Where rows go.
        layout: How modules map to operators.
        tensor: This worker's tensor-parallel rank, and how many there are.
    """

    def __init__(
        self,
        runner: Any,
        recorder: Recorder,
        layout: Layout = DEFAULT_LAYOUT,
        *,
        tensor: tuple[int, int] = (0, 1),
    ) -> None:
        self._rank, self._size = tensor
        # Columns that this rank has of operators whose heads or features are sharded.
        self._spans: dict[OperatorKey, tuple[int, int]] = {}
        self._runner, self._recorder, self._layout = runner, recorder, layout
        self._model = runner.get_model()
        self._undo: list[Callable[[], None]] = []
        self._rows = np.empty((0, 2), np.int64)
        self._ends = np.empty(0, np.int64)
        self._hidden: Tensor | None = None
        self._stack: list[tuple[str, Any]] = []
        self._attention: dict[OperatorKey, tuple[tuple[str, ...], dict[str, Any]]] = {}
        self.requests: dict[str, int] = {}
        self.prompts: dict[str, list[int]] = {}
        packed = getattr(type(self._model), "packed_modules_mapping", None) or {}
        self._packed = {**layout.packed, **{k: tuple(v) for k, v in packed.items()}}
        try:
            self._place()
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Take every hook off again."""
        while self._undo:
            self._undo.pop()()

    # -- placing -------------------------------------------------------------------------

    def _place(self) -> None:
        handle = self._model.register_forward_pre_hook(self._begin, with_kwargs=True)
        self._undo.append(handle.remove)
        self._undo.append(self._model.register_forward_hook(self._end).remove)
        modules = dict(self._model.named_modules())
        for path, module in modules.items():
            self._watch_place(path, module)
            self._watch(path, module)
        self._on_instance(self._runner.sampler, "compute_logprobs", self._after_logprobs)

    def _watch_place(self, path: str, module: Any) -> None:
        """Know which layer and module is running: shared modules have one path only."""
        if not any(True for _ in module.children()):
            return

        def enter(m: Any, args: Any) -> None:
            self._stack.append((path, m))

        def leave(m: Any, args: Any, output: Any) -> None:
            if self._stack:
                self._stack.pop()

        self._undo.append(module.register_forward_pre_hook(enter).remove)
        self._undo.append(module.register_forward_hook(leave, always_call=True).remove)

    def _watch(self, path: str, module: Any) -> None:
        if _is(module, "LogitsProcessor"):
            self._hook(module, self._after_logits)
        elif _is(module, "ParallelLMHead"):
            return  # never called; the logits processor reads its weight
        elif _is(module, "VocabParallelEmbedding"):
            self._hook(module, self._after_embedding, path)
        elif type(module).__name__.endswith("RotaryEmbedding") or _is(module, "RotaryEmbedding"):
            self._hook(module, self._after_rotation)
        elif "Norm" in type(module).__name__ and not any(True for _ in module.children()):
            self._hook(module, self._after_norm, path)
        elif _is(module, "LinearBase"):
            self._hook(module, self._after_linear, path)
        elif hasattr(module, "impl") and "attn" in path:
            self._hook(module, self._after_attention, path)
        router = vars(module).get("router")
        if router is not None and hasattr(router, "select_experts"):
            self._hook(module, self._after_experts, path)
            self._on_instance(router, "select_experts", partial(self._after_choice, path, router))
        key = locate(path, self._layout)
        if key is not None and key.op in self._layout.combined:
            self._hook(module, self._after_block, path)

    def _hook(self, module: Any, action: Callable[..., None], *extra: Any) -> None:
        def hook(m: Any, args: Any, kwargs: Any, output: Any) -> None:
            self._timed(action, m, args, kwargs, output, *extra)

        self._undo.append(module.register_forward_hook(hook, with_kwargs=True).remove)

    def _on_instance(self, owner: Any, name: str, action: Callable[[Any], None]) -> None:
        """Give the instance a method of its own that calls the one it has."""
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            value = original(*args, **kwargs)
            self._timed(action, value)
            return value

        before = vars(owner).get(name)

        def undo() -> None:
            if before is None:
                del owner.__dict__[name]
            else:
                owner.__dict__[name] = before

        owner.__dict__[name] = watched
        self._undo.append(undo)

    def _timed(self, action: Callable[..., None], *args: Any) -> None:
        if not len(self._rows):
            return  # a dummy run: there are no requests
        start = time.perf_counter()
        action(*args)
        self._recorder.seconds += time.perf_counter() - start

    # -- which row is whose ---------------------------------------------------------------

    def _begin(self, module: Any, args: Any, kwargs: Any) -> None:
        batch = self._runner.input_batch
        count = batch.num_reqs
        starts = np.asarray(self._runner.query_start_loc.np[: count + 1], np.int64)
        positions = kwargs.get("positions", args[1] if len(args) > 1 else None)
        if positions is None or not count:
            self._rows = np.empty((0, 2), np.int64)
            return
        if positions.ndim > 1:  # one row per axis; text has the same position on each
            positions = positions[0]
        total = int(starts[-1])
        numbers = []
        for request in batch.req_ids[:count]:
            if request not in self.requests:
                self.requests[request] = len(self.requests)
                state = self._runner.requests[request]
                self.prompts[request] = list(state.prompt_token_ids or ())
            numbers.append(self.requests[request])
        rows = np.empty((total, 2), np.int64)
        rows[:, 0] = np.repeat(numbers, np.diff(starts))
        rows[:, 1] = positions[:total].cpu().numpy()
        self._rows, self._ends, self._hidden = rows, starts[1:] - 1, None
        self._stack.clear()
        self._recorder.step(total)

    def _end(self, module: Any, args: Any, output: Any) -> None:
        self._hidden = output if isinstance(output, Tensor) else None

    def _rows_of_logits(self, hidden: Tensor) -> np.ndarray | None:
        """Rows of what the output layer was given.

        Either the last token of every request, gathered; or, for log-probabilities of a
        prompt, a slice of the model's own output, which its address tells.
        """
        if len(hidden) == len(self._ends) and not self._is_view(hidden):
            return self._rows[self._ends]
        if self._hidden is not None and self._is_view(hidden):
            offset = hidden.storage_offset() - self._hidden.storage_offset()
            start = offset // self._hidden.stride(0)
            return self._rows[start : start + len(hidden)]
        self._recorder.note(
            f"logits of {len(hidden)} rows belong neither to the sampled tokens nor to a prompt"
        )
        return None

    def _is_view(self, hidden: Tensor) -> bool:
        whole = self._hidden
        if whole is None or not len(hidden):
            return False
        same = whole.untyped_storage().data_ptr() == hidden.untyped_storage().data_ptr()
        return same and whole.stride() == hidden.stride()

    # -- what comes out -------------------------------------------------------------------

    def _key(self, path: str) -> OperatorKey | None:
        return locate(path, self._layout)

    def _sharded(self, key: OperatorKey, width: int, replicas: int = 1) -> None:
        """Remember which columns of an operator this rank has."""
        if self._size > 1:
            whole = width * (self._size // replicas)
            self._spans[key] = (self._rank // replicas * width, whole)

    def _span_of(self, key: OperatorKey, width: int) -> tuple[int, int] | None:
        """Of the operator itself, or of the product that its heads come from."""
        if self._size == 1:
            return None
        *parents, name = key.op.split(".")
        if parents and parents[-1] == "rope":
            parents.pop()
        source = ".".join((*parents, f"{name.removesuffix('_norm')}_proj"))
        for candidate in (key, OperatorKey(key.layer, source)):
            found = self._spans.get(candidate)
            if found and (found[1] - found[0]) >= width and width < found[1]:
                return found
        return None

    def _add(self, key: OperatorKey, values: Any, **extra: Any) -> None:
        if not isinstance(values, Tensor):
            return
        span = self._span_of(key, int(values[:1].numel()))
        if span is not None:
            # A shard of a weight has no digest that could be compared.
            extra = {**extra, "span": span, "weights": {}}
        if len(values) < len(self._rows):
            self._recorder.note(
                f"{key}: {len(values)} rows where the step has {len(self._rows)}; sharded over "
                "ranks, or reordered"
            )
            return
        self._recorder.add(key, self._rows, values, **extra)

    def _ancestors(self) -> list[Any]:
        return [module for _, module in reversed(self._stack)]

    def _after_embedding(self, m: Any, args: Any, kwargs: Any, output: Any, path: str) -> None:
        key = self._key(path)
        if key is not None:
            self._add(
                key,
                output,
                owners=owner_names(m),
                weights=self._vocabulary(m),
            )

    def _vocabulary(self, m: Any) -> dict[str, Tensor]:
        """An embedding's weight without padding; a rank of several has a shard only."""
        if self._size > 1:
            return {}
        return _weights(m, "weight", rows=getattr(m, "org_vocab_size", None))

    def _after_norm(self, m: Any, args: Any, kwargs: Any, output: Any, path: str) -> None:
        key = self._key(path)
        if key is None:
            return
        owners = owner_names(m, *self._ancestors())
        given = [*args, *kwargs.values()]
        inner = OperatorKey(key.layer, f"{key.op}.in")
        if isinstance(output, tuple):
            self._add(inner, output[1], owners=owners)
        elif "." not in key.op:
            self._add(inner, given[0], owners=owners)
        self._add(
            key,
            _first(output),
            owners=owners,
            facts=module_facts(m),
            weights=_weights(m, "weight"),
        )

    def _after_linear(self, m: Any, args: Any, kwargs: Any, output: Any, path: str) -> None:
        key = self._key(path)
        if key is None:
            return
        owners = owner_names(m, getattr(m, "quant_method", None), *self._ancestors())
        *parents, name = key.op.split(".")
        values = _first(output)
        read = args[0] if args else next(iter(kwargs.values()))
        if named := self._layout.inputs.get(name):
            inside = OperatorKey(key.layer, ".".join((*parents, named)))
            if _is(m, "RowParallelLinear") and m.input_is_parallel:
                self._sharded(inside, read.shape[-1])
            owned, facts = self._attention.get(inside, (owner_names(*self._ancestors()), {}))
            self._add(inside, read, owners=owned, facts=facts)
        if parts := self._packed.get(name):
            sizes = list(m.output_partition_sizes)
            weight: Any = getattr(m, "weight", None)
            matrices: Sequence[Tensor | None] = [None] * len(parts)
            if _is_matrix(weight, sum(sizes)):
                matrices = weight.split(sizes, dim=0)
            pieces = values.split(sizes, dim=-1)
            for part, size in zip(parts, sizes, strict=True):
                shared = part in ("k_proj", "v_proj")
                replicas = getattr(m, "num_kv_head_replicas", 1) if shared else 1
                product = OperatorKey(key.layer, ".".join((*parents, part)))
                self._sharded(product, size, replicas)
            for part, piece, matrix in zip(parts, pieces, matrices, strict=True):
                self._add(
                    OperatorKey(key.layer, ".".join((*parents, part))),
                    piece,
                    owners=owners,
                    weights={} if matrix is None else {"weight": matrix},
                )
            return
        if self._size > 1 and _is(m, "RowParallelLinear") and not m.reduce_results:
            self._recorder.note(f"{key}: every rank has a partial sum, which is added later")
            return
        if _is(m, "ColumnParallelLinear") and not m.gather_output:
            self._sharded(key, values.shape[-1])
        weights = {} if self._size > 1 else _weights(m, "weight")
        self._add(key, values, owners=owners, facts=module_facts(m), weights=weights)

    def _after_rotation(self, m: Any, args: Any, kwargs: Any, output: Any) -> None:
        path = self._stack[-1][0] if self._stack else ""
        key = self._key(path)
        if key is None or not isinstance(output, tuple):
            return
        for name, values in zip(("q", "k"), output, strict=False):
            self._add(
                OperatorKey(key.layer, f"{key.op}.rope.{name}"),
                values,
                owners=owner_names(m, *self._ancestors()),
                facts=module_facts(m),
            )

    def _after_attention(self, m: Any, args: Any, kwargs: Any, output: Any, path: str) -> None:
        """Whose it is; the values are taken where the output product reads them."""
        key = self._key(path)
        if key is None:
            return
        parent = key.op.rsplit(".", 1)[0]
        self._attention[OperatorKey(key.layer, f"{parent}.attention")] = (
            owner_names(m.impl, m, *self._ancestors()),
            module_facts(m.impl),
        )

    def _after_experts(self, m: Any, args: Any, kwargs: Any, output: Any, path: str) -> None:
        key = self._key(path)
        if key is None or _has_shared(self._stack, m):
            return
        routed = getattr(m, "routed_experts", m)
        weights = {
            theirs: getattr(routed, ours)
            for ours, theirs in self._layout.expert_weights.items()
            if self._size == 1 and isinstance(getattr(routed, ours, None), Tensor)
        }
        method = getattr(routed, "quant_method", None)
        owners = owner_names(method, m, routed, *self._ancestors())
        self._add(key, _first(output), owners=owners, weights=weights)

    def _after_block(self, m: Any, args: Any, kwargs: Any, output: Any, path: str) -> None:
        key = self._key(path)
        if key is not None:
            self._add(key, _first(output), owners=owner_names(m, *self._ancestors()))

    def _after_choice(self, path: str, router: Any, value: Any) -> None:
        key = self._key(path)
        if key is None:
            return
        weights, ids = value[0], value[1]
        parent = key.op.rsplit(".", 1)[0]
        owners = owner_names(router)
        facts = module_facts(router)
        for name, values in canonical_choice(weights, ids).items():
            self._add(
                OperatorKey(key.layer, f"{parent}.gate.{name}"), values, owners=owners, facts=facts
            )

    def _after_logits(self, m: Any, args: Any, kwargs: Any, output: Any) -> None:
        given = {**dict(zip(("lm_head", "hidden_states"), args, strict=False)), **kwargs}
        head, hidden = given.get("lm_head"), given.get("hidden_states")
        rows = self._rows_of_logits(hidden) if isinstance(hidden, Tensor) else None
        self._logits_rows = rows
        if rows is None or not isinstance(output, Tensor):
            return
        self._recorder.add(
            OperatorKey(AFTER, "lm_head"),
            rows,
            output,
            owners=owner_names(getattr(head, "quant_method", None), m, head, self._model),
            facts=module_facts(m),
            weights=self._vocabulary(head),
        )

    _logits_rows: np.ndarray | None = None

    def _after_logprobs(self, value: Any) -> None:
        """Only whose it is: the values compared are those that the engine hands out."""
        rows = self._logits_rows
        if rows is None or not isinstance(value, Tensor) or len(value) != len(rows):
            return
        self._recorder.add(
            OperatorKey(AFTER, "log_softmax"), rows, value, owners=owner_names(self._runner.sampler)
        )


def canonical_choice(weights: Tensor, ids: Tensor) -> dict[str, Tensor]:
    """The chosen experts in ascending order of their ids, and their weights with them.

    The order within a choice is no difference of its own: where it matters, the
    combination of the experts shows it.
    """
    order = ids.long().argsort(-1)
    return {"ids": ids.long().gather(-1, order), "weights": weights.gather(-1, order)}


def _is_matrix(weight: Any, rows: int) -> bool:
    return isinstance(weight, Tensor) and weight.ndim == 2 and weight.shape[0] == rows


def _weights(module: Any, name: str, *, rows: int | None = None) -> dict[str, Tensor]:
    weight = getattr(module, name, None)
    if not isinstance(weight, Tensor) or not weight.numel():
        return {}
    return {name: weight.detach()[:rows] if rows else weight.detach()}


def _has_shared(stack: Sequence[tuple[str, Any]], module: Any) -> bool:
    """Whether what this expert layer returns includes shared experts."""
    own = getattr(module, "_shared_experts", None)
    if own is not None:
        return True
    parent = next((m for _, m in reversed(stack) if m is not module), None)
    return any(
        getattr(parent, name, None) is not None for name in ("shared_expert", "shared_experts")
    )


class DoctorExtension(WorkerExtension):
    """What the driver asks a worker; see :data:`DOCTOR_EXTENSION`."""

    def patchkit_doctor_start(
        self, budget: int, hold: list[list[Any]], seed: int, layout: str = ""
    ) -> None:
        """Begin a recording, with the sampler's generator set.

        Not with a seed in every request: vLLM cannot rewind a generator on CPU, which it
        does for a chunk of a prompt.

        Args:
            budget: Bytes of values to hold.
            hold: Operators whose values are held whatever the budget.
            seed: Of the sampler.
            layout: Reference to the adapter's own layout, if it has one.
        """
        place = self.patchkit_place()
        if place["pp_size"] * place["dp_size"] > 1:
            raise ConfigurationError(
                f"doctor: this worker is one of {place['pp_size']} pipeline and "
                f"{place['dp_size']} data-parallel ranks and sees a part of the layers or "
                "requests; run the doctor with one of each"
            )
        if getattr(self, "_doctor", None) is not None:
            raise ConfigurationError("doctor: a recording is under way; stop it first")
        recorder = Recorder(
            "rollout", budget=budget, hold=[OperatorKey(int(layer), op) for layer, op in hold]
        )
        taps = RolloutTaps(
            self.model_runner,  # type: ignore[attr-defined]
            recorder,
            resolve_reference(layout) if layout else DEFAULT_LAYOUT,
            tensor=(place["tp_rank"], place["tp_size"]),
        )
        self._doctor: tuple[Recorder, RolloutTaps] | None = (recorder, taps)
        self._doctor_last: Recorder | None = None
        torch.manual_seed(seed)

    def patchkit_doctor_stop(self) -> dict[str, Any]:
        """End it: the recording, and which requests it saw."""
        doctor = getattr(self, "_doctor", None)
        if doctor is None:
            raise ConfigurationError("doctor: no recording is under way; start one first")
        recorder, taps = doctor
        taps.remove()
        self._doctor, self._doctor_last = None, recorder
        return {
            "recording": recorder.finish().as_plain(),
            "requests": taps.requests,
            "prompts": taps.prompts,
        }

    def patchkit_doctor_tensor(self, layer: int, op: str) -> Mapping[str, Any] | None:
        """Values that the last recording held."""
        last = getattr(self, "_doctor_last", None)
        if last is None:
            return None
        return tensor_as_plain(last.tensor(OperatorKey(layer, op)))
