"""The doctor's parts without an engine: digests, alignment, origins, causes, settings, page."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from patchkit.engine import Patch  # noqa: E402
from patchkit.errors import ConfigurationError  # noqa: E402
from patchkit.parity.doctor import digests  # noqa: E402
from patchkit.parity.doctor.causes import KINDS, REMEDIES, guess  # noqa: E402
from patchkit.parity.doctor.compare import Cell, Comparison, compare, measure  # noqa: E402
from patchkit.parity.doctor.covering import covering_patches  # noqa: E402
from patchkit.parity.doctor.diagnosis import Diagnosis  # noqa: E402
from patchkit.parity.doctor.digests import (  # noqa: E402
    matrix_digest,
    multiset_digest,
    row_digests,
)
from patchkit.parity.doctor.layout import DEFAULT_LAYOUT, Layout, label, locate  # noqa: E402
from patchkit.parity.doctor.page import grid_columns, render_diagnosis  # noqa: E402
from patchkit.parity.doctor.recording import (  # noqa: E402
    AFTER,
    BEFORE,
    HeldTensor,
    OperatorKey,
    Recorder,
    Recording,
    WeightFacts,
    gathered,
    gathered_tensor,
    merged,
    tensor_as_plain,
    tensor_from_plain,
)
from patchkit.parity.doctor.rollout import RolloutTaps, canonical_choice  # noqa: E402
from patchkit.parity.doctor.session import parse_operator  # noqa: E402
from patchkit.parity.doctor.setup import DoctorSettings, set_up  # noqa: E402
from patchkit.parity.doctor.trainer import TrainerTaps  # noqa: E402

pytestmark = pytest.mark.stack


def rows(*names: tuple[int, int]) -> Any:
    return np.asarray(names, np.int64).reshape(-1, 2)


# -- digests ----------------------------------------------------------------------------------


@given(seed=st.integers(0, 10_000), width=st.integers(1, 70), bit=st.integers(0, 31))
@settings(max_examples=60, deadline=None)
def test_one_changed_bit_changes_its_row_and_no_other(seed: int, width: int, bit: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, width, generator=generator)
    y = x.clone()
    column = seed % width
    y.view(torch.int32)[2, column] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31))
    same = row_digests(x) == row_digests(y)
    assert same.tolist() == [True, True, False, True, True]


def test_digests_tell_places_and_not_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(300, 64).bfloat16()
    assert torch.equal(row_digests(x), row_digests(x.float())), "values, not their container"
    assert torch.equal(row_digests(x), row_digests(x.view(300, 4, 16)))
    assert not (row_digests(x) == row_digests(x.flip(-1))).any(), "columns count"
    alone = torch.cat([row_digests(r[None]) for r in x])
    assert torch.equal(row_digests(x), alone), "a row's digest is of that row"
    whole = row_digests(x)
    monkeypatch.setattr(digests, "_CHUNK", 1000)
    assert torch.equal(whole, row_digests(x)), "however it was cut"
    zeros = torch.zeros(1, 8)
    assert row_digests(zeros)[0] != row_digests(-zeros)[0], "-0.0 has other bits"


def test_weights_are_told_apart_from_their_other_layouts() -> None:
    w = torch.randn(32, 32).bfloat16()
    packed = w.view(4, 8, 32).transpose(0, 1).reshape(32, 32)
    assert matrix_digest(w) != matrix_digest(packed) != matrix_digest(w.t().contiguous())
    assert multiset_digest(w) == multiset_digest(packed)
    other = w.clone()
    other[3, 4] += 1
    assert multiset_digest(w) != multiset_digest(other)


# -- recording ----------------------------------------------------------------------------------


def recorder(**options: Any) -> Recorder:
    made = Recorder("rollout", **options)
    made.step(4)
    return made


KEY = OperatorKey(0, "self_attn.q_proj")


def test_a_row_computed_again_counts_once_and_is_noticed_if_it_changed() -> None:
    r = recorder(budget=1 << 20)
    x = torch.randn(3, 8)
    r.add(KEY, rows((0, 0), (0, 1), (1, 0)), x)
    changed = x[1:2] + 1
    r.add(KEY, rows((0, 1), (1, 0)), torch.cat([changed, x[2:]]))
    record = r.finish().operators[KEY]
    assert record.rows.tolist() == [[0, 0], [0, 1], [1, 0]]
    assert record.unrepeatable == 1
    held = r.tensor(KEY)
    assert held is not None and torch.equal(held.values, x), "the first counts"


def test_padding_and_marked_rows_are_left_out() -> None:
    r = recorder(budget=1 << 20)
    r.add(KEY, rows((0, 0), (-1, -1), (0, 2)), torch.arange(20.0).view(5, 4))
    held = r.finish().operators[KEY], r.tensor(KEY)
    assert held[0].rows.tolist() == [[0, 0], [0, 2]]
    assert held[1] is not None and held[1].values[:, 0].tolist() == [0.0, 8.0]


def test_values_are_held_within_a_budget_and_where_they_were_asked_for() -> None:
    other = OperatorKey(1, "self_attn.q_proj")
    for budget, hold, expected in (
        (0, (), set()),
        (3 * 8 * 4, (), {KEY}),
        (0, (other,), {other}),
        (1 << 20, (), {KEY, other}),
    ):
        r = recorder(budget=budget, hold=hold)
        for key in (KEY, other):
            r.add(key, rows((0, 0), (0, 1), (0, 2)), torch.randn(3, 8))
        assert r.finish().held == expected


def test_a_held_value_is_a_copy() -> None:
    r, buffer = recorder(budget=1 << 20), torch.ones(1, 4)
    r.add(KEY, rows((0, 0)), buffer)
    buffer.zero_()  # the engine's next step
    r.finish()
    held = r.tensor(KEY)
    assert held is not None and held.values.tolist() == [[1.0] * 4]


def test_a_recording_survives_being_plain_data() -> None:
    import orjson

    r = recorder(budget=1 << 20)
    r.add(
        KEY,
        rows((0, 0), (3, 9)),
        torch.randn(2, 2, 4).bfloat16(),
        owners=("m:C",),
        facts={"eps": 1e-6},
        weights={"weight": torch.randn(4, 4)},
    )
    r.note("something")
    before = r.finish()
    plain = before.as_plain()
    readable = orjson.dumps(plain, default=lambda o: o.hex())
    assert b"something" in readable
    after = Recording.from_plain(plain)
    a, b = before.operators[KEY], after.operators[KEY]
    assert (a.weights, a.facts, a.owners, a.shape, a.dtype) == (
        b.weights,
        b.facts,
        b.owners,
        b.shape,
        b.dtype,
    )
    assert np.array_equal(a.digests, b.digests) and np.array_equal(a.rows, b.rows)
    assert b.shape == (2, 4) and b.dtype == "bfloat16" and after.held == {KEY}
    held = r.tensor(KEY)
    again = tensor_from_plain(tensor_as_plain(held))
    assert held is not None and again is not None
    assert torch.equal(held.values.float(), again.values)


def test_ranks_recordings_add_up() -> None:
    parts = []
    for sequence in (0, 1):
        r = Recorder("trainer")
        r.step(2)
        r.add(KEY, rows((sequence, 0), (sequence, 1)), torch.full((2, 4), float(sequence)))
        parts.append(r.finish())
    whole = merged(parts)
    assert whole.operators[KEY].rows.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert whole.step_tokens == [2, 2]


def rank_of(x: Any, first: int, whole: int, key: OperatorKey = KEY) -> Recorder:
    r = Recorder("rollout", budget=1 << 20)
    r.step(len(x))
    r.add(key, rows(*((0, i) for i in range(len(x)))), x, span=(first, whole))
    return r


@given(seed=st.integers(0, 1000), cut=st.integers(1, 31))
@settings(max_examples=30, deadline=None)
def test_shards_recorded_where_they_are_are_the_whole_row(seed: int, cut: int) -> None:
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(seed)).bfloat16()
    ranks = [rank_of(x[:, cut:], cut, 32), rank_of(x[:, :cut], 0, 32)]
    found = gathered([r.finish() for r in ranks])
    record = found.operators[KEY]
    assert record.digests.tolist() == row_digests(x).tolist()
    assert (record.shape, record.span, found.notes) == ((32,), None, [])
    held = gathered_tensor([r.tensor(KEY) for r in ranks], [(cut, 32), (0, 32)])
    assert held is not None and torch.equal(held.values, x)


def test_heads_that_several_ranks_hold_count_once() -> None:
    x = torch.randn(3, 16)
    ranks = [rank_of(x[:, :8], 0, 16), rank_of(x[:, :8], 0, 16), rank_of(x[:, 8:], 8, 16)]
    found = gathered([r.finish() for r in ranks])
    assert found.operators[KEY].digests.tolist() == row_digests(x).tolist()


def test_columns_that_no_rank_has_are_said() -> None:
    x = torch.randn(3, 16)
    found = gathered([rank_of(x[:, :8], 0, 16).finish()])
    assert KEY not in found.operators and "8 of 16 columns" in found.notes[0]


def test_ranks_that_disagree_about_a_whole_row_are_named() -> None:
    x = torch.randn(3, 16)
    parts = []
    for rank in (0, 1):
        r = Recorder("rollout")
        r.step(3)
        r.add(KEY, rows((0, 0), (0, 1), (0, 2)), x + rank)
        parts.append(r.finish())
    found = gathered(parts)
    assert found.operators[KEY].digests.tolist() == row_digests(x).tolist()
    assert found.notes == ["self_attn.q_proj of layer 0: rank 1 has other bits than rank 0, 3 rows"]


# -- comparing -----------------------------------------------------------------------------------


def side(name: str, **values: Any) -> Recording:
    """A recording of operators of one layer; rows are (0, 0), (0, 1) and so on."""
    r = Recorder(name, budget=1 << 20)
    r.step(16)
    for op, x in values.items():
        key = OperatorKey(0, op.replace("__", "."))
        r.add(key, rows(*((0, i) for i in range(len(x)))), x)
    return r.finish()


def test_rows_are_aligned_by_name_whatever_their_order() -> None:
    x = torch.randn(4, 8)
    a, b = Recorder("rollout"), Recorder("trainer")
    names = [(0, 0), (0, 1), (1, 0), (1, 1)]
    for r, order in ((a, [2, 0, 1]), (b, [0, 1, 2, 3])):
        r.step(4)
        r.add(KEY, rows(*(names[i] for i in order)), x[order])
    found = compare(a.finish(), b.finish())
    cell = found.cell(KEY)
    assert (cell.status, cell.rows, cell.unmatched) == ("equal", 3, 1)
    assert found.equal and found.first is None


def test_the_first_difference_is_first_in_the_trainers_order() -> None:
    x, y = torch.randn(3, 8), torch.randn(3, 8)
    # The rollout's merged product hands out q, k and v before it goes on.
    a = side("rollout", q_proj=x, k_proj=x + 1, q_norm=y, k_norm=y)
    b = side("trainer", q_proj=x, q_norm=y, k_proj=x, k_norm=y + 1)
    found = compare(a, b)
    assert [c.key.op for c in found.cells] == ["q_proj", "q_norm", "k_proj", "k_norm"]
    assert found.first is not None and found.first.key.op == "k_proj"


def test_what_one_side_lacks_is_no_difference_and_no_agreement() -> None:
    x = torch.randn(3, 8)
    found = compare(side("rollout", q_proj=x, own=x), side("trainer", q_proj=x))
    assert found.cell(OperatorKey(0, "own")).status == "not compared"
    assert "rollout side only" in found.cell(OperatorKey(0, "own")).why
    nothing = compare(side("rollout", a=x), side("trainer", b=x))
    assert not nothing.equal and nothing.first is None


def test_an_origin_read_equal_inputs() -> None:
    x = torch.randn(4, 8)
    first, second = x.clone(), x.clone()
    first[1] += 1  # row 1 differs from here on
    second[1:3] += 1  # row 2 differs by this operator alone
    third = second.clone()  # this one only passes on what it got
    found = compare(
        side("rollout", o_proj=first, norm=second, gate=third),
        side("trainer", o_proj=x, norm=x, gate=x),
    )
    assert [(o.key.op, o.rows) for o in found.origins] == [("o_proj", 1), ("norm", 1)]


def test_attention_is_an_origin_only_where_the_whole_context_is_equal() -> None:
    x = torch.randn(4, 8)
    keys, attended = x.clone(), x.clone()
    keys[2] += 1
    attended[:] += 1
    found = compare(
        side("rollout", self_attn__k_proj=keys, self_attn__attention=attended),
        side("trainer", self_attn__k_proj=x, self_attn__attention=x),
    )
    # Rows 2 and 3 may have it from the key of row 2; rows 0 and 1 cannot.
    assert [(o.key.op, o.rows) for o in found.origins] == [
        ("self_attn.k_proj", 1),
        ("self_attn.attention", 2),
    ]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda w: w, None),
        (lambda w: w.t().contiguous(), "transposed"),
        (lambda w: w.flip(0), "the same numbers in another layout"),
        (lambda w: w + 1, "other values"),
        (lambda w: torch.full_like(w, 7.0), "stale: the weights of policy version 3"),
        (lambda w: w[:4], "shapes [4, 8] and [8, 8]"),
    ],
)
def test_weights_that_differ_are_told_how(change: Any, expected: str | None) -> None:
    x, w = torch.randn(2, 8), torch.randn(8, 8)

    def recording(name: str, weight: Any) -> Recording:
        r = Recorder(name)
        r.step(2)
        r.add(KEY, rows((0, 0), (0, 1)), x, weights={"weight": weight})
        return r.finish()

    old = recording("trainer", torch.full_like(w, 7.0))
    found = compare(recording("rollout", change(w)), recording("trainer", w), previous={3: old})
    assert found.cell(KEY).weights.get("weight") == expected


# -- causes --------------------------------------------------------------------------------------


def diagnosed(op: str, a: Any, b: Any, **before: Any) -> list[Any]:
    """Causes of a difference in one operator, with what was computed before it."""
    key = OperatorKey(0, op)
    names = {**{k.replace("__", "."): (v, v) for k, v in before.items()}, op: (a, b)}
    held = {
        OperatorKey(0, name): tuple(
            HeldTensor(rows(*((0, i) for i in range(len(x)))), x, str(x.dtype)[6:]) for x in pair
        )
        for name, pair in names.items()
    }
    recordings = []
    for which, name in ((0, "rollout"), (1, "trainer")):
        r = Recorder(name)
        r.step(len(a))
        for k, pair in held.items():
            r.add(k, pair[which].rows, pair[which].values)
        recordings.append(r.finish())
    comparison = compare(*recordings)
    cell = comparison.cell(key)
    measure(cell, held[key])
    return guess(cell, comparison, config={}, fetch=held.get)


def test_every_kind_says_what_to_do() -> None:
    assert set(KINDS) == set(REMEDIES)


def test_permuted_heads_are_a_layout() -> None:
    b = torch.randn(20, 4, 8).bfloat16()
    (cause,) = diagnosed("self_attn.q_proj", b.flip(1).flatten(1), b.flatten(1))
    assert (cause.kind, cause.certain) == ("layout", True)


def test_a_scale_is_told_with_its_factor() -> None:
    b = torch.randn(20, 8)
    (cause,) = diagnosed("mlp.gate.weights", 2.5 * b, b)
    assert cause.kind == "scale" and "2.5 times" in cause.evidence


@pytest.mark.parametrize("which", ["rollout", "trainer"])
def test_whose_dtype_is_coarser_is_told(which: str) -> None:
    fine = torch.randn(20, 8)
    pair = (fine.bfloat16().float(), fine)
    (cause,) = diagnosed("lm_head", *(pair if which == "rollout" else pair[::-1]))
    assert cause.kind == "dtype" and f"the {which}'s values" in cause.evidence


def test_experts_far_apart_in_score_are_no_tie() -> None:
    logits = torch.randn(10, 8)
    ids = logits.topk(2).indices.sort(-1).values
    wrong = (-logits).topk(2).indices.sort(-1).values
    (cause,) = diagnosed("mlp.gate.ids", wrong, ids, mlp__gate=logits)
    assert cause.kind == "choice" and not cause.certain


def test_a_large_difference_is_called_another_formula_and_a_small_one_a_sum() -> None:
    b = torch.randn(50, 64).bfloat16()
    near = b.clone()
    near.view(torch.int16)[:, 3] += 1
    assert diagnosed("self_attn.v_proj", near, b)[0].kind == "order of reduction"
    assert diagnosed("self_attn.v_proj", b * 3 + 1, b)[0].kind == "formula"


@pytest.mark.parametrize("large", [True, False])
def test_rows_that_differ_by_the_size_of_their_forward_are_told(large: bool) -> None:
    recordings = []
    for name in ("rollout", "trainer"):
        r = Recorder(name)
        for step, tokens in enumerate((16, 300)):
            r.step(tokens)
            x = torch.randn(20, 4, generator=torch.Generator().manual_seed(step))
            wrong = name == "rollout" and (tokens == 300) is large
            r.add(KEY, rows(*((step, i) for i in range(20))), x + 1 if wrong else x)
        recordings.append(r.finish())
    split = compare(*recordings).cell(KEY).split
    limit, others = ("300 tokens or more", "smaller") if large else ("16 tokens or fewer", "larger")
    assert limit in split and f"none of the 20 rows in {others} ones" in split


def test_rows_that_differ_anywhere_are_not_blamed_on_the_batch() -> None:
    x = torch.randn(40, 4)
    y = x.clone()
    y[::3] += 1
    assert compare(side("rollout", q_proj=y), side("trainer", q_proj=x)).cells[0].split == ""


def test_without_values_only_the_place_is_claimed() -> None:
    comparison = compare(
        side("rollout", self_attn__q_proj=torch.zeros(2, 4)),
        side("trainer", self_attn__q_proj=torch.ones(2, 4)),
    )
    assert comparison.first is not None
    (cause,) = guess(comparison.first, comparison, config={}, fetch=lambda key: None)
    assert cause.kind == "not measured"


def test_a_choice_is_the_same_in_any_order() -> None:
    weights, ids = torch.tensor([[0.7, 0.3]]), torch.tensor([[5, 2]], dtype=torch.int32)
    found = canonical_choice(weights, ids)
    assert found["ids"].tolist() == [[2, 5]]
    assert torch.equal(found["weights"], weights.flip(-1))


# -- taps ----------------------------------------------------------------------------------------


def test_taps_leave_nothing_behind() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(
        Qwen3Config(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            vocab_size=64,
        )
    )
    modeling = sys.modules[type(model).__module__]
    rotation = modeling.apply_rotary_pos_emb

    def hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    before = hooks()
    recorder = Recorder("trainer")
    taps = TrainerTaps(model, recorder, exact=False)
    assert hooks() > before and modeling.apply_rotary_pos_emb is not rotation
    ids = torch.tensor([[3, 4, 5]])
    names = np.stack([np.zeros(3, np.int64), np.arange(3)], -1)[None]
    with torch.no_grad(), taps.forward(names):
        model(input_ids=ids, use_cache=False)
    taps.remove()
    assert hooks() == before and modeling.apply_rotary_pos_emb is rotation
    seen = {k.op for k in recorder.finish().operators}
    assert {"embed_tokens", "self_attn.rope.q", "self_attn.attention", "mlp.down_proj"} <= seen
    assert {"lm_head", "norm", "norm.in", "mlp.activation"} <= seen


@pytest.mark.parametrize(
    ("use", "dtype"),
    [
        (lambda y: y.to(torch.bfloat16), torch.bfloat16),
        (lambda y: y.view(2, 2, 2).to(torch.bfloat16).flatten(1), torch.bfloat16),
        (lambda y: (y + 1.0).to(torch.bfloat16), torch.float32),
        (lambda y: (y.shape, y.dtype, y.to(torch.bfloat16)), torch.bfloat16),
        (lambda y: None, torch.float32),
    ],
)
def test_the_cast_that_follows_a_product_belongs_to_it(use: Any, dtype: Any) -> None:
    from patchkit.parity.doctor.trainer import _Roundings

    seen: list[Any] = []
    roundings = _Roundings()
    with roundings:
        product = torch.randn(2, 4)
        roundings.expect(product, seen.append)
        use(product)
    roundings.flush()
    assert [value.dtype for value in seen] == [dtype]
    assert torch.equal(seen[0].flatten(), product.to(dtype).flatten())


def test_rollout_taps_that_cannot_be_placed_are_taken_off_again() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    runner = SimpleNamespace(get_model=lambda: model, sampler=SimpleNamespace())
    with pytest.raises(AttributeError, match="compute_logprobs"):
        RolloutTaps(runner, Recorder("rollout"))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# -- names, patches, settings ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("model.layers.3.self_attn.q_proj", OperatorKey(3, "self_attn.q_proj")),
        ("language_model.model.layers.12.mlp.gate", OperatorKey(12, "mlp.gate")),
        ("model.layers.0.block_sparse_moe.gate", OperatorKey(0, "mlp.gate")),
        ("model.layers.0.mlp.shared_experts.up_proj", OperatorKey(0, "mlp.shared_expert.up_proj")),
        ("model.embed_tokens", OperatorKey(BEFORE, "embed_tokens")),
        ("model.norm", OperatorKey(AFTER, "norm")),
        ("lm_head", OperatorKey(AFTER, "lm_head")),
        ("model.layers.3", None),
    ],
)
def test_paths_become_operators(path: str, key: OperatorKey | None) -> None:
    assert locate(path, DEFAULT_LAYOUT) == key


def test_an_adapter_may_bring_names_of_its_own() -> None:
    layout = Layout(renamed={"ffn": "mlp"}, packed={"wqkv": ("q_proj", "k_proj", "v_proj")})
    assert locate("model.layers.2.ffn.gate", layout) == OperatorKey(2, "mlp.gate")
    assert "qkv_proj" not in layout.packed and layout.inputs == DEFAULT_LAYOUT.inputs


@pytest.mark.parametrize(
    ("op", "words"),
    [
        ("self_attn.rope.q", "q rope"),
        ("mlp.gate.ids", "top-k choice"),
        ("post_attention_layernorm.in", "residual mid"),
        ("pre_feedforward_layernorm.in", "into pre feedforward norm"),
        ("mlp.shared_expert.down_proj", "shared expert down product"),
        ("norm", "final norm"),
    ],
)
def test_operators_have_names_for_readers(op: str, words: str) -> None:
    assert label(op) == words


def test_operators_are_named_on_the_command_line() -> None:
    assert parse_operator("self_attn.o_proj@4") == OperatorKey(4, "self_attn.o_proj")
    assert parse_operator("lm_head") == OperatorKey(AFTER, "lm_head")
    with pytest.raises(ConfigurationError, match="operator@layer"):
        parse_operator("self_attn.o_proj@last")


def patch(symbol: str) -> Patch:
    return Patch(
        symbol=symbol, action="replace", replacement="a:b", reason="r", consequence="c", until="u"
    )


def test_the_nearest_class_with_a_patch_covers() -> None:
    cell = Cell(
        key=KEY,
        order=0,
        status="differs",
        owners=(("e.linear:Column", "e.linear:Method", "e.models:Attention"), ("h:Attention",)),
    )
    rollout = [
        patch("e.linear:Method.process_weights_after_loading"),
        patch("e.models:Attention.forward"),
        patch("e.linear:Method.apply"),
    ]
    found = covering_patches(cell, rollout, [patch("h:MLP.forward"), patch("h:Attention.forward")])
    assert [p.symbol for p in found[0]] == ["e.linear:Method.apply"]
    assert [p.symbol for p in found[1]] == ["h:Attention.forward"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"pair": "third"}, "none of exact, stock"),
        ({"adapter": ""}, "needs an adapter"),
        ({"adapter": "", "pair": "stock"}, "neither an adapter nor a model"),
        ({"adapter": "nobody"}, "no adapter is called 'nobody'"),
        ({"profile": "vllm_bi"}, "compiles the model"),
        ({"model": Path("/nowhere")}, "no config.json"),
    ],
)
def test_what_cannot_be_examined_is_refused_with_a_way_out(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(named)):
        set_up(replace(DoctorSettings(folder=tmp_path), **changes))


PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"


def test_the_docs_tell_every_refusal_and_every_kind() -> None:
    page = PAGE.read_text("utf-8")
    for changes in (
        {"pair": "third"},
        {"adapter": ""},
        {"adapter": "", "pair": "stock"},
        {"profile": "vllm_bi"},
        {"model": Path("/nowhere")},
    ):
        with pytest.raises(ConfigurationError) as refused:
            set_up(replace(DoctorSettings(folder=Path("/nowhere")), **changes))
        shown = re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)
        assert any(words in str(refused.value) for words in shown), str(refused.value)
    for kind in set(KINDS) - {"not measured"}:
        assert re.search(rf"\b{re.escape(kind)}\b", page), f"docs/doctor.md says nothing of {kind}"


# -- the page ------------------------------------------------------------------------------------


def diagnosis(**changes: Any) -> Diagnosis:
    x = torch.randn(4, 8)
    a = side("rollout", self_attn__q_proj=x, self_attn__o_proj=x + 1, own=x)
    b = side("trainer", self_attn__q_proj=x, self_attn__o_proj=x)
    comparison = compare(a, b)
    made = Diagnosis(
        pair="exact",
        model="/models/<tiny>",
        adapter=("toy", "plain"),
        packages={"vllm": "1"},
        comparison=comparison,
        causes=[],
        covering=([], []),
        sequences=1,
        tokens=(4, 4),
    )
    return replace(made, **changes)


def test_the_page_has_every_operator_and_fetches_nothing() -> None:
    found = diagnosis()
    page = render_diagnosis(found)
    for cell in found.comparison.cells:
        assert f'id="op-{cell.order}"' in page and f'href="#op-{cell.order}"' in page
    assert "&lt;tiny&gt;" in page and "<tiny>" not in page
    assert not re.search(r'(?:src|href)="(?!#)|url\(|@import|https?:', page), "from elsewhere"
    first = found.first
    assert first is not None
    assert re.findall(r'<a class="box [^"]*first" href="#op-(\d+)"', page) == [str(first.order)]


def test_json_and_verdict_say_the_same() -> None:
    data = diagnosis().as_dict()
    assert data["equal"] is False
    assert data["first"]["operator"] == "self_attn.o_proj"
    assert "o product of layer 0" in data["verdict"]
    assert [o["status"] for o in data["operators"]].count("not compared") == 1


def test_layers_of_different_kinds_share_columns_in_forward_order() -> None:
    def cell(layer: int, op: str) -> Cell:
        return Cell(key=OperatorKey(layer, op), order=0, status="equal")

    dense = [cell(0, op) for op in ("norm", "up", "down")]
    sparse = [cell(1, op) for op in ("norm", "gate", "experts", "down")]
    assert [op for op, _ in grid_columns(dense + sparse)] == [
        "norm",
        "gate",
        "experts",
        "up",
        "down",
    ]


def test_nothing_compared_is_not_equal() -> None:
    x = torch.randn(2, 4)
    empty = compare(side("rollout", a=x), side("trainer", b=x))
    found = diagnosis(comparison=empty)
    assert not found.equal and found.verdict.startswith("Nothing was compared")


def test_a_comparison_without_cells_is_not_equal() -> None:
    assert not Comparison(cells=[], origins=[]).equal


def test_weight_facts_of_vectors_have_no_transpose() -> None:
    assert WeightFacts.of(torch.ones(4)).transposed == 0
    assert WeightFacts.of(torch.ones(4, 3)).transposed == 0
