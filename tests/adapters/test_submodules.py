"""No submodule is left to chance: each class is declared, and anything else is refused."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import patchkit  # noqa: E402
from patchkit.engine import Submodule, find_adapter  # noqa: E402
from patchkit.engine.errors import DeclarationError  # noqa: E402
from patchkit.runtime import coverage, extension, worker  # noqa: E402
from patchkit.runtime.coverage import UncoveredModelError, declared, uncovered  # noqa: E402
from patchkit_adapters.glm4_moe import tiny as glm4_moe  # noqa: E402
from patchkit_adapters.qwen3 import tiny as qwen3  # noqa: E402
from patchkit_adapters.qwen3_moe import tiny as qwen3_moe  # noqa: E402

pytestmark = pytest.mark.stack

MODELS = {
    "glm4_moe": ("Glm4MoeForCausalLM", glm4_moe.SHAPE),
    "qwen3": ("Qwen3ForCausalLM", qwen3.SHAPE),
    "qwen3_moe": ("Qwen3MoeForCausalLM", qwen3_moe.SHAPE),
}
ids = torch.tensor([[3, 4, 5]])


@pytest.fixture(params=MODELS)
def adapter(request: pytest.FixtureRequest) -> str:
    return request.param


def make(adapter: str) -> Any:
    kind, shape = MODELS[adapter]
    model_class = getattr(transformers, kind)
    return model_class(model_class.config_class(**shape)).to(torch.bfloat16)


def exact_forward(adapter: str, model: Any) -> None:
    with patchkit.install(adapter=adapter, side="trainer", profile="cpu_tree"):
        with patchkit.exact_context(), torch.no_grad():
            model(input_ids=ids, use_cache=False)


def test_the_stock_model_is_covered_and_no_declaration_is_dead(adapter: str) -> None:
    model = make(adapter)
    modules = declared(find_adapter(adapter), "trainer", "cpu_tree")
    assert uncovered(model, modules) == []
    assert {m.name for m in modules} == {coverage.class_name(m) for m in model.modules()}


def test_every_declared_class_exists_in_vllm(adapter: str) -> None:
    vllm = pytest.importorskip("vllm")
    del vllm
    modules = declared(find_adapter(adapter), "rollout", "cpu_tree")
    for module in modules:
        package, _, name = module.name.partition(":")
        assert isinstance(getattr(__import__(package, fromlist=["_"]), name), type), module.name
    assert len(modules) >= 15


class Norm(torch.nn.Module):
    """A norm that somebody put in."""

    def forward(self, x: Any) -> Any:
        return x


def plant_norm(model: Any) -> None:
    model.model.layers[1].extra_norm = Norm()


def plant_linear(model: Any) -> None:
    # torch.nn.Linear is covered inside attention, whose patched forward reads it.
    model.model.layers[0].extra_proj = torch.nn.Linear(4, 4)


def plant_subclass(model: Any) -> None:
    """What a per-instance swap leaves behind: the patched class is not the norm's any more."""
    norm = model.model.layers[0].self_attn.q_norm
    norm.__class__ = type("FastNorm", (type(norm),), {"forward": lambda self, x: x})


def plant_forward(model: Any) -> None:
    """What a per-instance patch leaves behind: the class's method is hidden."""
    norm = model.model.layers[1].self_attn.k_norm
    norm.forward = types.MethodType(lambda self, x: x, norm)


PLANTS: dict[str, tuple[Callable[[Any], None], tuple[str, ...]]] = {
    "an unknown class": (plant_norm, ("model.layers.1.extra_norm", "Norm", "DecoderLayer")),
    "a known class elsewhere": (plant_linear, ("model.layers.0.extra_proj", "Linear inside")),
    "a subclass": (plant_subclass, ("model.layers.0.self_attn.q_norm", "FastNorm")),
    "a forward in the instance": (plant_forward, ("model.layers.1.self_attn.k_norm", "hides")),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_submodule_is_refused_by_the_first_exact_forward(
    adapter: str, plant: str
) -> None:
    change, named = PLANTS[plant]
    model = make(adapter)
    change(model)
    model(input_ids=ids, use_cache=False)  # the stock path is nobody's business
    with pytest.raises(UncoveredModelError) as caught:
        exact_forward(adapter, model)
    for text in named:
        assert text in str(caught.value)
    assert all(v.remedy and v.expected for v in caught.value.violations)
    exact_forward(adapter, make(adapter))


def test_everything_uncovered_is_reported_at_once(adapter: str) -> None:
    model = make(adapter)
    for change, _ in PLANTS.values():
        change(model)
    modules = declared(find_adapter(adapter), "trainer", "cpu_tree")
    assert len(uncovered(model, modules)) == len(PLANTS)


@pytest.mark.parametrize("planted", [False, True])
def test_a_worker_does_not_attest_for_a_model_that_is_not_covered(
    planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's own check, on stand-ins for vLLM's classes."""
    container = torch.nn.Sequential(torch.nn.Linear(2, 2))
    if planted:
        container.append(torch.nn.LayerNorm(2))
    rollout = tuple(
        Submodule(name=name, side="rollout", treatment="stock")
        for name in (
            "torch.nn.modules.container:Sequential",
            "torch.nn.modules.linear:Linear",
        )
    )
    installation = types.SimpleNamespace(
        adapter=replace(find_adapter("qwen3"), modules=rollout),
        side="rollout",
        manifest=types.SimpleNamespace(as_dict=lambda: {"profile": "cpu_tree"}),
    )
    monkeypatch.setattr(worker, "installation", installation)
    monkeypatch.setattr("patchkit.runtime.attestation.attest", lambda **_: {})

    class Worker(extension.WorkerExtension):
        rank = 0
        model_runner = types.SimpleNamespace(get_model=lambda: container)

        def patchkit_place(self) -> dict[str, int]:
            return {"rank": 0, "dp_rank": 0, "tp_size": 1, "pp_size": 1}

    if not planted:
        assert Worker().patchkit_attest()["pid"]
        return
    with pytest.raises(UncoveredModelError, match="LayerNorm"):
        Worker().patchkit_attest()


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (
            Submodule(name="a.b:C", side="trainer", treatment="exact", by=("a.b:C.forward",)),
            "a.b:C.forward, which it does not patch",
        ),
        (
            Submodule(name="a.b:C", side="rollout", treatment="stock", by=("a.b:C.forward",)),
            "on which it does not rely",
        ),
    ],
)
def test_a_submodule_cannot_claim_a_patch_that_the_adapter_lacks(
    module: Submodule, named: str
) -> None:
    with pytest.raises(DeclarationError, match=named):
        replace(find_adapter("qwen3"), modules=(module,))


def test_exact_without_a_patch_is_no_declaration() -> None:
    with pytest.raises(DeclarationError, match="names no patch"):
        Submodule(name="a.b:C", side="trainer", treatment="exact")
