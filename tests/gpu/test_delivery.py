"""Weights delivered in parts: what a transaction does with them. Needs no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from patchkit.runtime.sharing import by_module  # noqa: E402
from patchkit.runtime.state import EnginePoisonedError  # noqa: E402
from patchkit.runtime.sync import (  # noqa: E402
    BACKENDS,
    WeightSync,
    WeightSyncError,
    WeightUpdateRefusedError,
)
from patchkit.runtime.weights import loaded_receipt, tensors_receipt  # noqa: E402

pytestmark = pytest.mark.anywhere


class Engine:
    """One worker with two parameters that arrive in two parts."""

    def __init__(self) -> None:
        self.model = torch.nn.Module()
        self.model.a = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.model.b = torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False)
        self.calls: list[str] = []
        self.llm_engine = SimpleNamespace(has_unfinished_requests=lambda: False)

    def init_weight_transfer_engine(self, request: Any) -> None:
        self.calls.append("init")

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, request: Any) -> None:
        info = request["update_info"]
        self.calls.append(f"part {','.join(info['tensors'])}")
        for name, tensor in info["tensors"].items():
            getattr(self.model, name).copy_(tensor)

    def finish_weight_update(self) -> None:
        self.calls.append("finish")

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return True

    def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "patchkit_received":
            return [None]
        pieces = [
            ("a", self.model.a, (0,), (3,)),
            ("b", self.model.b, (0, 0), (2, 2)),
        ]
        return [loaded_receipt("worker 0", self.model, pieces, version=args[1]).as_dict()]


def weights(fill: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3,), fill), "b": torch.full((2, 2), -fill)}


def receipt(tensors: dict[str, torch.Tensor], version: int) -> Any:
    return tensors_receipt("trainer", tensors.items(), version=version)


def in_parts(tensors: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    return [{"tensors": {name: tensor}} for name, tensor in tensors.items()]


def started(first: dict[str, torch.Tensor]) -> tuple[Engine, WeightSync]:
    engine = Engine()
    sync = WeightSync(engine, weight_map="somewhere:weight_map")
    sync.begin(receipt(first, 0), parts=in_parts(first))
    return engine, sync


def test_an_empty_engine_gets_its_first_version_and_is_compared() -> None:
    engine, sync = started(weights(1.0))
    assert engine.calls == ["reset", "init", "start", "part a", "part b", "finish", "reset"]
    assert sync.version == 0
    assert engine.model.a.tolist() == [1.0] * 3


def test_parts_of_one_update_are_one_transaction() -> None:
    engine, sync = started(weights(1.0))
    engine.calls.clear()
    record = sync.update_from(1, in_parts(weights(2.0)), receipt(weights(2.0), 1))
    assert engine.calls == ["reset", "start", "part a", "part b", "finish", "reset"]
    assert (record.previous, record.version, record.violations) == (0, 1, ())
    assert {"start", "load", "finish", "receipts", "reset"} <= set(record.seconds)


def test_a_part_that_is_missing_poisons_the_engine() -> None:
    _, sync = started(weights(1.0))
    with pytest.raises(WeightSyncError, match="not what the workers hold"):
        sync.update_from(1, in_parts(weights(2.0))[:1], receipt(weights(2.0), 1))
    assert sync.version == 0
    with pytest.raises(EnginePoisonedError):
        sync.update_from(2, in_parts(weights(3.0)), receipt(weights(3.0), 2))


def test_nothing_is_gathered_for_an_update_that_is_refused() -> None:
    _, sync = started(weights(1.0))

    def parts() -> Any:
        raise AssertionError("asked for")
        yield

    with pytest.raises(WeightUpdateRefusedError, match="delivered twice"):
        sync.update_from(0, parts(), receipt(weights(1.0), 0))


def test_a_trainer_that_cannot_gather_poisons_the_engine() -> None:
    _, sync = started(weights(1.0))

    def parts() -> Any:
        yield in_parts(weights(2.0))[0]
        raise RuntimeError("a rank was lost")

    with pytest.raises(WeightSyncError, match="failed on the way"):
        sync.update_from(1, parts(), receipt(weights(2.0), 1))


def test_every_path_of_a_profile_has_a_backend_of_its_own() -> None:
    assert set(BACKENDS) == {"files", "ipc"}
    assert len(set(BACKENDS.values())) == 2


def test_a_part_is_a_layer_or_everything_outside_the_layers() -> None:
    def linear() -> torch.nn.Module:
        return torch.nn.Linear(2, 2)

    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.embed = linear()
    model.model.layers = torch.nn.ModuleList([linear() for _ in range(11)])
    model.model.norm = linear()
    model.lm_head = linear()
    groups = by_module(model, "model.layers")
    assert [name for group in groups for name in group] != []
    assert sorted(name for group in groups for name in group) == sorted(
        name for name, _ in model.named_parameters()
    )
    assert len(groups) == 12
    assert groups[0] == [
        "model.embed.weight", "model.embed.bias", "model.norm.weight", "model.norm.bias",
        "lm_head.weight", "lm_head.bias",
    ]  # fmt: skip
    assert groups[2] == ["model.layers.1.weight", "model.layers.1.bias"]
