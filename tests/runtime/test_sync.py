"""The weight-update transaction, against an engine that can misbehave in each way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file  # noqa: E402

from patchkit.errors import ConfigurationError  # noqa: E402
from patchkit.runtime.state import EnginePoisonedError  # noqa: E402
from patchkit.runtime.sync import (  # noqa: E402
    WeightSync,
    WeightSyncError,
    WeightUpdateRefusedError,
)
from patchkit.runtime.weights import loaded_receipt, tensors_receipt  # noqa: E402

pytestmark = pytest.mark.stack


class Linear(torch.nn.Module):
    """Half of ``w`` per worker, ``norm`` on both."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.w = torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.zeros(3), requires_grad=False)

    def load(self, tensors) -> None:
        self.w.copy_(tensors["w"][2 * self.rank : 2 * self.rank + 2])
        self.norm.copy_(tensors["norm"])

    def pieces(self):
        return [("w", self.w, (2 * self.rank, 0), (4, 3)), ("norm", self.norm, (0,), (3,))]


class Engine:
    """Two workers in one process; ``fault`` says what goes wrong."""

    def __init__(self, initial, fault: str = "") -> None:
        self.workers = [Linear(0), Linear(1)]
        for w in self.workers:
            w.load(initial)
        self.fault = fault
        self.label = "default"
        self.calls: list[str] = []
        self.received = None
        self.unfinished = False
        self.llm_engine = SimpleNamespace(has_unfinished_requests=lambda: self.unfinished)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.fault == f"raise in {name}":
            raise RuntimeError(f"{name} broke")

    def init_weight_transfer_engine(self, request):
        self._call("init")

    def start_weight_update(self):
        self._call("start")

    def update_weights(self, request):
        self._call("load")
        info = request["update_info"]
        self.tensors = {}
        for path in info["paths"]:
            self.tensors.update(load_file(path))
        if self.fault == "damaged file":
            self.tensors["w"] = self.tensors["w"] + 1
        self.received = info["version"]
        for w in self.workers:
            if self.fault == "stale worker" and w.rank == 1:
                continue
            w.load(self.tensors)
        if self.fault == "corrupt shard":
            self.workers[1].w[0, 0] += 1

    def finish_weight_update(self, weight_version=None):
        self._call("finish")
        assert weight_version is None, "the label is part of the commit"

    def update_weight_version(self, version):
        self._call("label")
        if self.fault != "label not kept":
            self.label = version

    def get_weight_version(self):
        return self.label

    def reset_prefix_cache(self):
        self._call("reset")
        resets = self.calls.count("reset")
        if self.fault == "reset says False":
            return False
        if self.fault == "reset says nothing":
            return None
        return not (self.fault == "later reset says False" and resets == 3)

    def collective_rpc(self, method, *, args=()):
        self._call(method)
        if method == "patchkit_received":
            if self.received is None:
                return [None, None]
            r = tensors_receipt("x", self.tensors.items(), version=self.received).as_dict()
            return [{**r, "holder": f"worker {i}, as received"} for i in range(2)]
        _, version = args
        found = [
            loaded_receipt(f"worker {w.rank}", w, w.pieces(), version=version).as_dict()
            for w in self.workers
        ]
        return found[:1] if self.fault == "worker silent" else found


def weights(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(4, 3, generator=g), "norm": torch.randn(3, generator=g)}


def receipt(version: int):
    return tensors_receipt("trainer", weights(version).items(), version=version)


@pytest.fixture
def deliver(tmp_path):
    def deliver(version: int) -> str:
        path = tmp_path / f"v{version}.safetensors"
        save_file(weights(version), str(path))
        return str(path)

    return deliver


def begun(fault: str = "", **kwargs) -> tuple[WeightSync, Engine]:
    engine = Engine(weights(0))
    sync = WeightSync(engine, weight_map="m:f", **kwargs)
    sync.begin(receipt(0))
    engine.fault = fault
    return sync, engine


