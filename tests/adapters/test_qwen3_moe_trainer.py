"""The trainer side on the real Hugging Face model: exact inside, untouched outside."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import patchkit  # noqa: E402
from patchkit.bindings.claim import UncoveredLayerError  # noqa: E402
from patchkit.engine.errors import SwitchUnsetError  # noqa: E402
from patchkit_adapters.qwen3_moe.tiny import SHAPE  # noqa: E402

pytestmark = pytest.mark.stack

PROMPTS = [list(range(3, 3 + n)) for n in (5, 17, 33, 64, 40)]


def make(attention: str = "sdpa", **changes: Any) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    config = Qwen3MoeConfig(**{**SHAPE, **changes}, attn_implementation=attention)
    return Qwen3MoeForCausalLM(config).to(torch.bfloat16).train()


@pytest.fixture(scope="module")
def model() -> Any:
    return make()


@pytest.fixture
def installed() -> Iterator[Any]:
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

    with patchkit.install(adapter="qwen3_moe", side="trainer", profile="cpu_tree") as installation:
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


def test_outside_of_the_context_and_after_undo_nothing_has_changed(model: Any) -> None:
    before = logits(model, PROMPTS)
    with patchkit.install(adapter="qwen3_moe", side="trainer", profile="cpu_tree"):
        assert same(logits(model, PROMPTS), before)
        with patchkit.exact_context():
            inside = logits(model, PROMPTS)
        assert same(logits(model, PROMPTS), before)
    assert same(logits(model, PROMPTS), before)
    assert inside[0].dtype == torch.float32
    assert not same(inside, before)


def test_a_sequence_has_the_same_bits_alone_batched_reordered_and_padded(
    model: Any, installed: Any
) -> None:
    with patchkit.exact_context():
        alone = [logits(model, [row])[0] for row in PROMPTS]
        assert same(logits(model, PROMPTS), alone)
        assert same(logits(model, PROMPTS[::-1])[::-1], alone)
        wide = [*PROMPTS, [7] * 150]
        assert same(logits(model, wide)[:-1], alone)
        mask = (padded(PROMPTS) > 0).long()
        assert same(logits(model, PROMPTS, attention_mask=mask), alone)


def test_left_padding_with_positions_that_start_at_the_first_real_token(
    model: Any, installed: Any
) -> None:
    row = PROMPTS[1]
    ids = torch.tensor([[0] * 6 + row])
    mask = (torch.arange(ids.shape[1]) >= 6).long()[None]
    positions = (torch.arange(ids.shape[1]) - 6).clamp(min=0)[None]
    with patchkit.exact_context(), torch.no_grad():
        out = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
        ).logits[0, 6:]
        assert torch.equal(out, logits(model, [row])[0])


def test_packed_sequences_are_told_apart_by_positions_that_restart(
    model: Any, installed: Any
) -> None:
    packed = torch.tensor([[t for row in PROMPTS for t in row]])
    positions = torch.tensor([[i for row in PROMPTS for i in range(len(row))]])
    with patchkit.exact_context(), torch.no_grad():
        out = model(input_ids=packed, position_ids=positions, use_cache=False).logits[0]
        alone = torch.cat([logits(model, [row])[0] for row in PROMPTS])
    assert torch.equal(out, alone)


def test_every_covered_attention_implementation_gives_the_same_bits(installed: Any) -> None:
    with patchkit.exact_context():
        assert same(logits(make("sdpa"), PROMPTS), logits(make("eager"), PROMPTS))


def test_flex_attention_is_refused_by_name(installed: Any) -> None:
    flex = make("flex_attention")
    with patchkit.exact_context(), pytest.raises(UncoveredLayerError, match="flex_attention"):
        logits(flex, PROMPTS)


def test_a_cache_is_refused_with_the_way_out(model: Any, installed: Any) -> None:
    with patchkit.exact_context(), pytest.raises(UncoveredLayerError, match="use_cache=False"):
        model(input_ids=padded(PROMPTS), use_cache=True)


def test_tied_embeddings_and_other_head_sizes_are_covered(installed: Any) -> None:
    other = make(tie_word_embeddings=True, head_dim=48, num_experts=6, num_experts_per_tok=3)
    with patchkit.exact_context():
        assert same(logits(other, PROMPTS), [logits(other, [row])[0] for row in PROMPTS])


# --- gradients and recompute ------------------------------------------------------------


def gradients(model: Any, *, exact: bool, backward_exact: bool | None = None) -> dict[str, Any]:
    """Gradients of a loss on the logits; by default, backward stands outside."""
    from contextlib import nullcontext

    model.zero_grad()
    ids = padded(PROMPTS)
    with patchkit.exact_context() if exact else nullcontext():
        out = model(input_ids=ids, use_cache=False).logits.float()
    loss = out.log_softmax(-1).gather(-1, ids[..., None]).mean()
    with patchkit.exact_context() if backward_exact else nullcontext():
        loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def checkpointed(kind: str) -> Any:
    model = make()
    model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
    if kind == "reentrant":
        model.enable_input_require_grads()
    return model


@pytest.mark.parametrize("kind", ["reentrant", "non_reentrant"])
@pytest.mark.parametrize("exact", [True, False])
def test_the_recompute_runs_in_the_state_of_its_forward(
    installed: Any, kind: str, exact: bool
) -> None:
    plain = gradients(make(), exact=exact)
    # Backward stands outside of the context, then inside of it: neither decides.
    for backward_exact in (False, True):
        found = gradients(checkpointed(kind), exact=exact, backward_exact=backward_exact)
        assert found.keys() == plain.keys()
        for name, gradient in plain.items():
            assert torch.equal(found[name], gradient), name


def test_the_recompute_is_exact_in_a_thread_of_its_own(installed: Any) -> None:
    plain = gradients(make(), exact=True)
    model = checkpointed("non_reentrant")
    with patchkit.exact_context():
        out = model(input_ids=padded(PROMPTS), use_cache=False).logits.float()
    loss = out.log_softmax(-1).gather(-1, padded(PROMPTS)[..., None]).mean()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, plain[name]), name


def test_a_thread_that_never_said_is_refused_while_another_is_inside(
    model: Any, installed: Any
) -> None:
    caught: list[BaseException] = []

    def run() -> None:
        try:
            logits(model, PROMPTS)
        except SwitchUnsetError as error:
            caught.append(error)

    with patchkit.exact_context():
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert caught
    assert "exact_context" in str(caught[0])
    assert "stock_context" in str(caught[0])


def test_gradients_are_finite_and_point_where_the_stock_ones_do(installed: Any) -> None:
    exact, stock = gradients(make(), exact=True), gradients(make(), exact=False)
    assert exact.keys() == stock.keys()
    a = torch.cat([g.flatten().double() for g in exact.values()])
    b = torch.cat([g.flatten().double() for g in stock.values()])
    assert torch.isfinite(a).all()
    assert torch.nn.functional.cosine_similarity(a, b, 0) > 0.95


# --- the rest of the model's interface ----------------------------------------------------


def test_options_of_the_causal_model_keep_their_meaning(model: Any, installed: Any) -> None:
    ids = padded(PROMPTS)
    with patchkit.exact_context(), torch.no_grad():
        full = model(input_ids=ids, use_cache=False)
        last = model(input_ids=ids, use_cache=False, logits_to_keep=3)
        assert torch.equal(last.logits, full.logits[:, -3:])
        chosen = model(input_ids=ids, use_cache=False, logits_to_keep=torch.tensor([0, 7]))
        assert torch.equal(chosen.logits, full.logits[:, [0, 7]])
        as_tuple = model(input_ids=ids, use_cache=False, return_dict=False)
        assert torch.equal(as_tuple[0], full.logits)
        trained = model(input_ids=ids, use_cache=False, labels=ids, output_router_logits=True)
    assert torch.isfinite(trained.loss)
    assert trained.aux_loss > 0
    assert len(trained.router_logits) == model.config.num_hidden_layers


def test_ties_go_to_the_lower_expert(installed: Any) -> None:
    model = make()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()
    seen: list[Any] = []
    handle = model.model.layers[0].mlp.gate.register_forward_hook(
        lambda module, args, output: seen.append(output[2])
    )
    with patchkit.exact_context():
        logits(model, PROMPTS)
    handle.remove()
    assert (seen[0] == torch.arange(2)).all()
