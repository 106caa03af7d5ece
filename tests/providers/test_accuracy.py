"""Against float64 and exact arithmetic, within stated bounds."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from patchkit import providers  # noqa: E402
from patchkit.providers.exact_sum import magnitude, preround  # noqa: E402

pytestmark = pytest.mark.stack

ULP32 = 2.0**-23
ULP16 = 2.0**-7  # bf16


def normal(*size: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def within(found, reference, *, relative=0.0, absolute=0.0) -> None:
    error = (found.double() - reference.double()).abs()
    bound = relative * reference.double().abs() + absolute
    worst = (error - bound).max()
    assert bool((error <= bound).all()), f"exceeds its bound by {float(worst):.3g}"


# --- sums ------------------------------------------------------------------------

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(floats, min_size=1, max_size=60), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_exact_sum_is_exact_in_any_order(values, random):
    x = torch.tensor(values, dtype=torch.float32)
    rounded = preround(x, 32).tolist()
    expected = math.fsum(rounded)
    for _ in range(3):
        order = list(range(len(values)))
        random.shuffle(order)
        assert providers.exact_sum(x[order]).item() == expected
        in_turn = 0.0
        for i in order:
            in_turn += rounded[i]
        assert in_turn == expected
    largest = max(map(abs, values))
    assert abs(expected - math.fsum(values)) <= len(values) * largest * 2.0**-32


@given(st.lists(floats, min_size=1, max_size=8))
@settings(max_examples=150, deadline=None)
def test_magnitude_is_a_power_of_two_just_above(values):
    largest = max(map(abs, torch.tensor(values).tolist()))
    power = magnitude(torch.tensor(values)).item()
    mantissa, _ = math.frexp(power)
    assert mantissa == 0.5
    if largest:
        assert largest < power <= 2 * largest


@pytest.mark.parametrize("exponent", [-149, -148, -127, -126, -1, 0, 1, 126, 127])
def test_magnitude_at_the_ends_of_float32(exponent):
    x = torch.tensor([2.0**exponent], dtype=torch.float64).float()
    assert magnitude(x).item() == 2.0 ** (exponent + 1)
    assert preround(x, 20).item() == 2.0**exponent


@pytest.mark.parametrize("damage", [math.nan, math.inf, -math.inf])
def test_a_damaged_row_is_nan_and_its_neighbours_are_not(damage):
    x = normal(3, 5)
    whole = preround(x, 20)
    x[1, 2] = damage
    found = preround(x, 20)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], whole[[0, 2]])


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 5, 8])
def test_the_tree_adds_neighbours_first(chunks):
    parts = normal(chunks, 7)

    def tree(rows):
        if len(rows) == 1:
            return rows[0]
        paired = [rows[i] + rows[i + 1] for i in range(0, len(rows) - 1, 2)]
        return tree(paired + ([rows[-1]] if len(rows) % 2 else []))

    assert torch.equal(providers.pairwise_tree(parts), tree(list(parts)))


# --- linear ------------------------------------------------------------------------


def test_linear_of_bf16_is_correctly_rounded():
    """Within 2**12 of the row's largest element nothing is pre-rounded away at all."""
    x = normal(5, 64, dtype=torch.bfloat16).clamp(-4, 4)
    w = normal(9, 64, seed=1, dtype=torch.bfloat16).clamp(-4, 4)
    x[x.abs() < 2.0**-4], w[w.abs() < 2.0**-4] = 0.0, 0.0
    found = providers.linear(x, w)
    for t in range(5):
        for n in range(9):
            products = (x[t].double() * w[n].double()).tolist()
            exact = torch.tensor(math.fsum(products), dtype=torch.float64).float()
            assert torch.equal(found[t, n], exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("width", [64, 768, 2048])
def test_linear_within_its_bound(dtype, chunks, width):
    x, w = normal(7, width, dtype=dtype), normal(33, width, seed=1, dtype=dtype) * width**-0.5
    x[:, 0] = 3000.0  # one large element costs the small ones precision: this much at most
    reference = x.double() @ w.double().t()
    scale = magnitude(x) * magnitude(w).t()
    found = providers.linear(x, w, chunks=chunks)
    assert found.dtype == torch.float32
    within(found, reference, relative=ULP32 * chunks, absolute=width * scale.max() * 2.0**-20)


def test_linear_at_its_limit_is_still_exact():
    """8,192 products of the largest operands there are."""
    top = 1.0 - 2.0**-20
    x = torch.full((2, 8192), top)
    w = torch.full((3, 8192), top)
    w[1, ::2] *= -1.0
    w[2, 0] = 2.0**-20
    products = [[top * top] * 8192, [0.0], [top * top] * 8191 + [top * 2.0**-20]]
    exact = torch.tensor([math.fsum(p) for p in products], dtype=torch.float64).float()
    assert torch.equal(providers.linear(x, w), exact.expand(2, 3))


# --- the others ------------------------------------------------------------------------


@pytest.mark.parametrize("width", [32, 128, 2048])
def test_rms_norm(width):
    for dtype, relative in ((torch.float32, 2 * ULP32), (torch.bfloat16, ULP16)):
        x, w = normal(9, width, dtype=dtype) * 5, normal(width, seed=1, dtype=dtype)
        y = x.double()
        reference = y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w.double()
        # Pre-rounding moves every element by up to 2**-21 of the row's magnitude.
        moved = magnitude(x) * 2.0**-21 * width**0.5 / y.norm(dim=-1, keepdim=True)
        within(providers.rms_norm(x, w, 1e-6), reference, relative=relative + moved)


def test_add_residual_rounds_once():
    x, y = normal(99, dtype=torch.bfloat16), normal(99, seed=1, dtype=torch.bfloat16) * 1e-2
    assert torch.equal(providers.add_residual(x, y), (x.double() + y.double()).float().bfloat16())


def test_silu_mul():
    x = normal(9, 200) * 8
    gate, up = x.double().chunk(2, -1)
    within(providers.silu_mul(x), gate.sigmoid() * gate * up, relative=4 * ULP32)


def test_rotate_is_what_transformers_computes():
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe import modeling_qwen3_moe as hf

    config = Qwen3MoeConfig(
        hidden_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=128,
        max_position_embeddings=4096, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    positions = torch.tensor([0, 1, 17, 300, 4095])
    x = normal(5, 4, 128)
    cos, sin = hf.Qwen3MoeRotaryEmbedding(config)(x[None], positions[None])
    reference, _ = hf.apply_rotary_pos_emb(
        x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin
    )
    found = providers.rotate(x, positions, base=1e6, max_position=4096)
    # The same float32 angles up to their last bit, which at position 4095 is 2**-12.
    within(found, reference[0].transpose(0, 1), absolute=2.0**-11 * float(x.abs().max()))
    within(found[:3], reference[0].transpose(0, 1)[:3], absolute=2.0**-19)
    lengths = found.double().norm(dim=-1)
    within(lengths, x.double().norm(dim=-1), relative=8 * ULP32)


@pytest.mark.parametrize("renormalize", [True, False])
def test_route(renormalize):
    logits = normal(64, 128) * 3
    weights, ids = providers.route(logits, 8, renormalize=renormalize)
    probability = torch.softmax(logits.double(), -1)
    reference, expected = probability.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(ids, expected[:, :8])
    reference = reference[:, :8]
    if renormalize:
        reference = reference / reference.sum(-1, keepdim=True)
    within(weights, reference, relative=24 * ULP32)


@pytest.mark.parametrize("size", [3, 512, 151_936])
def test_log_softmax(size):
    logits = normal(3, size) * 4
    logits[1, 1] = -torch.inf
    reference = torch.log_softmax(logits.double(), -1)
    found = providers.log_softmax(logits)
    assert found[1, 1] == -torch.inf
    finite = torch.isfinite(reference)
    within(found[finite], reference[finite], relative=2 * ULP32, absolute=2 * ULP32)
    tokens = torch.tensor([0, 2, 1])
    assert torch.equal(
        providers.selected_token_logprobs(logits, tokens), found[torch.arange(3), tokens]
    )


@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 2, 32), (2, 2, 16), (8, 1, 128)])
def test_attention(heads, groups, size):
    for dtype, relative in ((torch.float32, ULP32), (torch.bfloat16, ULP16)):
        q = normal(2, 9, heads, size, dtype=dtype)
        k = normal(2, 40, groups, size, seed=1, dtype=dtype)
        v = normal(2, 40, groups, size, seed=2, dtype=dtype)
        allowed = torch.ones(2, 9, 40, dtype=torch.bool).tril(31)
        allowed[1, :, 5:20] = False
        found = providers.attention(q, k, v, allowed, scale=size**-0.5)
        wide = [x.double().repeat_interleave(heads // groups, 2) for x in (k, v)]
        scores = torch.einsum("bthd,blhd->bhtl", q.double(), wide[0]) * size**-0.5
        weights = scores.masked_fill(~allowed[:, None], -torch.inf).softmax(-1)
        reference = torch.einsum("bhtl,blhd->bthd", weights, wide[1])
        # Values keep 15 bits below the largest element of their key.
        within(found, reference, relative=relative, absolute=2.0**-15 * float(v.abs().max()))


def test_a_zero_value_takes_no_precision_from_the_others():
    q, k = torch.zeros(1, 1, 1, 4), torch.zeros(1, 2, 1, 4)
    v = torch.zeros(1, 2, 1, 4)
    v[0, 1] = torch.tensor([3e-9, -2e-9, 1e-9, 0.0])
    allowed = torch.ones(1, 1, 2, dtype=torch.bool)
    found = providers.attention(q, k, v, allowed, scale=0.5)
    within(found[0, 0, 0], v[0, 1, 0] / 2, absolute=3e-9 * 2.0**-15)


def test_experts():
    x, w13 = normal(11, 64), normal(6, 48, 64, seed=1) * 0.1
    w2 = normal(6, 64, 24, seed=2) * 0.2
    weights, ids = providers.route(normal(11, 6, seed=3), 3, renormalize=True)
    found = providers.pairwise_tree(providers.experts_chunks(x, ids, weights, w13, w2, chunks=4))
    reference = torch.zeros(11, 64, dtype=torch.float64)
    for t in range(11):
        for expert, weight in zip(ids[t].tolist(), weights[t].double(), strict=True):
            gate, up = (w13[expert].double() @ x[t].double()).chunk(2)
            reference[t] += weight * (w2[expert].double() @ (gate * gate.sigmoid() * up))
    within(found, reference, relative=16 * ULP32, absolute=32 * ULP32)


# --- what the providers take on trust -----------------------------------------------


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (torch.exp, torch.float32),
        (torch.cos, torch.float32),
        (torch.sin, torch.float32),
        (torch.log, torch.float64),
        (torch.sqrt, torch.float64),
        (torch.reciprocal, torch.float64),
    ],
)
def test_elementwise_functions_do_not_depend_on_where_a_value_stands(function, dtype):
    """Vector and scalar code of one library may round differently; here they must not."""
    x = torch.rand(1 << 15, generator=torch.Generator().manual_seed(0)).to(dtype) * 40
    x = -x if function is torch.exp else x + 1e-3
    whole = function(x)
    for offset in range(33):
        for length in (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 100, 1000):
            span = slice(offset, offset + length)
            assert torch.equal(function(x[span]), whole[span])
            assert torch.equal(function(x[span].clone()), whole[span])
    assert torch.equal(function(x[::3]), whole[::3])
    one_by_one = torch.cat([function(x[i : i + 1].clone()) for i in range(2000)])
    assert torch.equal(one_by_one, whole[:2000])
    torch.set_num_threads(2)
    assert torch.equal(function(x), whole)
