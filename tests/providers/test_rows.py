"""Every reference provider through the conformance kit, tiny and at real widths."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from patchkit.parity.conformance import examine  # noqa: E402
from patchkit.parity.conformance.cases import MANY_ROWS, ROW_COUNTS  # noqa: E402
from patchkit_adapters.glm4_moe import operators as glm4_moe  # noqa: E402
from patchkit_adapters.qwen3 import operators as qwen3  # noqa: E402
from patchkit_adapters.qwen3_moe.operators import REAL, TINY, Operators  # noqa: E402

pytestmark = pytest.mark.stack

tiny = Operators(shape=TINY, row_counts=MANY_ROWS)
tiny32 = replace(tiny, dtype=torch.float32, row_counts=ROW_COUNTS)
real = Operators(shape=REAL, row_counts=ROW_COUNTS)
# Where one call at a real width costs a second, fewer rows and the checks that could differ.
few = replace(real, row_counts=(1, 2, 3, 7))
wide = replace(real, row_counts=(1, 2, 3, 7, 31, 32, 33))
WHAT_MATTERS = ("batch size", "alone", "neighbours", "tensor parallel")


def module(name: str):
    """A provider's module; the package's attribute of that name is its function."""
    return sys.modules[f"patchkit.providers.{name}"]


def passes(operator, only=()) -> None:
    report = examine(operator, only=only)
    report.raise_if_failed()
    assert sum(report.trials.values()) >= 3 * len(report.trials) - 2


TINY_OPERATORS = {
    "embedding": lambda ops: ops.embedding(),
    "rms_norm": lambda ops: ops.rms_norm(TINY.hidden),
    "rms_norm, odd width": lambda ops: ops.rms_norm(99),
    "rms_norm with residual": lambda ops: ops.rms_norm_with_residual(TINY.hidden),
    "linear": lambda ops: ops.linear("qkv", 256, 128),
    "linear, odd sizes": lambda ops: ops.linear("odd", 36, 77),
    "linear in 1 chunk": lambda ops: ops.row_parallel("output", 128, 128, 1),
    "linear in 2 chunks": lambda ops: ops.row_parallel("output", 128, 128, 2),
    "linear in 4 chunks": lambda ops: ops.row_parallel("output", 128, 128, 4),
    "lm_head": lambda ops: ops.linear("lm_head", TINY.vocabulary, TINY.hidden),
    "rotate": lambda ops: ops.rotate(),
    "attention": lambda ops: ops.attention(70),
    "paged attention": lambda ops: ops.paged_attention((70, 1, 33, 5)),
    "route": lambda ops: ops.route(),
    "experts": lambda ops: ops.experts(),
    "silu_mul": lambda ops: ops.silu_mul(TINY.moe_width),
    "log_softmax": lambda ops: ops.log_softmax(),
    "selected_token_logprobs": lambda ops: ops.selected_token_logprobs(),
}


@pytest.mark.parametrize("name", TINY_OPERATORS)
def test_tiny(name):
    passes(TINY_OPERATORS[name](tiny))


@pytest.mark.parametrize("name", TINY_OPERATORS)
def test_tiny_in_float32(name):
    passes(TINY_OPERATORS[name](tiny32))


# What the other models have beside these, at their own shapes.
glm_tiny = Operators(shape=glm4_moe.TINY, row_counts=MANY_ROWS)
glm_real = Operators(shape=glm4_moe.REAL, row_counts=(1, 2, 3, 33))
OTHERS = {
    "route_grouped": lambda: glm_tiny.route_grouped(),
    "route_grouped [E=128]": lambda: glm_real.route_grouped(),
    "linear with bias": lambda: glm_tiny.linear("qkv", 256, 128, bias=True),
    "rotate a part of each head": lambda: glm_tiny.rotate(),
    "rotate a part of each head, D=128": lambda: glm_real.rotate(),
    "dense down, 4 chunks of 64": lambda: glm_tiny.row_parallel("down", 128, 256),
}


@pytest.mark.parametrize("name", OTHERS)
def test_operators_of_other_models(name):
    passes(OTHERS[name]())


@pytest.mark.parametrize("adapter", [qwen3, glm4_moe], ids=["qwen3", "glm4_moe"])
def test_an_adapter_names_every_operator_of_its_forward_path(adapter):
    named = [operator.name.split(" [")[0] for operator in adapter.operators()]
    assert len(named) == len(set(named)) or named.count("rms_norm") == 2
    assert {"qkv linear", "rotate", "attention", "down linear", "silu_mul"} <= set(named)
    assert ("route_grouped" in named) == (adapter is glm4_moe)
    assert ("shared down linear" in named) == (adapter is glm4_moe)


def test_experts_one_by_one_and_side_by_side_have_the_same_bits(monkeypatch):
    """Two ways through the same products, chosen by size: never by bits."""
    operator = tiny.experts()
    monkeypatch.setattr(module("experts"), "_BATCHED_WEIGHTS", 0)
    one_by_one = operator.run(**operator.inputs, **operator.weights)
    monkeypatch.setattr(module("experts"), "_BATCHED_WEIGHTS", 1 << 30)
    monkeypatch.setattr(module("experts"), "_BATCHED_WASTE", 1 << 30)
    side_by_side = operator.run(**operator.inputs, **operator.weights)
    assert torch.equal(one_by_one, side_by_side)


@pytest.mark.parametrize(("block", "operator"), [
    (1, tiny.linear("odd", 36, 77)), (1000, tiny.row_parallel("output", 128, 128, 4)),
])  # fmt: skip
def test_blocks_of_the_weight_have_no_say(monkeypatch, block, operator):
    whole = operator.run(**operator.inputs, **operator.weights)
    monkeypatch.setattr(module("linear"), "_BLOCK_ELEMENTS", block)
    assert torch.equal(operator.run(**operator.inputs, **operator.weights), whole)


@pytest.mark.parametrize("block", [1, 5000])
def test_blocks_of_queries_have_no_say(monkeypatch, block):
    operator = tiny.attention(70)
    expected = operator.whole
    monkeypatch.setattr(module("attention"), "_BLOCK_ELEMENTS", block)
    assert torch.equal(tiny.attention(70).whole, expected)


# --- real widths -----------------------------------------------------------------

REAL_OPERATORS = {
    "linear, K=2048": lambda: real.linear("router", 128, 2048),
    "linear, K=768": lambda: real.linear("down", 512, 768),
    "linear, K=4096 in 4 chunks": lambda: real.row_parallel("output", 256, 4096),
    "rms_norm, K=2048": lambda: real.rms_norm(2048),
    "rms_norm with residual, K=2048": lambda: real.rms_norm_with_residual(2048),
    "rms_norm, head size 128": lambda: real.rms_norm(128),
    "rotate, head size 128": lambda: real.rotate(),
    "route, 8 of 128": lambda: real.route(),
    "experts, 8 of 128, narrow": lambda: replace(
        real, shape=replace(REAL, hidden=256, moe_width=96)
    ).experts(),
    "linear, K=4096 (Qwen3-8B)": lambda: wide.linear("gate and up", 512, 4096),
    "linear, K=12288 in 4 chunks (Qwen3-8B)": lambda: wide.row_parallel("down", 256, 12_288),
    "linear, K=10944 in 4 chunks (GLM-4.5-Air)": lambda: wide.row_parallel("down", 256, 10_944),
    "silu_mul, F=12288": lambda: wide.silu_mul(qwen3.REAL.dense_width),
    "silu_mul, F=768": lambda: real.silu_mul(REAL.moe_width),
    "log_softmax, V=151936": lambda: wide.log_softmax(),
    "selected_token_logprobs, V=151936": lambda: wide.selected_token_logprobs(),
    "embedding, V=151936": lambda: replace(wide, shape=replace(REAL, hidden=64)).embedding(),
    "attention, head size 128": lambda: real.attention(65),
    "paged attention, head size 128": lambda: real.paged_attention((65, 1, 34)),
}


@pytest.mark.parametrize("name", REAL_OPERATORS)
def test_real_width(name):
    passes(REAL_OPERATORS[name]())


def test_lm_head_over_the_whole_vocabulary():
    passes(few.linear("lm_head", REAL.vocabulary, 2048), only=["batch size", "tensor parallel"])


def test_experts_at_their_real_width():
    passes(few.experts(), only=WHAT_MATTERS)


def test_a_context_of_4096():
    """Decode, short chunks and the paged cache at the far end of a long prompt."""
    operator = replace(real, shape=replace(REAL, heads=8, kv_heads=1)).attention(4096)
    spans = [slice(4095, 4096), slice(4090, 4096), slice(2047, 2080), slice(0, 33)]
    wholes = [
        operator._span(slice(span.start - span.start % 64, span.stop), span.stop) for span in spans
    ]
    for span, whole in zip(spans, wholes, strict=True):
        found = operator._span(span, span.stop)
        assert torch.equal(found, whole[span.start % 64 :])
        for row in (span.start, span.stop - 1):
            assert torch.equal(
                operator._span(slice(row, row + 1), row + 1)[0], found[row - span.start]
            )


one_group = replace(real, shape=replace(REAL, heads=8, kv_heads=1))
many = replace(real, row_counts=MANY_ROWS)

# What is left out at the full length repeats it dozens of times, and is tried on shorter ones.
NIGHTLY = {
    "embedding": (lambda: wide.embedding(), ()),
    "experts": (lambda: wide.experts(), ()),
    "lm_head": (lambda: wide.linear("lm_head", REAL.vocabulary, REAL.hidden), ()),
    "linear": (lambda: many.linear("qkv", 5120, 2048), ()),
    "output": (lambda: many.row_parallel("output", 2048, 4096), ()),
    "attention over 1,031 tokens": (lambda: one_group.attention(1031), ()),
    "attention over 4,096 tokens": (
        lambda: one_group.attention(4096),
        ("prompt length", "one token", "chunked prefill", "threads"),
    ),
    "paged attention over 4,096 tokens": (
        lambda: one_group.paged_attention((4096, 1, 1031, 257)),
        ("block order", "cached prompt", "unused slots"),
    ),
}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NIGHTLY)
def test_everything_at_real_sizes(name):
    build, only = NIGHTLY[name]
    passes(build(), only=only)
