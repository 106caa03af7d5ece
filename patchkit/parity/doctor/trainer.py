"""The trainer side: the same operators of the Hugging Face model, under FSDP2.

Stock operators are modules, and are watched with hooks. On the exact path a replaced
``forward`` calls shared operators instead of its submodules, so those functions are
watched as well: a product is named by the module that owns its weight.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from patchkit.engine import find_adapter, resolve_reference
from patchkit.errors import ConfigurationError
from patchkit.parity.doctor.layout import (
    DEFAULT_LAYOUT,
    Layout,
    locate,
    module_facts,
    owner_names,
)
from patchkit.parity.doctor.recording import AFTER, OperatorKey, Recorder, tensor_as_plain
from patchkit.parity.doctor.rollout import canonical_choice
from patchkit.parity.fsdp import FSDPTrainer, build_trainer
from patchkit.parity.workload import Rollout
from patchkit.runtime.weights import Receipt

__all__ = ["DoctorTrainer", "TrainerTaps", "build_doctor_trainer"]


_LOGITS = OperatorKey(AFTER, "lm_head")

# What hands on the same numbers in another shape.
_RESHAPES = frozenset(
    {
        torch.Tensor.view,
        torch.Tensor.reshape,
        torch.Tensor.flatten,
        torch.Tensor.unflatten,
        torch.Tensor.contiguous,
    }
)


class _Roundings(TorchFunctionMode):
    """Sees what becomes of a product: the cast that follows it belongs to the operator.

    A shared product is float32 where its function returns. Its caller casts it to the
    stream's dtype, or goes on in float32; only what it does next tells which.
    """

    def __init__(self) -> None:
        super().__init__()
        self._expected: dict[int, tuple[Any, Callable[[Tensor], None]]] = {}

    def expect(self, value: Tensor, record: Callable[[Tensor], None]) -> None:
        """Record this value once it is known how it goes on."""
        self._expected[id(value)] = (value, record)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._expected:
            return result
        for value in args:
            # The entry holds the tensor, so that its id cannot be another's meanwhile.
            entry = self._expected.get(id(value)) if isinstance(value, Tensor) else None
            if entry is None:
                continue
            if func in _RESHAPES and isinstance(result, Tensor):
                del self._expected[id(value)]
                self._expected[id(result)] = (result, entry[1])
            elif func in _READS:
                continue
            else:
                del self._expected[id(value)]
                cast = func in _CASTS and isinstance(result, Tensor)
                entry[1](result if cast else entry[0])
        return result

    def flush(self) -> None:
        """What nothing else used stays as it is."""
        for value, record in list(self._expected.values()):
            record(value)
        self._expected.clear()


_CASTS = frozenset({torch.Tensor.to, torch.Tensor.type, torch.Tensor.bfloat16, torch.Tensor.half})
# Attributes are functions here, too, and use up nothing.
_READS = frozenset(
    {
        *(
            getattr(torch.Tensor, name).__get__
            for name in ("shape", "dtype", "device", "ndim", "requires_grad")
        ),
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.detach,
    }
)


class TrainerTaps:
    """Hooks of one model, and wrappers around functions, while they are on.

    Args:
        model: The Hugging Face model.
        recorder: Where rows go.
        layout: How modules map to operators.
        exact: Whether the exact path will run: its functions are watched, too.
    """

    def __init__(
        self, model: Any, recorder: Recorder, layout: Layout = DEFAULT_LAYOUT, *, exact: bool
    ) -> None:
        self._model, self._recorder, self._layout = model, recorder, layout
        self._undo: list[Callable[[], None]] = []
        self._rows = np.empty((0, 2), np.int64)
        self._batch = (0, 0)
        self._stack: list[tuple[str, Any]] = []
        self._turns: dict[str, int] = {}
        self._roundings = _Roundings()
        self._head: tuple[tuple[str, ...], dict[str, Tensor]] = ((), {})
        try:
            self._place(exact)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Take everything off again."""
        while self._undo:
            self._undo.pop()()

    @contextmanager
    def forward(self, rows_BS2: np.ndarray) -> Iterator[None]:
        """Around a forward of ``[B, S]`` tokens; a negative sequence marks padding."""
        self._batch = rows_BS2.shape[:2]
        self._rows = rows_BS2.reshape(-1, 2)
        self._stack.clear()
        self._recorder.step(int((self._rows[:, 0] >= 0).sum()))
        with self._roundings:
            yield
        self._roundings.flush()

    # -- placing -------------------------------------------------------------------------

    def _place(self, exact: bool) -> None:
        for path, module in self._model.named_modules():
            self._watch_place(path, module)
            self._watch(path, module)
        self._hook(self._model, self._after_model, "")
        for modeling in _modeling_modules(self._model):
            for name in self._layout.rotation:
                if callable(vars(modeling).get(name)):
                    self._replace(modeling, name, self._after_stock_rotation)
        if exact:
            for tap in self._layout.functions:
                actions = {"product": self._after_product, "rotation": self._after_rotation}
                if tap.role not in actions:
                    raise ConfigurationError(
                        f"doctor: the layout gives {tap.reference} the role {tap.role!r}; "
                        f"roles are {', '.join(actions)}"
                    )
                self._replace_everywhere(resolve_reference(tap.reference), actions[tap.role])

    def _watch_place(self, path: str, module: Any) -> None:
        """Know which module is running, whatever function it calls."""
        if not any(True for _ in module.children()):
            return

        def enter(m: Any, args: Any) -> None:
            self._stack.append((path, m))
            self._turns[path] = 0

        def leave(m: Any, args: Any, output: Any) -> None:
            if self._stack:
                self._stack.pop()

        self._undo.append(module.register_forward_pre_hook(enter).remove)
        self._undo.append(module.register_forward_hook(leave, always_call=True).remove)

    def _watch(self, path: str, module: Any) -> None:
        kind = type(module).__name__
        leaf = not any(True for _ in module.children())
        if isinstance(module, torch.nn.Embedding):
            self._hook(module, self._after_embedding, path)
        elif "Norm" in kind and leaf:
            self._hook(module, self._after_norm, path)
        elif isinstance(module, torch.nn.Linear):
            self._hook(module, self._after_linear, path)
        elif "Router" in kind:
            self._hook(module, self._after_router, path)
        elif "Experts" in kind:
            self._hook(module, self._after_experts, path)
        key = locate(path, self._layout)
        if key is not None and key.op in self._layout.combined:
            self._hook(module, self._after_block, path)

    def _hook(self, module: Any, action: Callable[..., None], path: str) -> None:
        def hook(m: Any, args: Any, kwargs: Any, output: Any) -> None:
            self._timed(action, m, [*args, *kwargs.values()], output, path)

        self._undo.append(module.register_forward_hook(hook, with_kwargs=True).remove)

    def _replace(self, owner: ModuleType, name: str, action: Callable[..., None]) -> None:
        original = vars(owner)[name]

        def watched(*args: Any, **kwargs: Any) -> Any:
            value = original(*args, **kwargs)
            self._timed(action, args, value)
            return value

        setattr(owner, name, watched)
        self._undo.append(lambda: setattr(owner, name, original))

    def _replace_everywhere(self, function: Any, action: Callable[..., None]) -> None:
        """Watch a shared operator under every name by which a module calls it."""
        holders = [
            (module, name)
            for module in list(sys.modules.values())
            if type(module) is ModuleType
            for name, value in list(vars(module).items())
            if value is function
        ]
        for module, name in holders:
            self._replace(module, name, action)

    def _timed(self, action: Callable[..., None], *args: Any) -> None:
        start = time.perf_counter()
        with torch.no_grad():
            action(*args)
        self._recorder.seconds += time.perf_counter() - start

    # -- what comes out -------------------------------------------------------------------

    def _flat(self, key: OperatorKey, values: Any) -> Tensor | None:
        """``[B*S, ...]`` of a tensor that holds all tokens; None if it does not."""
        if not isinstance(values, Tensor):
            return None
        batch, length = self._batch
        if values.shape[:2] == (batch, length):
            return values.flatten(0, 1)
        if values.shape[0] == batch * length:
            return values
        self._recorder.note(
            f"{key}: shape {list(values.shape)} where the batch is [{batch}, {length}]"
        )
        return None

    def _add(self, key: OperatorKey | None, values: Any, **extra: Any) -> None:
        if key is None:
            return
        flat = self._flat(key, values)
        if flat is not None:
            self._recorder.add(key, self._rows, flat, **extra)

    def _ancestors(self) -> list[Any]:
        return [module for _, module in reversed(self._stack)]

    def _after_embedding(self, m: Any, given: list[Any], output: Any, path: str) -> None:
        self._add(
            locate(path, self._layout),
            output,
            owners=owner_names(m),
            weights={"weight": m.weight},
        )

    def _after_norm(self, m: Any, given: list[Any], output: Any, path: str) -> None:
        key = locate(path, self._layout)
        if key is None:
            return
        owners = owner_names(m, *self._ancestors())
        if "." not in key.op:
            self._add(OperatorKey(key.layer, f"{key.op}.in"), given[0], owners=owners)
        weight = getattr(m, "weight", None)
        self._add(
            key,
            output,
            owners=owners,
            facts=module_facts(m),
            weights={} if weight is None else {"weight": weight},
        )

    def _after_linear(self, m: Any, given: list[Any], output: Any, path: str) -> None:
        key = locate(path, self._layout)
        if key is not None:
            self._product(key, given[0], output, m, owner_names(m, *self._ancestors()))

    def _product(
        self,
        key: OperatorKey,
        read: Any,
        output: Any,
        module: Any,
        owners: tuple[str, ...],
    ) -> None:
        if key == _LOGITS:
            # Compared as the model returns them, after whatever follows the product.
            self._head = (owners, {"weight": module.weight})
            return
        if read is not None:
            self._read(key, read)
        self._add(key, output, owners=owners, weights={"weight": module.weight})

    def _read(self, key: OperatorKey, read: Any) -> None:
        """What a product multiplies, where that is an operator of its own."""
        *parents, name = key.op.split(".")
        if named := self._layout.inputs.get(name):
            inside = OperatorKey(key.layer, ".".join((*parents, named)))
            self._add(inside, read, owners=owner_names(*self._ancestors()))

    def _after_product(self, args: tuple[Any, ...], output: Any) -> None:
        """A product of the exact path; whoever called it rounds it now, or keeps it wide."""
        read, weight = args[0], args[1]
        found = self._owner_of(weight)
        if found is None:
            return
        key, module = found
        owners = owner_names(*self._ancestors(), module)
        self._read(key, read)
        self._roundings.expect(
            output, lambda value: self._product(key, None, value, module, owners)
        )

    def _after_model(self, m: Any, given: list[Any], output: Any, path: str) -> None:
        owners, weights = self._head
        logits = getattr(output, "logits", None)
        if logits is None:
            logits = output[0] if isinstance(output, tuple) else output
        self._add(_LOGITS, logits, owners=owners or owner_names(m), weights=weights)

    def _owner_of(self, weight: Tensor) -> tuple[OperatorKey, Any] | None:
        """The module of the running one's parts whose weight this very tensor is."""
        if not self._stack:
            return None
        path, running = self._stack[-1]
        for name, child in running.named_modules():
            if getattr(child, "weight", None) is weight:
                inside = ".".join(p for p in (path, name) if p)
                # A tied weight is the embedding's; what multiplies with it is the output layer.
                if isinstance(child, torch.nn.Embedding):
                    head = self._model.get_output_embeddings()
                    return _LOGITS, head
                key = locate(inside, self._layout)
                # A router watches its own product.
                if key is None or "Router" in type(child).__name__:
                    return None
                return key, child
        return None

    def _after_rotation(self, args: tuple[Any, ...], output: Any) -> None:
        """One rotation of the exact path: queries first, then keys."""
        path = self._stack[-1][0] if self._stack else ""
        key = locate(path, self._layout)
        if key is None:
            return
        turn = self._turns.get(path, 0)
        self._turns[path] = turn + 1
        if turn < 2:
            name = "qk"[turn]
            self._add(
                OperatorKey(key.layer, f"{key.op}.rope.{name}"),
                output,
                owners=owner_names(*self._ancestors()),
            )

    def _after_stock_rotation(self, args: tuple[Any, ...], output: Any) -> None:
        key = locate(self._stack[-1][0], self._layout) if self._stack else None
        if key is None or not isinstance(output, tuple):
            return
        length = self._batch[1]
        for name, values in zip(("q", "k"), output, strict=False):
            # [B, heads, S, D], unless it was rotated with the tokens first.
            if values.ndim == 4 and values.shape[2] == length and values.shape[1] != length:
                values = values.transpose(1, 2)
            self._add(
                OperatorKey(key.layer, f"{key.op}.rope.{name}"),
                values,
                owners=owner_names(*self._ancestors()),
            )

    def _after_router(self, m: Any, given: list[Any], output: Any, path: str) -> None:
        key = locate(path, self._layout)
        if key is None or not isinstance(output, tuple):
            return
        owners, facts = owner_names(m, *self._ancestors()), module_facts(m)
        weight = getattr(m, "weight", None)
        logits, *rest = output
        self._add(
            key,
            logits,
            owners=owners,
            facts=facts,
            weights={} if weight is None else {"weight": weight},
        )
        ids = next((t for t in rest if not t.is_floating_point()), None)
        weights = next((t for t in rest if t.is_floating_point()), None)
        if ids is None or weights is None or weights.shape != ids.shape:
            self._recorder.note(f"{key}: the router returns no choice with its weights")
            return
        for name, values in canonical_choice(weights, ids).items():
            chosen = OperatorKey(key.layer, f"{key.op}.{name}")
            self._add(chosen, values, owners=owners, facts=facts)

    def _after_experts(self, m: Any, given: list[Any], output: Any, path: str) -> None:
        weights = {
            name: getattr(m, name)
            for name in self._layout.expert_weights.values()
            if isinstance(getattr(m, name, None), Tensor)
        }
        self._add(
            locate(path, self._layout),
            output,
            owners=owner_names(m, *self._ancestors()),
            weights=weights,
        )

    def _after_block(self, m: Any, given: list[Any], output: Any, path: str) -> None:
        values = output[0] if isinstance(output, tuple) else output
        self._add(locate(path, self._layout), values, owners=owner_names(m, *self._ancestors()))


