"""Limits, empty batches, zeros, and what is refused."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from patchkit import providers  # noqa: E402

pytestmark = pytest.mark.stack


def normal(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def attend(keys: int, size: int = 2):
    allowed = torch.ones(1, 1, keys, dtype=torch.bool)
    return providers.attention(
        torch.zeros(1, 1, 1, size), torch.zeros(1, keys, 1, size), torch.ones(1, keys, 1, size),
        allowed, scale=1.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("call", "operator", "terms", "limit"),
    [
        (lambda: providers.linear(torch.ones(1, 8193), torch.ones(2, 8193)),
         "exact_matmul", 8193, 8192),
        (lambda: providers.linear(torch.ones(1, 8200 * 2), torch.ones(2, 8200 * 2), chunks=2),
         "exact_matmul", 8200, 8192),
        (lambda: providers.rms_norm(torch.ones(1, 8193), torch.ones(8193), 1e-6),
         "rms_norm", 8193, 8192),
        (lambda: attend(65_537), "attention", 65_537, 65_536),
        (lambda: attend(2, 8194), "attention (head size)", 8194, 8192),
        (lambda: providers.exact_sum(torch.ones(2_097_153)), "exact_sum", 2_097_153, 2_097_152),
    ],
)  # fmt: skip
def test_reductions_that_are_too_long_are_refused(call, operator, terms, limit):
    with pytest.raises(providers.ReductionTooLongError, match="more chunks, or leave") as caught:
        call()
    assert (caught.value.operator, caught.value.terms, caught.value.limit) == (
        operator, terms, limit,
    )  # fmt: skip


def test_reductions_at_the_limit_work():
    assert providers.linear(torch.ones(1, 8192), torch.ones(1, 8192)).item() == 8192.0
    assert providers.linear(torch.ones(1, 16384), torch.ones(1, 16384), chunks=2).item() == 16384.0
    assert providers.rms_norm(torch.ones(1, 8192), torch.ones(8192), 0.0)[0, 0] == 1.0
    assert attend(65_536).flatten().tolist() == [1.0, 1.0]
    assert providers.exact_sum(torch.ones(1 << 21)).item() == 2.0**21


def test_chunks_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="K = 10 is not divisible by 4 chunks"):
        providers.linear(torch.ones(1, 10), torch.ones(1, 10), chunks=4)


def test_zero_rows():
    zeros = torch.zeros(2, 8)
    w = normal(3, 8)
    assert torch.equal(providers.linear(zeros, w), torch.zeros(2, 3))
    assert torch.equal(providers.linear(-zeros, w, chunks=4), torch.zeros(2, 3))
    assert torch.equal(providers.linear(w, zeros), torch.zeros(3, 2))
    assert torch.equal(providers.rms_norm(zeros, w[0], 1e-6), zeros * w[0])
    assert torch.equal(providers.silu_mul(zeros), torch.zeros(2, 4))
    assert torch.equal(
        providers.log_softmax(zeros), -torch.tensor(8.0).double().log().float().expand(2, 8)
    )
    weights, ids = providers.route(zeros, 2, renormalize=True)
    assert weights.tolist() == [[0.5, 0.5]] * 2
    assert ids.tolist() == [[0, 1]] * 2


def test_no_sum_is_minus_zero():
    """-0.0 and 0.0 compare equal but have other bits; which one comes out is BLAS's choice."""
    x = torch.tensor([[1.0, -1.0, 0.0, -0.0]])
    w = torch.tensor([[-0.0, 0.0, -1.0, 1.0], [1.0, 1.0, 5.0, -5.0]])
    for chunks in (1, 2, 4):
        assert not torch.signbit(providers.linear(x, w, chunks=chunks)).any()


def test_excluded_tokens():
    z = torch.full((3, 5), -torch.inf)
    z[0, 2] = 1.0
    z[1, :2] = 0.0
    found = providers.log_softmax(z)
    assert found[0].tolist() == [-torch.inf, -torch.inf, 0.0, -torch.inf, -torch.inf]
    half = torch.tensor(0.5).log().item()
    assert found[1].tolist() == [half, half, -torch.inf, -torch.inf, -torch.inf]
    assert found[2].isnan().all()  # a distribution over nothing


def test_no_tokens():
    empty = torch.zeros(0, 8, dtype=torch.bfloat16)
    w = normal(4, 8).bfloat16()
    assert providers.linear(empty, w).shape == (0, 4)
    assert providers.linear(empty, w, chunks=4).dtype == torch.float32
    assert providers.rms_norm(empty, w[0], 1e-6).dtype == torch.bfloat16
    assert providers.add_residual(empty, empty).shape == (0, 8)
    assert providers.silu_mul(empty).shape == (0, 4)
    assert providers.log_softmax(empty).shape == (0, 8)
    assert providers.selected_token_logprobs(empty, torch.zeros(0, dtype=torch.long)).shape == (0,)
    weights, ids = providers.route(empty, 2, renormalize=True)
    assert (weights.shape, ids.shape, ids.dtype) == ((0, 2), (0, 2), torch.int64)
    positions = torch.zeros(0, dtype=torch.long)
    rotated = providers.rotate(empty.view(0, 2, 4), positions, base=1e4, max_position=8)
    assert rotated.shape == (0, 2, 4)
    parts = providers.experts_chunks(
        empty, ids, weights, normal(3, 8, 8).bfloat16(), normal(3, 8, 4).bfloat16(), chunks=2
    )
    assert (parts.shape, parts.dtype) == ((2, 0, 8), torch.float32)
    for batch, tokens in ((1, 0), (0, 3)):
        kv = torch.zeros(batch, 5, 1, 4)
        allowed = torch.ones(batch, tokens, 5, dtype=torch.bool)
        found = providers.attention(torch.zeros(batch, tokens, 2, 4), kv, kv, allowed, scale=0.5)
        assert found.shape == (batch, tokens, 2, 4)


def test_positions_beyond_the_table_are_refused():
    with pytest.raises(IndexError, match="index 8 is out of bounds"):
        providers.rotate(torch.zeros(1, 1, 4), torch.tensor([8]), base=1e4, max_position=8)


def test_a_hot_expert_and_an_idle_one():
    """All tokens on two of eight experts, and one token alone: the same rows."""
    x, w13, w2 = normal(40, 16), normal(8, 24, 16, seed=1), normal(8, 16, 12, seed=2)
    ids = torch.tensor([[7, 2]]).repeat(40, 1)
    ids[13] = torch.tensor([0, 7])
    weights = torch.rand(40, 2, generator=torch.Generator().manual_seed(3))
    together = providers.experts_chunks(x, ids, weights, w13, w2, chunks=4)
    for row in (0, 13, 39):
        pick = slice(row, row + 1)
        alone = providers.experts_chunks(x[pick], ids[pick], weights[pick], w13, w2, chunks=4)
        assert torch.equal(together[:, pick], alone)
    swapped = providers.experts_chunks(x, ids.flip(-1), weights.flip(-1), w13, w2, chunks=4)
    assert torch.equal(together, swapped)  # the order in which the router lists them is no matter


def test_importing_a_provider_changes_no_setting_of_torch():
    assert torch.get_default_dtype() == torch.float32
    assert not torch.are_deterministic_algorithms_enabled()
