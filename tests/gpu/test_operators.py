"""CUDA operators: a row's bits depend on that row alone, equal vLLM's, and the gradient is true."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from patchkit.providers import cuda  # noqa: E402
from patchkit.providers.cuda import sums  # noqa: E402
from patchkit.providers.cuda.attention import attention_forward  # noqa: E402
from patchkit.providers.cuda.experts import _combine, expert_outputs, experts_forward  # noqa: E402
from patchkit.providers.cuda.linear import Tile, linear_forward  # noqa: E402
from patchkit.providers.cuda.router import route_forward  # noqa: E402

TP1 = cuda.RolloutTopology()
CUTS = [1, 2, 3, 16, 31, 64, 65, 129]


def draw(device: str, *shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (scale * torch.randn(shape, generator=generator)).to(torch.bfloat16).to(device)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert torch.isfinite(found).all()
    found, expected = found.double().cpu(), expected.double().cpu()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def gradients(
    output: torch.Tensor, inputs: list[torch.Tensor], grad: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(output, inputs, grad.to(output.dtype))


def leaf(x: torch.Tensor, dtype: Any = None) -> torch.Tensor:
    return x.detach().to(dtype or x.dtype).clone().requires_grad_()


# --- linear -------------------------------------------------------------------


@pytest.mark.parametrize("rows", CUTS)
def test_linear_rows_do_not_see_each_other(device: str, rows: int) -> None:
    x, w = draw(device, 160, 256), draw(device, 192, 256)
    whole = linear_forward(x, w)
    assert torch.equal(linear_forward(x[:rows], w), whole[:rows])
    assert torch.equal(linear_forward(x[160 - rows :], w), whole[160 - rows :])


@pytest.mark.parametrize(
    "tile",
    [
        Tile(16, 32, 128, 1, 4, 4),
        Tile(64, 64, 64, 1, 4, 4),
        Tile(64, 128, 64, 8, 4, 4),
        Tile(128, 256, 64, 8, 8, 3),
        Tile(128, 128, 32, 8, 8, 3),
    ],
)
@pytest.mark.parametrize("slices", [1, 2])
def test_linear_tile_is_not_visible(device: str, tile: Tile, slices: int) -> None:
    x, w = draw(device, 130, 512), draw(device, 320, 512)
    assert torch.equal(
        linear_forward(x, w, slices=slices, tile=tile), linear_forward(x, w, slices=slices)
    )


@pytest.mark.parametrize("rows", [1, 17, 64, 300])
def test_linear_equals_the_engines(device: str, rows: int) -> None:
    from vllm.model_executor.layers.batch_invariant import matmul_persistent

    x, w = draw(device, rows, 2048), draw(device, 512, 2048)
    assert torch.equal(linear_forward(x, w), matmul_persistent(x, w.t()))


@pytest.mark.parametrize("rows", [5, 70])
def test_sliced_linear_is_two_ranks_and_an_all_reduce(device: str, rows: int) -> None:
    x, w = draw(device, rows, 512), draw(device, 192, 512)
    ranks = [linear_forward(x[:, c].contiguous(), w[:, c].contiguous()) for c in
             (slice(0, 256), slice(256, 512))]  # fmt: skip
    assert torch.equal(linear_forward(x, w, slices=2), ranks[0] + ranks[1])


def test_linear_refuses_what_it_cannot_slice(device: str) -> None:
    with pytest.raises(ValueError, match="K = 192 in 2 slices"):
        linear_forward(draw(device, 4, 192), draw(device, 8, 192), slices=2)


@pytest.mark.parametrize("slices", [1, 2])
def test_linear_gradient(device: str, slices: int) -> None:
    x, w, grad = draw(device, 33, 256), draw(device, 64, 256), draw(device, 33, 64)
    a = [leaf(x), leaf(w)]
    b = [leaf(x, torch.float64), leaf(w, torch.float64)]
    output, exact = cuda.linear(a[0], a[1], slices=slices), b[0] @ b[1].t()
    assert relative_error(output.detach(), exact.detach()) < 5e-3
    found, expected = gradients(output, a, grad), gradients(exact, b, grad)
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < 5e-3


# --- norm ---------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(37, 2048), (37, 4, 128), (1, 2048), (3, 32, 128), (9, 1, 128)])
def test_norm_equals_the_engines(device: str, shape: tuple[int, ...]) -> None:
    from vllm.model_executor.layers.batch_invariant import rms_norm_batch_invariant

    x, w = draw(device, *shape, scale=3.0), draw(device, shape[-1])
    assert torch.equal(cuda.rms_norm_forward(x, w, 1e-6), rms_norm_batch_invariant(x, w, 1e-6))


def test_norm_of_strided_heads(device: str) -> None:
    qkv, w = draw(device, 29, 5120), draw(device, 128)
    keys = qkv[:, 4096:4608].view(29, 4, 128)
    assert torch.equal(
        cuda.rms_norm_forward(keys, w, 1e-6), cuda.rms_norm_forward(keys.contiguous(), w, 1e-6)
    )


@pytest.mark.parametrize("rows", CUTS)
@pytest.mark.parametrize("tail", [(2048,), (4, 128)])
def test_norm_rows_do_not_see_each_other(device: str, rows: int, tail: tuple[int, ...]) -> None:
    x, w = draw(device, 160, *tail), draw(device, tail[-1])
    whole = cuda.rms_norm_forward(x, w, 1e-6)
    assert torch.equal(cuda.rms_norm_forward(x[160 - rows :], w, 1e-6), whole[160 - rows :])


def test_add_norm_is_a_rounded_add_and_a_norm(device: str) -> None:
    x, r, w = draw(device, 41, 2048), draw(device, 41, 2048, seed=1), draw(device, 2048)
    normed, summed = cuda.add_rms_norm_forward(x, r, w, 1e-6)
    assert torch.equal(summed, x + r)
    assert torch.equal(normed, cuda.rms_norm_forward(x + r, w, 1e-6))


@pytest.mark.parametrize("shape", [(19, 2048), (19, 4, 128)])
def test_norm_gradient(device: str, shape: tuple[int, ...]) -> None:
    x, w, grad = draw(device, *shape), 1 + draw(device, shape[-1], scale=0.2), draw(device, *shape)
    a, b = [leaf(x), leaf(w)], [leaf(x, torch.float64), leaf(w, torch.float64)]
    expected = b[0] * torch.rsqrt(b[0].pow(2).mean(-1, keepdim=True) + 1e-6) * b[1]
    output = cuda.rms_norm(a[0], a[1], 1e-6)
    assert relative_error(output.detach(), expected.detach()) < 5e-3
    found = gradients(output, a, grad)
    for one, other in zip(found, gradients(expected, b, grad), strict=True):
        assert relative_error(one, other) < 5e-3


# --- rotation -----------------------------------------------------------------


def test_rotation_equals_the_engines(device: str) -> None:
    import vllm._custom_ops as ops

    table = cuda.cos_sin_table(128, 1e6, 4096, torch.device(device))
    position = (torch.arange(50, device=device) * 71) % 4096
    q, k = draw(device, 50, 32, 128), draw(device, 50, 4, 128)
    a, b = q.reshape(50, -1).clone(), k.reshape(50, -1).clone()
    ops.rotary_embedding(position, a, b, 128, table, True)
    assert torch.equal(cuda.rotate(q, position, table).view(50, -1), a)
    assert torch.equal(cuda.rotate(k, position, table).view(50, -1), b)


def test_rotation_gradient(device: str) -> None:
    table = cuda.cos_sin_table(64, 1e4, 512, torch.device(device))
    position = torch.tensor([0, 3, 511, 77, 78], device=device)
    x, grad = draw(device, 5, 3, 64), draw(device, 5, 3, 64)
    a, b = leaf(x), leaf(x, torch.float64)
    cos, sin = table[position].double()[:, None].chunk(2, -1)
    first, second = b.chunk(2, -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    (found,) = gradients(cuda.rotate(a, position, table), [a], grad)
    (expected,) = gradients(turned, [b], grad)
    assert relative_error(found, expected) < 5e-3


# --- router -------------------------------------------------------------------


@pytest.mark.parametrize("rows", CUTS)
def test_router_rows_do_not_see_each_other_ties_included(device: str, rows: int) -> None:
    logits = draw(device, 160, 128)
    logits[:, 40:60] = logits.amax()  # twenty experts tie for eight places
    weights, chosen = route_forward(logits, 8, True)
    some_weights, some = route_forward(logits[160 - rows :].contiguous(), 8, True)
    assert torch.equal(some, chosen[160 - rows :])
    assert torch.equal(some_weights, weights[160 - rows :])
    assert torch.equal(chosen, chosen[:1].expand_as(chosen)), "ties depend on the row"


@pytest.mark.parametrize("renormalize", [True, False])
def test_router_gradient(device: str, renormalize: bool) -> None:
    logits, grad = draw(device, 21, 128), draw(device, 21, 8).float()
    a, b = leaf(logits), leaf(logits, torch.float64)
    weights, chosen = cuda.route(a, 8, renormalize=renormalize)
    expected = torch.softmax(b, -1).gather(1, chosen.long())
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    assert relative_error(weights.detach(), expected.detach()) < 1e-5
    (found,), (wanted,) = gradients(weights, [a], grad), gradients(expected, [b], grad)
    assert relative_error(found, wanted) < 5e-3


# --- experts ------------------------------------------------------------------


def expert_layer(device: str, tokens: int, *, count: int = 16, hidden: int = 128, width: int = 128):
    x = draw(device, tokens, hidden)
    w13 = draw(device, count, 2 * width, hidden, scale=0.1)
    w2 = draw(device, count, hidden, width, scale=0.1)
    weights, chosen = route_forward(draw(device, tokens, count), 4, True)
    return x, chosen, weights, w13, w2


@pytest.mark.parametrize("rows", [1, 2, 33, 64, 129])
@pytest.mark.parametrize(
    "topology", [TP1, cuda.RolloutTopology(tensor_parallel=2),
                 cuda.RolloutTopology(tensor_parallel=2, expert_parallel=True),
                 cuda.AnyTopology(slices=2), cuda.AnyTopology(slices=4)],
)  # fmt: skip
def test_experts_rows_do_not_see_each_other(
    device: str, rows: int, topology: cuda.RolloutTopology
) -> None:
    x, chosen, weights, w13, w2 = expert_layer(device, 160)
    whole, _ = experts_forward(x, chosen, weights, w13, w2, topology)
    cut = slice(160 - rows, None)
    part, _ = experts_forward(x[cut], chosen[cut], weights[cut], w13, w2, topology)
    assert torch.equal(part, whole[cut])


@pytest.mark.parametrize("m", [16, 64, 128])
@pytest.mark.parametrize("n", [64, 128])
@pytest.mark.parametrize("k", [32, 64, 128])
def test_expert_tile_is_not_visible(device: str, m: int, n: int, k: int) -> None:
    layer = expert_layer(device, 70)
    tile = Tile(m, n, k, 8, 4, 3)
    for topology in (TP1, cuda.AnyTopology(slices=4)):
        other, _ = experts_forward(*layer, topology, tile=tile)
        assert torch.equal(experts_forward(*layer, topology)[0], other)


def test_combination_equals_the_engines(device: str) -> None:
    import vllm._custom_ops as ops

    each = draw(device, 50, 8, 2048)
    expected = torch.empty(50, 2048, dtype=torch.bfloat16, device=device)
    ops.moe_sum(each, expected)
    ids = torch.zeros(50, 8, dtype=torch.int32, device=device)
    assert torch.equal(_combine(each.view(1, 400, 2048), ids, None, 1, 1), expected)


def test_sliced_experts_are_two_ranks_and_an_all_reduce(device: str) -> None:
    x, chosen, weights, w13, w2 = expert_layer(device, 40)
    half = w2.shape[2] // 2
    ranks = []
    for rank in (0, 1):
        cut = slice(rank * half, (rank + 1) * half)
        gate, up = w13.chunk(2, dim=1)
        own = torch.cat([gate[:, cut], up[:, cut]], dim=1).contiguous()
        ranks.append(
            experts_forward(x, chosen, weights, own, w2[:, :, cut].contiguous(),
                                           TP1)[0]
        )  # fmt: skip
    both = experts_forward(x, chosen, weights, w13, w2, cuda.RolloutTopology(tensor_parallel=2))[0]
    assert torch.equal(both, ranks[0] + ranks[1])


def test_expert_blocks_are_two_ranks_and_an_all_reduce(device: str) -> None:
    x, chosen, weights, w13, w2 = expert_layer(device, 40)
    total = torch.zeros_like(x)
    for rank in (0, 1):
        elsewhere = (chosen // 8) != rank
        own = experts_forward(x, chosen, weights.masked_fill(elsewhere, 0.0), w13, w2, TP1)[0]
        total = own if rank == 0 else total + own
    both = experts_forward(
        x, chosen, weights, w13, w2,
        cuda.RolloutTopology(tensor_parallel=2, expert_parallel=True),
    )[0]  # fmt: skip
    assert torch.equal(both, total)


@pytest.mark.parametrize("tokens", [1, 40, 301])
@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize(("slices", "ranks"), [(2, 2), (4, 2), (4, 4)])
def test_exact_experts_do_not_show_their_ranks(
    device: str, tokens: int, expert_parallel: bool, slices: int, ranks: int
) -> None:
    x, chosen, weights, w13, w2 = expert_layer(device, tokens)
    topology = cuda.AnyTopology(slices=slices)
    whole = experts_forward(x, chosen, weights, w13, w2, topology)[0]
    width, gate_and_up, held = w2.shape[2] // ranks, w13.chunk(2, dim=1), 16 // ranks
    parts = []
    for rank in range(ranks):
        if expert_parallel:
            cut = slice(rank * held, (rank + 1) * held)
            local = torch.full((16,), -1, dtype=torch.int32, device=device)
            local[cut] = torch.arange(held, dtype=torch.int32, device=device)
            each, _ = expert_outputs(
                x, chosen, weights, w13[cut], w2[cut], slices=slices, experts=16, expert_map=local
            )
        else:
            cut = slice(rank * width, (rank + 1) * width)
            own = torch.cat([t[:, cut] for t in gate_and_up], dim=1).contiguous()
            each, _ = expert_outputs(
                x, chosen, weights, own, w2[:, :, cut].contiguous(), slices=slices // ranks
            )
        parts.append(sums.partial_sum(each))
    assert torch.equal(sums.rounded(torch.stack(parts).sum(0)), whole)
    assert torch.equal(sums.rounded(torch.stack(parts[::-1]).sum(0)), whole)


@pytest.mark.parametrize("tokens", [1, 33, 256, 2000])
def test_grouped_products_equal_the_engines(device: str, tokens: int) -> None:
    import triton.language as tl
    from vllm.model_executor.layers.fused_moe.fused_moe import invoke_fused_moe_triton_kernel
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

    x, chosen, weights, w13, w2 = expert_layer(device, tokens, hidden=2048, width=768)
    each, gate_up = expert_outputs(x, chosen, weights, w13, w2, slices=1)
    tile = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8}
    aligned = moe_align_block_size(chosen, 64, 16, None)
    plain = dict.fromkeys(
        ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant"),
        False,
    )
    up, down = torch.empty(tokens, 4, 1536).to(x), torch.empty(tokens, 4, 2048).to(x)
    invoke_fused_moe_triton_kernel(
        x, w13, up, None, None, None, *aligned, False, 4, tile, compute_type=tl.bfloat16, **plain
    )
    assert torch.equal(gate_up, up.view(-1, 1536))
    activated = torch.empty(tokens * 4, 768).to(x)
    torch.ops._C.silu_and_mul(activated, gate_up)
    invoke_fused_moe_triton_kernel(
        activated, w2, down, None, None, weights, *aligned, True, 1, tile,
        compute_type=tl.bfloat16, **plain,
    )  # fmt: skip
    assert torch.equal(each[0], down)


@pytest.mark.parametrize("topology", [TP1, cuda.AnyTopology(slices=2)])
@pytest.mark.parametrize("tokens", [7, 90])
def test_experts_gradient(
    device: str, tokens: int, topology: cuda.RolloutTopology | cuda.AnyTopology
) -> None:
    x, chosen, weights, w13, w2 = expert_layer(device, tokens)
    grad = draw(device, *x.shape, seed=5)
    a = [leaf(x), leaf(weights), leaf(w13), leaf(w2)]
    b = [leaf(t, torch.float64) for t in (x, weights, w13, w2)]
    picked = chosen.long()
    gate, up = torch.einsum("th,tkfh->tkf", b[0], b[2][picked]).chunk(2, -1)
    each = torch.einsum("tkf,tkhf->tkh", torch.nn.functional.silu(gate) * up, b[3][picked])
    expected = (each * b[1][..., None]).sum(1)
    output = cuda.experts(a[0], chosen, a[1], a[2], a[3], topology)
    assert relative_error(output.detach(), expected.detach()) < 1e-2
    for one, other in zip(gradients(output, a, grad), gradients(expected, b, grad), strict=True):
        assert relative_error(one, other) < 2e-2


# --- attention ----------------------------------------------------------------

LENGTHS = [5, 1, 130, 64]


def packed(device: str, lengths: list[int] = LENGTHS):
    total = sum(lengths)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)
    q, k, v = (draw(device, total, h, 128, seed=h + i) for i, h in enumerate((8, 2, 2)))
    return q, k, v, cuda.Packing(starts, max(lengths))


def test_attention_sequences_do_not_see_each_other(device: str) -> None:
    q, k, v, packing = packed(device)
    whole, _ = attention_forward(q, k, v, packing, 128**-0.5)
    begin = 0
    for length in LENGTHS:
        cut = slice(begin, begin + length)
        starts = torch.tensor([0, length], dtype=torch.int32, device=device)
        alone, _ = attention_forward(
            q[cut], k[cut], v[cut], cuda.Packing(starts, length), 128**-0.5
        )
        assert torch.equal(alone, whole[cut])
        begin += length


def test_attention_gradient(device: str) -> None:
    q, k, v, packing = packed(device)
    grad = draw(device, *q.shape, seed=9)
    a, b = [leaf(t) for t in (q, k, v)], [leaf(t, torch.float64) for t in (q, k, v)]
    outputs, begin = [], 0
    for length in LENGTHS:
        cut = slice(begin, begin + length)
        begin += length
        qs, ks, vs = (t[cut].transpose(0, 1) for t in b)
        ks, vs = (t.repeat_interleave(4, dim=0) for t in (ks, vs))
        scores = qs @ ks.transpose(1, 2) * 128**-0.5
        hidden = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        outputs.append((weights @ vs).transpose(0, 1))
    expected = torch.cat(outputs)
    output = cuda.attention(*a, packing, scale=128**-0.5)
    assert relative_error(output.detach(), expected.detach()) < 1e-2
    for one, other in zip(gradients(output, a, grad), gradients(expected, b, grad), strict=True):
        assert relative_error(one, other) < 2e-2


# --- log-probabilities --------------------------------------------------------


@pytest.mark.parametrize("width", [1000, 151936])
def test_selected_logprobs_equal_the_engines(device: str, width: int) -> None:
    from vllm.model_executor.layers.batch_invariant import log_softmax

    logits = draw(device, 9, width, scale=4.0)
    tokens = torch.arange(9, device=device) * 97
    expected = log_softmax(logits.float()).gather(1, tokens[:, None])[:, 0]
    assert torch.equal(cuda.selected_token_logprobs(logits, tokens), expected)


def test_selected_logprobs_gradient(device: str) -> None:
    logits, grad = draw(device, 11, 1000, scale=3.0), draw(device, 11).float()
    tokens = torch.arange(11, device=device) * 53
    a, b = leaf(logits), leaf(logits, torch.float64)
    expected = torch.log_softmax(b, -1).gather(1, tokens[:, None])[:, 0]
    (found,) = gradients(cuda.selected_token_logprobs(a, tokens), [a], grad)
    (wanted,) = gradients(expected, [b], grad)
    assert relative_error(found, wanted) < 5e-3