def _modeling_modules(model: Any) -> list[ModuleType]:
    """Modules that define the model's parts; FSDP2 puts classes of its own in front."""
    names = {
        cls.__module__: None
        for module in model.modules()
        for cls in type(module).__mro__
        if cls.__module__.partition(".")[0] not in ("builtins", "torch")
    }
    return [sys.modules[name] for name in names if type(sys.modules.get(name)) is ModuleType]


class DoctorTrainer:
    """One rank; its methods are the commands of :class:`patchkit.parity.trainer_group`.

    Args:
        trainer: The reference trainer.
        layout: How modules map to operators.
    """

    def __init__(self, trainer: FSDPTrainer, layout: Layout) -> None:
        self._trainer, self._layout = trainer, layout
        self._last: Recorder | None = None

    def record(
        self, rollouts: Sequence[Rollout], *, exact: bool, budget: int, hold: Sequence[OperatorKey]
    ) -> dict[str, Any]:
        """Replay this rank's share and record it; its log-probabilities come along."""
        recorder = Recorder("trainer", budget=budget, hold=hold)
        taps = TrainerTaps(self._trainer.model, recorder, self._layout, exact=exact)
        logprobs: list[list[float]] = []
        try:
            for batch in self._trainer.batches(rollouts):
                with taps.forward(_row_names(batch)):
                    found = self._trainer.replay_batch(batch, exact=exact)
                logprobs += [lp.tolist() for lp in found[: len(batch)]]
        finally:
            taps.remove()
        self._last = recorder
        return {"recording": recorder.finish().as_plain(), "logprobs": logprobs}

    def tensor(self, layer: int, op: str) -> Any:
        """Values that the last recording held."""
        return tensor_as_plain(self._last.tensor(OperatorKey(layer, op))) if self._last else None

    def vector(self, layer: int, op: str) -> list[float] | None:
        """A norm's weight in the last recording."""
        found = self._last.vector(OperatorKey(layer, op)) if self._last else None
        return None if found is None else found.tolist()

    def owners_of_logprobs(self) -> list[str]:
        """Who computes the log-probabilities from the logits."""
        return list(owner_names(self._trainer.model))

    def step(self, rollouts: Sequence[Rollout], advantages: Sequence[float], *, exact: bool) -> Any:
        """An optimizer step about which nothing is proven; its figures."""
        return self._trainer.step_unproven(rollouts, advantages, exact=exact).figures

    def receipt(self) -> Receipt:
        """What the engine should hold."""
        return self._trainer.receipt()

    def export(self, folder: Path) -> None:
        """Write a checkpoint."""
        self._trainer.export(folder)

    def policy_version(self) -> int:
        """Optimizer steps taken so far."""
        return self._trainer.policy_version()


def _row_names(batch: Sequence[Rollout]) -> np.ndarray:
    """``[B, S, 2]``: sequence and position of every token of a padded batch."""
    longest = max((len(r) for r in batch), default=1)
    rows = np.full((max(1, len(batch)), longest, 2), -1, np.int64)
    for i, rollout in enumerate(batch):
        rows[i, : len(rollout), 0] = rollout.number
        rows[i, : len(rollout), 1] = np.arange(len(rollout))
    return rows


def build_doctor_trainer(settings: Any, installation: Any) -> DoctorTrainer:
    """Build one rank; named by reference in its settings."""
    layout = DEFAULT_LAYOUT
    if settings.adapter and (reference := find_adapter(settings.adapter).doctor):
        layout = resolve_reference(reference)
    return DoctorTrainer(build_trainer(settings, installation), layout)
