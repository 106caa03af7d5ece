"""vLLM's side of the bindings on stand-ins: what they compute, and what they refuse by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from patchkit import providers  # noqa: E402
from patchkit.bindings import vllm_cpu  # noqa: E402
from patchkit.bindings.claim import UncoveredLayerError  # noqa: E402
from patchkit.bindings.vllm_cpu import experts, linear, ranks, weights  # noqa: E402

pytestmark = pytest.mark.stack


def drawn(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def runner(shared: object | None, **changes: Any) -> SimpleNamespace:
    config = SimpleNamespace(
        is_sequence_parallel=False, skip_final_all_reduce=False, in_dtype=torch.bfloat16
    )
    made = {
        "moe_config": config,
        "shared_experts": shared,
        "routed_scaling_factor": 2.5,
        "_fused_output_is_reduced": False,
        **changes,
    }
    return SimpleNamespace(**made)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(world_size=1)
    monkeypatch.setattr("vllm.distributed.get_tp_group", lambda: group)


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that hold the same: the gathered tensor is this rank's, twice."""
    group = SimpleNamespace(world_size=2, all_gather=lambda x, dim: torch.cat([x, x], dim))
    monkeypatch.setattr("vllm.distributed.get_tp_group", lambda: group)


def test_shared_and_routed_are_reduced_apart_and_rounded_once(two_ranks: None) -> None:
    shared, routed = drawn(5, 8), drawn(5, 8, seed=1)
    moe = runner(object())
    both = experts.reduce_shared_and_routed(moe, shared, routed)
    assert torch.equal(both[0], shared + shared)
    assert torch.equal(both[1], (routed + routed) * 2.5)
    combined = experts.round_combined_output(moe, both[0] + both[1], None)
    assert combined.dtype == torch.bfloat16
    assert torch.equal(combined, (both[0] + both[1]).bfloat16())
    assert experts.round_combined_output(moe, both[0] + both[1], 3).shape == (5, 3)


def test_routed_experts_alone_are_reduced_once(two_ranks: None) -> None:
    states = drawn(5, 8)
    found = experts.reduce_expert_output(runner(None), states, None)
    assert torch.equal(found, (states + states).bfloat16())


@pytest.mark.parametrize(
    ("call", "named"),
    [
        # Each of the two pairs refuses the other's runner, so that no output is left
        # unreduced and none is reduced twice.
        (lambda: experts.reduce_expert_output(runner(object()), drawn(2, 2), None), "shared"),
        (lambda: experts.round_combined_output(runner(None), drawn(2, 2), None), "shared"),
        (lambda: experts.reduce_shared_and_routed(runner(None), None, drawn(2, 2)), "shared"),
        (
            lambda: experts.reduce_shared_and_routed(
                runner(object()), drawn(2, 2).bfloat16(), drawn(2, 2)
            ),
            "dtype",
        ),
        (
            lambda: experts.reduce_expert_output(runner(None), drawn(2, 2).bfloat16(), None),
            "dtype",
        ),
        (lambda: experts.reduce_expert_output(runner(None), drawn(2, 2), None, True), "reduced"),
    ],
)
def test_another_runner_is_refused(one_rank: None, call: Any, named: str) -> None:
    with pytest.raises(UncoveredLayerError, match=named):
        call()


def router(**changes: Any) -> SimpleNamespace:
    made = {
        "scoring_func": "softmax",
        "use_grouped_topk": False,
        "custom_routing_function": None,
        "e_score_correction_bias": None,
        "routed_scaling_factor": 1.0,
        "top_k": 2,
        "renormalize": True,
        "num_expert_group": 4,
        "topk_group": 2,
        **changes,
    }
    return SimpleNamespace(**made)


GROUPED = {
    "scoring_func": "sigmoid",
    "use_grouped_topk": True,
    "e_score_correction_bias": torch.zeros(8),
}