def test_two_versions(deliver):
    sync, engine = begun()
    for version in (1, 2):
        record = sync.update(version, deliver(version), receipt(version))
        assert (record.version, record.previous) == (version, version - 1)
        assert record.violations == ()
        assert sync.version == version
        assert engine.label == str(version)
        assert {"start", "load", "finish", "receipts", "reset", "commit"} <= set(record.seconds)
    order = engine.calls[engine.calls.index("start") :]
    assert order.index("patchkit_receipt") < order.index("label"), "receipts before the commit"
    assert order.index("reset") < order.index("label"), "caches before the commit"
    assert record.as_dict()["workers"][0]["holder"] == "worker 0"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("corrupt shard", ["w: loaded weights differ", "differs on worker 1 (region"]),
        ("stale worker", ["worker 1", "replicas on worker 0 and worker 1 differ"]),
        ("damaged file", ["differs from the trainer's weights already"]),
        ("worker silent", ["do not cover it once", "worker 0"]),
        ("later reset says False", ["prefix cache", "False"]),
        ("label not kept", ["does not keep it", "found:    0"]),
        ("raise in start", ["RuntimeError", "start broke"]),
        ("raise in load", ["RuntimeError", "load broke"]),
        ("raise in finish", ["finish broke"]),
        ("raise in patchkit_receipt", ["patchkit_receipt broke"]),
        ("raise in label", ["label broke"]),
    ],
)
def test_every_failure_under_way_poisons_and_is_named(deliver, fault, words):
    sync, engine = begun(fault)
    with pytest.raises(WeightSyncError) as e:
        sync.update(1, deliver(1), receipt(1))
    assert all(w in str(e.value) for w in words), str(e.value)
    assert sync.version == 0
    engine.fault = ""
    for wanted in (
        lambda: sync.update(2, deliver(2), receipt(2)),
        lambda: sync.state.require_usable("generate"),
    ):
        with pytest.raises(EnginePoisonedError, match="policy version 1 failed") as later:
            wanted()
        assert "Shut this engine down" in str(later.value)


class OlderEngine(Engine):
    """vLLM before weight labels: finish takes no argument, outputs carry no version."""

    update_weight_version = get_weight_version = property()  # reads as absent

    def finish_weight_update(self):
        self._call("finish")


def test_an_engine_without_weight_labels(deliver):
    engine = OlderEngine(weights(0))
    assert not hasattr(engine, "update_weight_version")
    sync = WeightSync(engine, weight_map="m:f")
    assert sync.begin(receipt(0)).labels == "driver"
    assert sync.update(1, deliver(1), receipt(1)).version == 1


class PausingEngine(Engine):
    def pause_generation(self, *, mode, clear_cache):
        self._call(f"pause {mode}")

    def resume_generation(self):
        self._call("resume")


def in_flight(fault: str = "") -> tuple[WeightSync, PausingEngine]:
    engine = PausingEngine(weights(0))
    sync = WeightSync(engine, weight_map="m:f", caches="salt", in_flight=True)
    assert not sync.begin(receipt(0)).in_flight
    engine.unfinished = True
    engine.fault = fault
    return sync, engine


def test_requests_may_go_on_across_an_update(deliver):
    sync, engine = in_flight()
    assert sync.update(1, deliver(1), receipt(1)).in_flight
    assert engine.calls[-1] == "resume"
    assert engine.calls.index("pause keep") < engine.calls.index("start")
    assert "pause abort" not in engine.calls


def test_after_a_failure_they_are_aborted_and_not_resumed(deliver):
    sync, engine = in_flight("corrupt shard")
    with pytest.raises(WeightSyncError):
        sync.update(1, deliver(1), receipt(1))
    assert engine.calls[-1] == "pause abort"
    assert "resume" not in engine.calls


@pytest.mark.parametrize(("kind", "caches"), [(PausingEngine, "reset"), (Engine, "salt")])
def test_in_flight_needs_salt_and_an_engine_that_pauses(kind, caches):
    with pytest.raises(ConfigurationError, match="in_flight"):
        WeightSync(kind(weights(0)), weight_map="m:f", caches=caches, in_flight=True)


