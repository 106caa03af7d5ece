"""Backward against float64 autograd of the plain formula."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from patchkit import providers  # noqa: E402

pytestmark = pytest.mark.stack


def normal(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def rms_norm64(x, w):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w


def silu_mul64(x):
    gate, up = x.chunk(2, -1)
    return gate * gate.sigmoid() * up


def rotate64(x):
    half = x.shape[-1] // 2
    cos, sin = (
        table[POSITIONS, None].to(x.dtype)
        for table in _tables(2 * half)
    )  # fmt: skip
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _tables(size):
    angle = torch.arange(64.0)[:, None] / 1e4 ** (torch.arange(0, size, 2) / size)
    return angle.cos(), angle.sin()


def attention64(q, k, v):
    wide = [x.repeat_interleave(2, 2) for x in (k, v)]
    scores = torch.einsum("bthd,blhd->bhtl", q, wide[0]) * 0.4
    weights = scores.masked_fill(~ALLOWED[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhtl,blhd->bthd", weights, wide[1])


def route64(logits):
    probability = logits.softmax(-1).sort(dim=-1, descending=True).values[:, :3]
    return probability / probability.sum(-1, keepdim=True)


def experts64(x, weights, w13, w2):
    rows = []
    for t in range(len(x)):
        total = 0.0
        for slot, expert in enumerate(IDS[t].tolist()):
            total = total + weights[t, slot] * (w2[expert] @ silu_mul64(w13[expert] @ x[t]))
        rows.append(total)
    return torch.stack(rows)


POSITIONS = torch.tensor([0, 5, 63])
ALLOWED = torch.ones(2, 5, 7, dtype=torch.bool).tril(2)
ALLOWED[1, :, 6] = False  # a key that nobody may look at
ALLOWED[1, 0] = False  # a query that may look at nothing
IDS = torch.tensor([[0, 3], [3, 1], [2, 0], [4, 3]])


def tree(parts):
    return providers.pairwise_tree(parts)


CASES = {
    "linear": (
        lambda x, w: providers.linear(x, w),
        lambda x, w: x @ w.t(),
        (normal(5, 24), normal(7, 24, seed=1)),
    ),
    "linear in 4 chunks": (
        lambda x, w: providers.linear(x, w, chunks=4),
        lambda x, w: x @ w.t(),
        (normal(3, 5, 24), normal(7, 24, seed=1)),
    ),
    "linear, 3 side by side": (
        lambda x, w: tree(providers.linear_chunks(x, w, 2)),
        lambda x, w: x @ w.transpose(1, 2),
        (normal(3, 5, 24), normal(3, 7, 24, seed=1)),
    ),
    "rms_norm": (
        lambda x, w: providers.rms_norm(x, w, 1e-6), rms_norm64,
        (normal(2, 5, 24), normal(24, seed=1)),
    ),
    "add_residual": (
        providers.add_residual, lambda x, y: x + y, (normal(5, 24), normal(5, 24, seed=1)),
    ),
    "silu_mul": (providers.silu_mul, silu_mul64, (normal(5, 24) * 3,)),
    "rotate": (
        lambda x: providers.rotate(x, POSITIONS, base=1e4, max_position=64), rotate64,
        (normal(3, 2, 16),),
    ),
    "attention": (
        lambda q, k, v: providers.attention(q, k, v, ALLOWED, scale=0.4), attention64,
        (normal(2, 5, 4, 8), normal(2, 7, 2, 8, seed=1), normal(2, 7, 2, 8, seed=2)),
    ),
    "route": (
        lambda x: providers.route(x, 3, renormalize=True)[0], route64, (normal(6, 9) * 2,),
    ),
    "experts": (
        lambda x, p, a, b: tree(providers.experts_chunks(x, IDS, p, a, b, chunks=2)), experts64,
        (normal(4, 16), normal(4, 2, seed=1), normal(5, 24, 16, seed=2), normal(5, 16, 12, seed=3)),
    ),
    "log_softmax": (
        providers.log_softmax, lambda z: torch.log_softmax(z, -1), (normal(4, 50) * 3,),
    ),
    "selected_token_logprobs": (
        lambda z: providers.selected_token_logprobs(z, torch.tensor([3, 0, 49, 7])),
        lambda z: torch.log_softmax(z, -1)[torch.arange(4), torch.tensor([3, 0, 49, 7])],
        (normal(4, 50) * 3,),
    ),
}  # fmt: skip


def gradients(function, inputs, dtype):
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    result = function(*leaves)
    upstream = normal(*result.shape, seed=9).to(result.dtype)
    return torch.autograd.grad(result, leaves, upstream)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
def test_gradients(name, dtype, tolerance):
    exact, plain, inputs = CASES[name]
    inputs = [x.to(dtype) for x in inputs]  # both sides start from the same rounded values
    found = gradients(exact, inputs, dtype)
    reference = gradients(plain, inputs, torch.float64)
    for mine, theirs, given in zip(found, reference, inputs, strict=True):
        assert mine.dtype == dtype
        assert mine.shape == given.shape
        assert bool(torch.isfinite(mine).all())
        error = (mine.double() - theirs).norm() / theirs.norm().clamp_min(1e-12)
        assert float(error) < tolerance


def test_only_the_gradients_asked_for():
    x, w = normal(3, 8).requires_grad_(), normal(4, 8, seed=1)
    providers.linear(x, w).sum().backward()
    assert w.grad is None
    torch.testing.assert_close(x.grad, w.sum(0).expand(3, 8))


def test_excluded_tokens_and_unseen_keys_have_zero_gradient():
    z = normal(2, 6)
    z[0, 3] = -torch.inf
    z.requires_grad_()
    providers.selected_token_logprobs(z, torch.tensor([1, 2])).sum().backward()
    assert z.grad[0, 3] == 0.0
    assert bool(torch.isfinite(z.grad).all())

    q, k, v = (normal(2, n, h, 8, seed=s) for n, h, s in ((5, 4, 0), (7, 2, 1), (7, 2, 2)))
    k[1, 6], v[1, 6] = torch.nan, torch.nan  # memory that nobody looks at
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found = torch.autograd.grad(providers.attention(*leaves, ALLOWED, scale=0.4).sum(), leaves)
    for gradient in found:
        assert bool(torch.isfinite(gradient).all())
    assert not found[0][1, 0].any()
    assert not found[1][1, 6].any()
    assert not found[2][1, 6].any()


def test_a_damaged_query_is_not_hidden_in_backward():
    q, k, v = (normal(2, n, h, 8, seed=s) for n, h, s in ((5, 4, 0), (7, 2, 1), (7, 2, 2)))
    q[0, 2] = torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found = torch.autograd.grad(providers.attention(*leaves, ALLOWED, scale=0.4).sum(), leaves)
    assert found[0][0, 2].isnan().all()
    assert not found[0][1].isnan().any()
    assert found[2][0].isnan().any()
    assert not found[2][1].isnan().any()


@pytest.mark.parametrize("name", ["linear", "rms_norm", "silu_mul", "log_softmax", "attention"])
def test_backward_of_no_rows(name):
    exact, _, inputs = CASES[name]
    if name == "attention":
        q, k, v = inputs
        leaves = [q[:, :0].clone(), k, v]
        exact = lambda q, k, v: providers.attention(q, k, v, ALLOWED[:, :0], scale=0.4)  # noqa: E731
    else:
        leaves = [inputs[0][:0], *inputs[1:]]
    leaves = [x.clone().requires_grad_() for x in leaves]
    found = torch.autograd.grad(exact(*leaves).sum(), leaves)
    assert [g.shape for g in found] == [x.shape for x in leaves]
    assert all(not g.any() for g in found)


def test_the_output_is_no_view_and_may_be_changed_in_place():
    """Trainers divide logits by a temperature in place."""
    x = torch.randn(2, 5, 64).bfloat16().requires_grad_()
    weight = torch.randn(16, 64).bfloat16().requires_grad_()
    logits = providers.linear(x, weight)
    assert not logits._is_view()
    logits.div_(2.0)
    logits.sum().backward()
    found = x.grad.clone()
    x.grad = None
    (providers.linear(x, weight) / 2.0).sum().backward()
    assert torch.equal(found, x.grad)
