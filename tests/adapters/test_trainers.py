"""The trainer side of the other adapters on real Hugging Face models, tiny ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import patchkit  # noqa: E402
from patchkit.bindings.claim import UncoveredLayerError  # noqa: E402
from patchkit_adapters.glm4_moe import tiny as glm4_moe  # noqa: E402
from patchkit_adapters.qwen3 import tiny as qwen3  # noqa: E402

pytestmark = pytest.mark.stack

PROMPTS = [list(range(3, 3 + n)) for n in (5, 17, 33)]

# Adapter and settings of the model that differ from the demo's.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3, other sizes": ("qwen3", {"head_dim": 48, "intermediate_size": 100, "vocab_size": 77}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe, as Air": (
        "glm4_moe",
        {"use_qk_norm": False, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
    ),
    "glm4_moe, no biases": (
        "glm4_moe",
        {"attention_bias": False, "n_shared_experts": 2},
    ),
}


def build(name: str, attention: str = "sdpa", **changes: Any) -> Any:
    adapter, settings = MODELS[name]
    shape = {"qwen3": qwen3.SHAPE, "glm4_moe": glm4_moe.SHAPE}[adapter]
    kind = {"qwen3": "Qwen3ForCausalLM", "glm4_moe": "Glm4MoeForCausalLM"}[adapter]
    model_class = getattr(transformers, kind)
    torch.manual_seed(1)
    config = model_class.config_class(
        **{**shape, **settings, **changes}, attn_implementation=attention
    )
    model = model_class(config).to(torch.bfloat16).train()
    for name_, buffer in model.named_buffers():
        if name_.endswith("e_score_correction_bias"):
            buffer.data = 0.2 * torch.randn(buffer.shape)
    return model


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def installed(name: str) -> Iterator[Any]:
    adapter = MODELS[name][0]
    __import__(f"transformers.models.{adapter}.modeling_{adapter}")
    with patchkit.install(adapter=adapter, side="trainer") as installation:
        assert installation.state == "active"
        yield installation


def padded(rows: list[list[int]]) -> Any:
    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows])


def logits(model: Any, rows: list[list[int]], **options: Any) -> list[Any]:
    with torch.no_grad():
        out = model(input_ids=padded(rows), use_cache=False, **options).logits
    return [out[i, : len(row)] for i, row in enumerate(rows)]


def same(a: list[Any], b: list[Any]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def gradients(model: Any, *, exact: bool) -> dict[str, Any]:
    """Gradients of a loss on the logits; backward stands outside the context."""
    model.zero_grad()
    ids = padded(PROMPTS)
    with patchkit.exact_context() if exact else nullcontext():
        out = model(input_ids=ids, use_cache=False).logits.float()
    out.log_softmax(-1).gather(-1, ids[..., None]).mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_outside_of_the_context_and_after_undo_nothing_has_changed(name: str) -> None:
    model, adapter = build(name), MODELS[name][0]
    before = logits(model, PROMPTS)
    with patchkit.install(adapter=adapter, side="trainer"):
        assert same(logits(model, PROMPTS), before)
        with patchkit.exact_context():
            inside = logits(model, PROMPTS)
    assert same(logits(model, PROMPTS), before)
    assert inside[0].dtype == torch.float32
    assert not same(inside, before)
    # Another rounding of the same model, not another model.
    for exact, stock in zip(inside, before, strict=True):
        close = torch.nn.functional.cosine_similarity(exact, stock.float(), dim=-1)
        assert close.median() > 0.99


def test_a_sequence_has_the_same_bits_alone_batched_packed_and_padded(
    name: str, installed: Any
) -> None:
    model = build(name)
    with patchkit.exact_context(), torch.no_grad():
        alone = [logits(model, [row])[0] for row in PROMPTS]
        assert same(logits(model, PROMPTS[::-1])[::-1], alone)
        mask = (padded(PROMPTS) > 0).long()
        assert same(logits(model, PROMPTS, attention_mask=mask), alone)
        packed = torch.tensor([[t for row in PROMPTS for t in row]])
        positions = torch.tensor([[i for row in PROMPTS for i in range(len(row))]])
        out = model(input_ids=packed, position_ids=positions, use_cache=False).logits[0]
        assert torch.equal(out, torch.cat(alone))


def test_gradients_are_finite_and_point_where_the_stock_ones_do(name: str, installed: Any) -> None:
    exact, stock = gradients(build(name), exact=True), gradients(build(name), exact=False)
    assert exact.keys() == stock.keys()
    a = torch.cat([g.flatten().double() for g in exact.values()])
    b = torch.cat([g.flatten().double() for g in stock.values()])
    assert torch.isfinite(a).all()
    assert torch.nn.functional.cosine_similarity(a, b, 0) > 0.95


@pytest.mark.parametrize("kind", ["reentrant", "non_reentrant"])
def test_the_recompute_runs_in_the_state_of_its_forward(
    name: str, installed: Any, kind: str
) -> None:
    plain = gradients(build(name), exact=True)
    model = build(name)
    model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
    if kind == "reentrant":
        model.enable_input_require_grads()
    found = gradients(model, exact=True)
    assert found.keys() == plain.keys()
    for parameter, gradient in plain.items():
        assert torch.equal(found[parameter], gradient), parameter


def test_options_of_the_causal_model_keep_their_meaning(name: str, installed: Any) -> None:
    model, ids = build(name), padded(PROMPTS)
    with patchkit.exact_context(), torch.no_grad():
        full = model(input_ids=ids, use_cache=False)
        last = model(input_ids=ids, use_cache=False, logits_to_keep=3)
        assert torch.equal(last.logits, full.logits[:, -3:])
        as_tuple = model(input_ids=ids, use_cache=False, return_dict=False)
        assert torch.equal(as_tuple[0], full.logits)
        trained = model(input_ids=ids, use_cache=False, labels=ids)
    with torch.no_grad():
        stock = model(input_ids=ids, use_cache=False, labels=ids)
    assert type(full) is type(stock)
    assert trained.loss.item() == pytest.approx(stock.loss.item(), rel=0.05)


def test_what_a_call_may_not_do_is_refused_by_name(name: str, installed: Any) -> None:
    model = build(name)
    with patchkit.exact_context(), pytest.raises(UncoveredLayerError, match="use_cache=False"):
        model(input_ids=padded(PROMPTS), use_cache=True)


def test_a_bias_of_the_output_projection_is_refused() -> None:
    """Where transformers has one and vLLM has none."""
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    model = build("qwen3", attention_bias=True)
    with patchkit.install(adapter="qwen3", side="trainer"), patchkit.exact_context():
        with pytest.raises(UncoveredLayerError, match=r"o_proj\.bias"):
            logits(model, PROMPTS)


def test_sliding_windows_are_refused() -> None:
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    kinds = ["full_attention", "sliding_attention"]
    model = build("qwen3", use_sliding_window=True, sliding_window=8, layer_types=kinds)
    with patchkit.install(adapter="qwen3", side="trainer"), patchkit.exact_context():
        with pytest.raises(UncoveredLayerError, match="sliding_window"):
            logits(model, PROMPTS)


def test_every_part_of_glm_has_a_say_in_the_logits() -> None:
    """A bias, a shared expert, a group or a factor that is dropped would show here."""
    import transformers.models.glm4_moe.modeling_glm4_moe  # noqa: F401

    changes = {
        "correction bias": lambda m: m.model.layers[1].mlp.gate.e_score_correction_bias.zero_(),
        "query bias": lambda m: m.model.layers[0].self_attn.q_proj.bias.add_(1.0),
        "value bias": lambda m: m.model.layers[0].self_attn.v_proj.bias.add_(1.0),
        "shared experts": lambda m: m.model.layers[1].mlp.shared_experts.down_proj.weight.zero_(),
        "dense layer": lambda m: m.model.layers[0].mlp.down_proj.weight.zero_(),
        "factor": lambda m: setattr(m.model.layers[1].mlp.gate, "routed_scaling_factor", 1.0),
        "groups": lambda m: setattr(m.model.layers[1].mlp.gate, "topk_group", 4),
    }
    with patchkit.install(adapter="glm4_moe", side="trainer"), patchkit.exact_context():
        whole = logits(build("glm4_moe"), PROMPTS)
        silent = []
        for what, change in changes.items():
            model = build("glm4_moe")
            with torch.no_grad():
                change(model)
            if same(logits(model, PROMPTS), whole):
                silent.append(what)
    assert not silent