def test_routers_call_their_provider() -> None:
    logits = drawn(7, 8)
    weights, chosen = experts.compute_routing(router(), logits, logits, None)
    wanted = providers.route(logits, 2, renormalize=True)
    assert torch.equal(weights, wanted[0])
    assert torch.equal(chosen.long(), wanted[1])
    bias = 0.3 * drawn(8, seed=1)
    made = router(**{**GROUPED, "e_score_correction_bias": bias})
    weights, chosen = experts.compute_routing(made, logits, logits, None)
    wanted = providers.route_grouped(
        logits, 2, bias_E=bias, groups=4, kept_groups=2, renormalize=True
    )
    assert torch.equal(weights, wanted[0])
    assert torch.equal(chosen.long(), wanted[1])
    assert chosen.dtype == torch.int32


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({**GROUPED, "scoring_func": "softmax"}, "scoring_func"),
        ({**GROUPED, "e_score_correction_bias": None}, "e_score_correction_bias"),
        ({**GROUPED, "routed_scaling_factor": 2.5}, "routed_scaling_factor"),
        ({"custom_routing_function": print}, "custom_routing_function"),
    ],
)
def test_other_routers_are_refused(changes: dict[str, Any], named: str) -> None:
    logits = drawn(3, 8)
    with pytest.raises(UncoveredLayerError, match=named):
        experts.compute_routing(router(**changes), logits, logits, None)


class UnquantizedLinearMethod:
    pass


def row_parallel(**changes: Any) -> SimpleNamespace:
    made = {
        "input_is_parallel": True,
        "bias": None,
        "quant_method": UnquantizedLinearMethod(),
        "weight": drawn(8, 16).bfloat16(),
        "tp_size": 1,
        "reduce_results": True,
        "return_bias": False,
        **changes,
    }
    return SimpleNamespace(**made)


def test_a_row_parallel_layer_rounds_only_what_it_reduced() -> None:
    x = drawn(5, 16, seed=1).bfloat16()
    whole = linear.row_parallel_forward(row_parallel(), x)
    assert whole.dtype == torch.bfloat16
    partial = linear.row_parallel_forward(row_parallel(reduce_results=False), x)
    assert partial.dtype == torch.float32
    assert torch.equal(partial.bfloat16(), whole)


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"bias": torch.zeros(8)}, "bias"), ({"tp_size": 3}, "tp_size"), ({"quant_method": 1}, "int")],
)
def test_other_row_parallel_layers_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UncoveredLayerError, match=named):
        linear.row_parallel_forward(row_parallel(**changes), drawn(2, 16).bfloat16())


def test_a_rank_alone_is_the_tree(one_rank: None) -> None:
    x = drawn(3, 4)
    assert ranks.tree_over_ranks(x) is x


# --- the weight map ---------------------------------------------------------------------


def test_a_widened_matrix_is_given_as_a_view_of_what_was_stored() -> None:
    stored = drawn(6, 8).bfloat16()
    widened = stored.float()
    view = weights.as_stored("gate", widened)
    assert view.dtype == torch.bfloat16
    assert torch.equal(view, stored)
    assert view.untyped_storage().data_ptr() == widened.untyped_storage().data_ptr()
    assert weights.as_stored("gate", stored) is stored


def test_a_matrix_with_more_digits_is_refused() -> None:
    widened = drawn(6, 8).bfloat16().float()
    widened[2, 3] += 1e-4
    with pytest.raises(UncoveredLayerError, match="more digits"):
        weights.as_stored("gate", widened)


def test_a_layer_that_the_map_does_not_know_is_refused_by_name() -> None:
    pytest.importorskip("vllm")
    model = torch.nn.Module()
    model.odd_norm = torch.nn.LayerNorm(4)
    with pytest.raises(UncoveredLayerError, match=r"odd_norm.*bias.*weight"):
        list(weights.weight_map(model, tp_rank=0, tp_size=1))


# --- the declarations -------------------------------------------------------------------


def test_tuples_have_one_patch_per_symbol_and_version() -> None:
    for patches in (vllm_cpu.DENSE, vllm_cpu.MOE, vllm_cpu.SHARED_MOE):
        keys = [(patch.symbol, patch.versions) for patch in patches]
        assert len(keys) == len(set(keys))
        assert {patch.profiles for patch in patches} == {("cpu_tree",)}


def test_patches_can_be_given_to_other_profiles() -> None:
    moved = vllm_cpu.in_profiles(vllm_cpu.DENSE, "mine", "theirs")
    assert {patch.profiles for patch in moved} == {("mine", "theirs")}
    assert [patch.symbol for patch in moved] == [patch.symbol for patch in vllm_cpu.DENSE]
