"""The sigmoid router in groups, the partial rotation and the bias, beside what they stand for."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from patchkit import providers  # noqa: E402

pytestmark = pytest.mark.stack


def drawn(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def route(logits: torch.Tensor, top_k: int = 4, **changes):
    options = {
        "bias_E": torch.zeros(logits.shape[-1]),
        "groups": 4,
        "kept_groups": 2,
        "renormalize": True,
        **changes,
    }
    return providers.route_grouped(logits, top_k, **options)


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (8, 3), (2, 2)])
def test_it_chooses_what_transformers_chooses(groups: int, kept: int) -> None:
    from transformers import Glm4MoeConfig
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

    config = Glm4MoeConfig(
        hidden_size=32, n_routed_experts=16, num_experts_per_tok=4, n_group=groups,
        topk_group=kept, routed_scaling_factor=1.0, norm_topk_prob=True,
    )  # fmt: skip
    router = Glm4MoeTopkRouter(config)
    with torch.no_grad():
        router.weight.copy_(drawn(16, 32))
        router.e_score_correction_bias.copy_(0.2 * drawn(16, seed=1))
        x = drawn(300, 32, seed=2)
        logits, weights, experts = router(x)
    found, chosen = route(
        logits, bias_E=router.e_score_correction_bias, groups=groups, kept_groups=kept
    )
    wanted = torch.zeros(300, 16).scatter(1, experts, weights)
    torch.testing.assert_close(torch.zeros(300, 16).scatter(1, chosen, found), wanted)


def test_the_bias_chooses_and_does_not_weigh() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 5.0])
    weights, experts = route(logits, 1, bias_E=bias, groups=1, kept_groups=1, renormalize=False)
    assert experts.tolist() == [[3]]
    assert weights.item() == pytest.approx(torch.sigmoid(torch.tensor(-1.0)).item())


def test_experts_of_groups_that_are_not_kept_are_never_chosen() -> None:
    # The single best expert lies in the group whose two best are the weakest pair.
    logits = torch.tensor([[9.0, -9.0, 2.0, 2.0, 1.5, 1.5, -9.0, -9.0]])
    _, experts = route(logits, 2, groups=4, kept_groups=2)
    assert experts.tolist() == [[2, 3]]


@pytest.mark.parametrize("copies", [1, 3, 32])
def test_equals_go_to_the_lower_id_groups_and_experts_alike(copies: int) -> None:
    equal = torch.zeros(copies, 16)
    weights, experts = route(equal)
    assert experts.tolist() == [[0, 1, 2, 3]] * copies
    assert torch.equal(weights, torch.full((copies, 4), 0.25))
    # Groups 1 and 3 tie behind group 2: group 1 is kept.
    logits = torch.full((copies, 8), -4.0)
    logits[:, 4:6], logits[:, 2:4], logits[:, 6:8] = 3.0, 1.0, 1.0
    assert route(logits, 4)[1].tolist() == [[4, 5, 2, 3]] * copies


def test_bits_do_not_depend_on_the_memory_a_row_lies_in() -> None:
    logits = drawn(33, 16)
    weights, experts = route(logits)
    wide = torch.zeros(33, 21)
    wide[:, 3:19] = logits
    for other in (wide[:, 3:19], logits.T.contiguous().T):
        found = route(other)
        assert torch.equal(found[0], weights)
        assert torch.equal(found[1], experts)


def test_gradients_are_those_of_the_formula() -> None:
    logits = drawn(5, 16).requires_grad_()
    pull = drawn(5, 4, seed=3)
    weights, experts = route(logits)
    (weights * pull).sum().backward()
    exact = logits.detach().double().requires_grad_()
    chosen = torch.sigmoid(exact).gather(-1, experts)
    (chosen / chosen.sum(-1, keepdim=True) * pull).sum().backward()
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-5, atol=1e-7)


def test_gradients_are_finite_where_the_sigmoid_is_zero() -> None:
    logits = torch.full((2, 8), -200.0, requires_grad=True)
    weights, _ = route(logits, 2)
    weights.sum().backward()
    assert torch.isfinite(weights).all()
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("change", [{"groups": 3}, {"groups": 16}, {"groups": 8, "kept_groups": 1}])
def test_groups_that_do_not_fit_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="groups of equal size"):
        route(drawn(2, 16), **change)


def test_a_partial_rotation_turns_the_first_elements_and_passes_the_rest() -> None:
    x, positions = drawn(7, 3, 32).bfloat16(), torch.arange(7) * 11
    options = {"base": 1e6, "max_position": 2048}
    part = providers.rotate(x, positions, rotary_dim=12, **options)
    assert torch.equal(part[..., 12:], x[..., 12:])
    alone = providers.rotate(x[..., :12].contiguous(), positions, **options)
    assert torch.equal(part[..., :12], alone)
    whole = providers.rotate(x, positions, **options)
    assert torch.equal(providers.rotate(x, positions, rotary_dim=32, **options), whole)


@pytest.mark.parametrize("rotary_dim", [0, 7, 34])
def test_other_parts_are_refused(rotary_dim: int) -> None:
    with pytest.raises(ValueError, match="rotary_dim"):
        providers.rotate(
            drawn(2, 1, 32), torch.arange(2), base=1e4, max_position=8, rotary_dim=rotary_dim
        )


def test_a_bias_is_added_before_the_rounding() -> None:
    x, weight = drawn(33, 64).bfloat16(), drawn(16, 64, seed=1).bfloat16()
    bias = drawn(16, seed=2).bfloat16().requires_grad_()
    found = providers.linear(x, weight, bias=bias)
    assert found.dtype == torch.float32
    assert torch.equal(found, providers.linear(x, weight) + bias.float())
    rounded_first = providers.linear(x, weight).bfloat16() + bias
    assert not torch.equal(found.bfloat16(), rounded_first)
    found.sum().backward()
    assert torch.equal(bias.grad, torch.full((16,), 33.0, dtype=torch.bfloat16))