def test_an_interrupt_poisons_too(deliver):
    sync, engine = begun()

    def interrupted(request):
        raise KeyboardInterrupt

    engine.update_weights = interrupted
    with pytest.raises(KeyboardInterrupt):
        sync.update(1, deliver(1), receipt(1))
    with pytest.raises(EnginePoisonedError, match="KeyboardInterrupt"):
        sync.state.require_usable("generate")


@pytest.mark.parametrize(
    ("version", "trainer", "words"),
    [
        (0, 0, "delivered twice"),
        (-1, -1, "out of order"),
        (1, None, "trainer's receipt: missing"),
        (1, 2, "of another version"),
    ],
)
def test_what_can_be_refused_changes_nothing(deliver, version, trainer, words):
    sync, engine = begun()
    before = list(engine.calls)
    with pytest.raises(WeightUpdateRefusedError, match=words):
        sync.update(version, deliver(1), None if trainer is None else receipt(trainer))
    assert engine.calls == before
    assert sync.update(1, deliver(1), receipt(1)).version == 1


def test_all_refusals_come_together(tmp_path):
    sync, engine = begun()
    engine.unfinished = True
    with pytest.raises(WeightUpdateRefusedError) as e:
        sync.update(0, [tmp_path / "a", tmp_path / "b"], None)
    assert len(e.value.violations) == 5, str(e.value)


@pytest.mark.parametrize("fault", ["reset says False", "reset says nothing"])
def test_an_engine_that_cannot_reset_is_refused_before_anything_changed(deliver, fault):
    sync, engine = begun(fault)
    with pytest.raises(WeightUpdateRefusedError, match="prefix cache"):
        sync.update(1, deliver(1), receipt(1))
    assert "start" not in engine.calls
    assert sync.state.poisoned is None
    salted = WeightSync(Engine(weights(0), fault), weight_map="m:f", caches="salt")
    salted.begin(receipt(0))
    assert salted.update(1, deliver(1), receipt(1)).caches == "salt"
    assert salted.salt() == "patchkit-policy-1"


def test_the_initial_checkpoint_is_compared_too():
    sync = WeightSync(Engine(weights(7)), weight_map="m:f")
    with pytest.raises(WeightSyncError, match="loaded weights differ"):
        sync.begin(receipt(0))
    assert sync.state.poisoned


@pytest.mark.parametrize(("trainer", "words"), [(None, "missing"), (1, "of another version")])
def test_the_initial_checkpoint_needs_a_receipt_of_its_version(trainer, words):
    engine = Engine(weights(0))
    sync = WeightSync(engine, weight_map="m:f")
    with pytest.raises(WeightUpdateRefusedError, match=words):
        sync.begin(None if trainer is None else receipt(trainer))
    assert engine.calls == []
    assert sync.begin(receipt(0)).version == 0


def test_log_records_and_goes_on(deliver):
    sync, _ = begun("corrupt shard", mode="log")
    record = sync.update(1, deliver(1), receipt(1))
    assert [v.subject for v in record.violations] == ["w"]
    assert sync.version == 1


def test_off_makes_no_receipts(deliver):
    engine = Engine(weights(0))
    sync = WeightSync(engine, mode="off")
    sync.begin()
    assert sync.update(1, deliver(1)).workers == ()
    assert "patchkit_receipt" not in engine.calls


def test_update_before_begin(deliver):
    with pytest.raises(WeightUpdateRefusedError, match="begin"):
        WeightSync(Engine(weights(0)), weight_map="m:f").update(1, deliver(1), receipt(1))


@pytest.mark.parametrize("kwargs", [{}, {"mode": "of"}, {"weight_map": "m:f", "caches": "clear"}])
def test_unusable_options(kwargs):
    with pytest.raises(ConfigurationError, match="WeightSync"):
        WeightSync(Engine(weights(0)), **kwargs)
