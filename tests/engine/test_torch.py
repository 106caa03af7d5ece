"""Under torch: dispatcher overrides, captured functions, and compiled code."""

from __future__ import annotations

from typing import Any

import pytest

from patchkit.engine import exact_context, install
from patchkit.engine.errors import NotReachedError, PreflightError, VerificationError

from .conftest import Toys, patch, rollout, trainer

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.stack


def test_a_function_that_cpp_captured_is_refused(mk: Toys) -> None:
    up = mk("def kernel(a, b):\n    return a\n")
    library = torch.library.Library("patchkit_test_captured", "DEF")
    library.define("mm(Tensor a, Tensor b) -> Tensor")
    library.impl("mm", up.kernel, "CPU")
    try:
        with pytest.raises(PreflightError, match="held where Python cannot look"):
            install(rollout(patch(f"{up.__name__}:kernel", lambda a, b: b)), "rollout")
    finally:
        library._destroy()


# -- the dispatcher -------------------------------------------------------------


def ones(self, mat2):
    return torch.ones(self.shape[0], mat2.shape[1])


def test_an_operator_override_is_owned_and_removed() -> None:
    x = torch.full((2, 2), 3.0)
    before = torch._C._dispatch_dump("aten::mm")
    adapter = rollout(patch("torch.ops:aten.mm", ones, "dispatch", key="CPU"))
    with install(adapter, "rollout") as inst:
        assert torch.equal(torch.mm(x, x), torch.ones(2, 2))
        inst.verify()
        with inst.canary():
            torch.mm(x, x)
        assert inst.hits == {"torch.ops:aten.mm[CPU]": 1}
    assert torch.equal(torch.mm(x, x), torch.full((2, 2), 18.0))
    assert torch._C._dispatch_dump("aten::mm") == before


def test_a_foreign_override_is_refused_before_and_noticed_after() -> None:
    adapter = rollout(patch("torch.ops:aten.mm", ones, "dispatch", key="CPU"))
    foreign = torch.library.Library("aten", "IMPL")
    foreign.impl("mm", lambda self, mat2: self, "CPU")
    with pytest.raises(PreflightError, match=r"(?s)somebody else has overridden it.*test_torch"):
        install(adapter, "rollout")
    foreign._destroy()
    inst = install(adapter, "rollout")
    foreign = torch.library.Library("aten", "IMPL")
    foreign.impl("mm", lambda self, mat2: self, "CPU")
    with pytest.raises(VerificationError, match=r"torch.ops:aten::mm\['CPU'\]"):
        inst.verify()
    foreign._destroy()
    inst.verify()
    inst.uninstall()


@pytest.mark.parametrize(
    ("symbol", "new", "match"),
    [
        ("torch.ops:aten.mm", lambda self, other: self, "(?s)does not fit the operator's schema"),
        ("torch.ops:aten.no_such_thing", ones, "no such operator"),
        ("torch.ops:aten.mm", 3, "an operator needs a plain function"),
    ],
)
def test_overrides_are_checked_against_the_schema(symbol: str, new: Any, match: str) -> None:
    with pytest.raises(PreflightError, match=match):
        install(rollout(patch(symbol, new, "dispatch", key="CPU")), "rollout")


# -- compiled code --------------------------------------------------------------

UP = """
import torch
class Norm(torch.nn.Module):
    def forward(self, x, scale=1.0):
        return helper(x) * scale
def helper(x):
    return x + 1
"""


def helper(x):
    return x * 10


def forward(self, x, scale=1.0):
    return x * 100 * scale


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_patched_function_traces_without_a_break_and_changes_are_noticed(
    mk: Toys, backend: str
) -> None:
    up = mk(UP)
    model = torch.compile(up.Norm(), backend=backend, fullgraph=True)
    x = torch.full((2,), 3.0)
    assert model(x)[0] == 4
    with install(rollout(patch(f"{up.__name__}:helper", helper)), "rollout"):
        assert model(x)[0] == 30
    assert model(x)[0] == 4
    symbol = f"{up.__name__}:Norm.forward"
    with pytest.raises(PreflightError, match=r"(?s)live instance.*_torchdynamo_orig_call"):
        install(rollout(patch(symbol, forward)), "rollout")


def test_a_patched_method_traces_without_a_break(mk: Toys) -> None:
    up = mk(UP)
    x = torch.full((2,), 3.0)
    with install(rollout(patch(f"{up.__name__}:Norm.forward", forward)), "rollout"):
        model = torch.compile(up.Norm(), backend="eager", fullgraph=True)
        assert model(x)[0] == 300
    assert model(x)[0] == 4, "what was compiled meanwhile notices the undo"


def test_the_canary_counts_a_trace_and_leaves_nothing_in_the_graph(mk: Toys) -> None:
    up = mk(UP)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = torch.compile(up.Norm(), backend=backend, fullgraph=True)
    x = torch.full((2,), 3.0)
    with install(rollout(patch(f"{up.__name__}:helper", helper)), "rollout") as inst:
        plain = model(x)
        with inst.canary() as canary:
            assert torch.equal(model(x), plain)
        assert canary.hits == {f"{up.__name__}:helper": 1}
        nodes = [[(n.op, str(n.target)) for n in g.graph.nodes] for g in graphs]
        assert nodes[0] == nodes[1], "the graph traced under the canary is the same graph"
        with pytest.raises(NotReachedError, match="no call and no trace"), inst.canary():
            torch.zeros(1)
        assert torch.equal(model(x), plain)


def test_a_switched_function_traces_without_a_break_on_both_sides(mk: Toys) -> None:
    up = mk(UP)
    model = torch.compile(up.Norm(), backend="eager", fullgraph=True)
    x = torch.full((2,), 3.0)
    with install(trainer(patch(f"{up.__name__}:helper", helper)), "trainer") as inst:
        assert model(x)[0] == 4
        with exact_context():
            assert model(x)[0] == 30
            with inst.switch.stock():
                assert model(x)[0] == 4
            assert model(x)[0] == 30
        assert model(x)[0] == 4
    assert model(x)[0] == 4


def test_no_recompilation_once_both_sides_are_known(mk: Toys) -> None:
    up = mk(UP)
    counter = torch._dynamo.testing.CompileCounter()
    model = torch.compile(up.Norm(), backend=counter, fullgraph=True)
    x = torch.full((2,), 3.0)
    with install(trainer(patch(f"{up.__name__}:helper", helper)), "trainer"):
        for _ in range(3):
            model(x)
            with exact_context():
                model(x)
    assert counter.frame_count == 2


def test_a_thread_that_never_said_is_refused_in_compiled_code_too(mk: Toys) -> None:
    import threading

    up = mk(UP)
    model = torch.compile(up.Norm(), backend="eager", fullgraph=True)
    x = torch.full((2,), 3.0)
    caught: list[Any] = []

    def work() -> None:
        try:
            caught.append(model(x))
        except Exception as error:
            caught.append(str(error))

    with install(trainer(patch(f"{up.__name__}:helper", helper)), "trainer"):
        model(x)
        with exact_context():
            assert model(x)[0] == 30
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
    assert isinstance(caught[0], str), caught
    assert "SwitchUnset" in caught[0] or "never said" in caught[0], caught[0]
