"""The conformance kit itself: what passes, what fails, and how it says so.

Every check meets an operator that breaks exactly the property it is about, so
that a check which compares nothing, or the wrong thing, is noticed here.
"""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from patchkit.parity.conformance import (  # noqa: E402
    AttentionOperator,
    ConformanceError,
    PagedOperator,
    Report,
    RouterOperator,
    RowOperator,
    bit_pattern,
    block_mask,
    causal_mask,
    examine,
    first_difference,
    merge_reports,
)

pytestmark = pytest.mark.stack

COUNTS = (1, 2, 3, 7, 31, 32, 33, 257)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    assert torch.get_num_threads() == 1, "a check left the thread count changed"
    torch.set_num_threads(before)


def normal(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def exact_dot(x, weight):
    """Row-invariant without patchkit's providers: small integers add up exactly."""
    x = (x * 16).round()
    return ((x[:, None, :] * weight.round()[None]).sum(-1)).where(
        torch.isfinite(x).all(-1, keepdim=True), torch.nan
    )


def rows(run, **more) -> RowOperator:
    weights = more.pop("weights", {"weight": normal(8, 24, seed=1) * 4})
    return RowOperator(
        name="planted",
        run=run,
        inputs={"x": normal(257, 24)},
        weights=weights,
        row_counts=COUNTS,
        **more,
    )


def in_order(x, weight, order):
    """A dot product that adds its terms one after the other, in the order given."""
    total = torch.zeros(len(x), len(weight))
    for k in order:
        total = total + x[:, k, None] * weight[None, :, k]
    return total


FORWARD, BACKWARD = list(range(24)), list(range(24))[::-1]


def order_follows_batch(x, weight):
    return in_order(x, weight, FORWARD if len(x) <= 32 else BACKWARD)


def order_follows_single_row(x, weight):
    return in_order(x, weight, BACKWARD if len(x) == 1 else FORWARD)


def order_follows_position(x, weight):
    result = in_order(x, weight, FORWARD)
    result[1::2] = in_order(x, weight, BACKWARD)[1::2]
    return result


def scale_follows_batch(x, weight):
    step = x.abs().nan_to_num(0.0, 0.0).amax() * 2.0**-18 if len(x) else 1.0
    return in_order((x / step).round() * step, weight, FORWARD)


def scale_follows_padding(x, weight):
    padded = bool((x == 0).all(-1).any())
    return in_order(x, weight, BACKWARD if padded else FORWARD)


def order_follows_threads(x, weight):
    return in_order(x, weight, FORWARD if torch.get_num_threads() == 1 else BACKWARD)


def order_follows_strides(x, weight):
    plain = x.is_contiguous() and x.storage_offset() == 0
    return in_order(x, weight, FORWARD if plain else BACKWARD)


def order_follows_weight_strides(x, weight):
    return in_order(x, weight, FORWARD if weight.is_contiguous() else BACKWARD)


_turn = itertools.count()


def order_follows_time(x, weight):
    return in_order(x, weight, FORWARD if next(_turn) % 2 else BACKWARD)


def no_empty_batch(x, weight):
    if not len(x):
        raise RuntimeError("cannot reshape tensor of 0 elements")
    return exact_dot(x, weight)


def nan_vanishes(x, weight):
    return exact_dot(x.nan_to_num(0.0, 0.0, 0.0), weight)


def nan_spreads(x, weight):
    return exact_dot(x, weight) + 0.0 * x.sum()


def partial_sums_in_bf16(ranks, x, weight):
    pairs = zip(x.chunk(ranks, -1), weight.chunk(ranks, -1), strict=True)
    return sum(exact_dot(a, w).bfloat16().float() for a, w in pairs)


def test_an_exact_operator_passes_every_check():
    def sharded(ranks, x, weight):
        return torch.cat([exact_dot(x, w) for w in weight.chunk(ranks)], dim=-1)

    report = examine(rows(exact_dot, sharded=sharded, reference=exact_dot))
    assert report.passed, "\n".join(map(str, report.findings))
    assert not report.skipped
    assert set(report.trials) == set(rows(exact_dot).checks())
    assert report.trials["batch size"] == len(COUNTS)
    report.raise_if_failed()


@pytest.mark.parametrize(
    ("run", "check"),
    [
        (order_follows_batch, "batch size"),
        (order_follows_single_row, "alone"),
        (order_follows_position, "position"),
        (scale_follows_batch, "neighbours"),
        (scale_follows_padding, "padding"),
        (order_follows_single_row, "splits"),
        (order_follows_threads, "threads"),
        (order_follows_time, "repetition"),
        (order_follows_strides, "layout"),
        (order_follows_weight_strides, "layout"),
        (no_empty_batch, "no rows"),
        (nan_vanishes, "neighbours"),
        (nan_spreads, "neighbours"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_each_check_catches_what_it_is_about(run, check):
    report = examine(rows(run), only=[check])
    assert report.failed_checks == {check}
    assert all(finding.operator == "planted" for finding in report.findings)


def test_tensor_parallel_sums_that_round_early_are_caught():
    report = examine(rows(exact_dot, sharded=partial_sums_in_bf16), only=["tensor parallel"])
    assert {finding.case.split(",")[0] for finding in report.findings} >= {"TP=2", "TP=4"}


def test_another_reference_is_caught():
    report = examine(
        rows(exact_dot, reference=lambda x, weight: exact_dot(x, weight) + 1.0),
        only=["same bits as the reference"],
    )
    assert len(report.findings) == len(COUNTS)


def test_a_finding_names_operator_case_row_element_and_both_bit_patterns():
    def third_row_is_off(x, weight):
        result = exact_dot(x, weight)
        if len(x) == 7:
            result[3, 5] = torch.nextafter(result[3, 5], torch.tensor(torch.inf))
        return result

    operator = rows(third_row_is_off)
    report = examine(operator, only=["batch size"])
    (finding,) = report.findings
    assert (finding.operator, finding.check, finding.case) == ("planted", "batch size", "M=7")
    assert finding.row == 3
    assert finding.difference.index == (3, 5)
    assert (finding.difference.differing, finding.difference.compared) == (1, 56)
    right = operator.together[0][3, 5]
    wrong = torch.nextafter(right, torch.tensor(torch.inf))
    assert finding.difference.expected_bits == bit_pattern(right)
    assert finding.difference.found_bits == bit_pattern(wrong)
    with pytest.raises(ConformanceError, match=re.escape(bit_pattern(wrong))) as caught:
        report.raise_if_failed()
    assert "planted: batch size, M=7" in str(caught.value)
    assert report.as_dict()["findings"][0]["difference"]["index"] == (3, 5)


def test_rows_are_named_as_the_inputs_count_them():
    def row_five_is_unsteady(x, weight):
        result = exact_dot(x, weight)
        if len(x) == 257 and not torch.equal(x[0], probe[0]):
            result[(x == probe[5]).all(-1)] += 1.0
        return result

    probe = normal(257, 24)
    report = examine(rows(row_five_is_unsteady), only=["position"])
    assert {finding.row for finding in report.findings} == {5}


def test_a_failing_call_is_a_finding_and_the_rest_still_runs():
    def breaks_at_three(x, weight):
        if len(x) == 3:
            raise IndexError("tile of 3")
        return exact_dot(x, weight)

    report = examine(rows(breaks_at_three), only=["batch size"])
    (finding,) = report.findings
    assert finding.problem == "raised IndexError: tile of 3"
    assert report.trials["batch size"] == len(COUNTS)


def test_another_dtype_or_shape_is_a_finding():
    def narrow_alone(x, weight):
        result = exact_dot(x, weight)
        return result.bfloat16() if len(x) == 1 else result

    (finding,) = examine(rows(narrow_alone), only=["batch size"]).findings
    assert "is torch.bfloat16 [1, 8] instead of torch.float32 [1, 8]" in str(finding)


def test_nothing_compared_is_not_a_pass():
    empty = Report(operators=("planted",), trials={})
    assert not empty.passed
    with pytest.raises(ConformanceError, match="no trial was made"):
        empty.raise_if_failed()


def test_unknown_checks_and_too_few_rows_are_refused():
    with pytest.raises(ValueError, match=r"planted has no check \['batchsize'\]"):
        examine(rows(exact_dot), only=["batchsize"])
    with pytest.raises(ValueError, match="257 are needed"):
        RowOperator(name="short", run=exact_dot, inputs={"x": normal(9, 24)})


def test_reports_add_up():
    one = examine(rows(exact_dot), only=["alone"])
    two = examine(rows(order_follows_single_row), only=["alone", "tensor parallel"])
    both = merge_reports([one, two])
    assert both.trials["alone"] == one.trials["alone"] + two.trials["alone"]
    assert both.findings == two.findings
    assert list(both.skipped) == ["planted: tensor parallel"]
    assert not both.passed


@pytest.mark.parametrize(
    ("a", "b", "index"),
    [
        ([0.0, 1.0], [0.0, 1.0], None),
        ([0.0, 0.0], [0.0, -0.0], (1,)),
        ([float("nan")], [float("nan")], None),
        ([1.0, 2.0, 3.0], [1.0, 2.5, 3.5], (1,)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_first_difference(a, b, index, dtype):
    found = first_difference(torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype))
    assert (found.index if found else None) == index


def test_bit_patterns_have_their_full_width():
    assert bit_pattern(torch.tensor(1.0)) == "0x3f800000"
    assert bit_pattern(torch.tensor(-0.0, dtype=torch.bfloat16)) == "0x8000"
    assert bit_pattern(torch.tensor(-1)) == "0x" + "f" * 16
    assert bit_pattern(torch.tensor(True)) == "0x01"


def test_masks():
    packed = block_mask(torch.tensor([0, 1, 0, 1, 2]))
    assert packed.int().tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1],
    ]  # fmt: skip
    assert causal_mask(2, 4).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


# --- routers -------------------------------------------------------------------


def router(run) -> RouterOperator:
    return RouterOperator(name="router", run=run, inputs={"logits": normal(257, 16)}, top_k=4)


def stable(logits):
    weights, ids = torch.sort(torch.softmax(logits, -1), dim=-1, descending=True, stable=True)
    return weights[:, :4], ids[:, :4]


def highest_id_first(logits):
    weights, ids = stable(logits.flip(-1))
    return weights, 15 - ids


def test_ties():
    assert examine(router(stable), only=["ties"]).passed
    report = examine(router(highest_id_first), only=["ties"])
    assert {f.case.split(",")[0] for f in report.findings} >= {"all equal", "equal across the cut"}


# --- attention -----------------------------------------------------------------


def careful(query, key, value, allowed):
    """Row-invariant: every row gathers its own keys and adds them one by one."""
    result = torch.zeros_like(query)
    per_group = query.shape[2] // key.shape[2]
    for b, t, h in itertools.product(*map(range, query.shape[:3])):
        seen = allowed[b, t].nonzero().flatten().tolist()
        if not seen:
            continue
        scores = torch.stack(
            [(query[b, t, h] * key[b, i, h // per_group]).double().cumsum(0)[-1] for i in seen]
        )
        weights = torch.exp(scores - scores.max())
        values = torch.stack([value[b, i, h // per_group].double() for i in seen])
        result[b, t, h] = ((weights[:, None] * values).cumsum(0)[-1] / weights.cumsum(0)[-1]).to(
            query.dtype
        )
    return result


def dense(query, key, value, allowed):
    scores = torch.einsum("bthd,blhd->bhtl", query, key.repeat_interleave(2, 2))
    weights = torch.softmax(scores.masked_fill(~allowed[:, None], -torch.inf), -1).nan_to_num(0.0)
    return torch.einsum("bhtl,blhd->bthd", weights, value.repeat_interleave(2, 2))


def attention(run) -> AttentionOperator:
    return AttentionOperator(
        name="attention", run=run, query=normal(11, 2, 4), key=normal(11, 1, 4, seed=1),
        value=normal(11, 1, 4, seed=2),
    )  # fmt: skip


def forgets_the_mask_of_single_tokens(query, key, value, allowed):
    return careful(query, key, value, allowed | (allowed.shape[1] == 1))


def looks_one_ahead_in_chunks(query, key, value, allowed):
    wider = allowed.clone()
    if 1 < allowed.shape[1] < allowed.shape[2]:
        wider[:, 0, 0] = False
    return careful(query, key, value, wider)


def ignores_blocks(query, key, value, allowed):
    return careful(query, key, value, causal_mask(*allowed.shape[1:]).expand(allowed.shape))


def heads_share_a_scale(query, key, value, allowed):
    return careful(query * (1.0 + query.shape[2] * 1e-3), key, value, allowed)


def rounds_by_length(query, key, value, allowed):
    return careful(query, key, value, allowed) * (1.0 + key.shape[1] * 2.0**-20)


def test_careful_attention_passes():
    report = examine(attention(careful))
    assert report.passed, "\n".join(map(str, report.findings))


@pytest.mark.parametrize(
    ("run", "check"),
    [
        (rounds_by_length, "prompt length"),
        (rounds_by_length, "one token"),
        (looks_one_ahead_in_chunks, "chunked prefill"),
        (dense, "padding"),
        (dense, "batch"),
        (ignores_blocks, "packing"),
        (dense, "neighbours"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_each_attention_check_catches_what_it_is_about(run, check):
    assert examine(attention(run), only=[check]).failed_checks == {check}


def test_heads_that_share_are_caught():
    operator = AttentionOperator(
        name="attention", run=heads_share_a_scale, query=normal(5, 4, 4), key=normal(5, 2, 4),
        value=normal(5, 2, 4),
    )  # fmt: skip
    report = examine(operator, only=["tensor parallel"])
    assert {finding.case for finding in report.findings} == {"TP=2"}


# --- the paged cache -------------------------------------------------------------


def write(cache, key, value, slots):
    size = cache.shape[1]
    cache[slots // size, slots % size] = torch.cat([key, value], -1)


def gathers(query, cache, table, lengths, starts, *, fault=""):
    """Collects each request's tokens; ``fault`` names what it does wrong."""
    out = []
    for r, length in enumerate(lengths.tolist()):
        mine = query[int(starts[r]) : int(starts[r + 1])]
        size = cache.shape[1]
        blocks = table[r][: -(-length // size)].long()
        if fault == "assumes ascending blocks":
            blocks = blocks.sort().values
        entries = cache[blocks].flatten(0, 1)
        if fault != "reads whole blocks":
            entries = entries[:length]
        key, value = entries.chunk(2, -1)
        allowed = causal_mask(length, length)[length - len(mine) :]
        if fault == "chunks start at zero" and len(mine) < length:
            allowed = causal_mask(len(mine), length).roll(len(mine) - length, 1)
        if fault == "forgets the last key" and len(mine) == 1 and length > 1:
            allowed = allowed & (torch.arange(length) < length - 1)
        if fault == "reads whole blocks":
            pad = torch.ones(len(mine), len(entries) - length, dtype=torch.bool)
            allowed = torch.cat([allowed, pad], 1)
        if fault == "order follows threads" and torch.get_num_threads() > 1:
            mine = mine * (1 + 2.0**-20)
        if fault == "batch decides" and len(lengths) > 1 and len(mine) == 1:
            mine = mine * (1 + 2.0**-20)
        out.append(careful(mine[None], key[None], value[None], allowed[None])[0])
    return torch.cat(out)


def paged(fault: str = "") -> PagedOperator:
    sizes = (9, 1, 4)
    return PagedOperator(
        name="paged",
        cache=lambda blocks, size: torch.empty(blocks, size, 1, 8),
        write=write,
        read=lambda *arguments: gathers(*arguments, fault=fault),
        dense=careful,
        query=tuple(normal(n, 2, 4, seed=n) for n in sizes),
        key=tuple(normal(n, 1, 4, seed=n + 20) for n in sizes),
        value=tuple(normal(n, 1, 4, seed=n + 40) for n in sizes),
        block_sizes=(4, 2),
    )


def test_paged_attention_that_gathers_right_passes():
    report = examine(paged())
    assert report.passed, "\n".join(map(str, report.findings))


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("assumes ascending blocks", "block order"),
        ("reads whole blocks", "unused slots"),
        ("chunks start at zero", "chunked prefill"),
        ("forgets the last key", "decode"),
        ("batch decides", "mixed batch"),
        ("forgets the last key", "cached prompt"),
        ("order follows threads", "threads"),
    ],
)
def test_each_paged_check_catches_what_it_is_about(fault, check):
    assert examine(paged(fault), only=[check]).failed_checks == {check}


# --- stock operators on this machine -----------------------------------------------


def test_stock_operators_do_not_pass():
    """What the exact providers are for; the planted operators above do not depend on the CPU."""
    counts = (1, 2, 3, 7, 31, 32, 33, 255, 256, 257)
    inputs = {"x": normal(257, 768)}
    stock = SimpleNamespace(
        linear=RowOperator(
            name="F.linear", run=lambda x, weight: F.linear(x, weight), inputs=inputs,
            weights={"weight": normal(128, 768, seed=1)}, row_counts=counts,
        ),
        silu=RowOperator(
            name="F.silu", run=F.silu, inputs={"input": normal(257, 99)}, row_counts=counts
        ),
        topk=RouterOperator(
            name="torch.topk", run=lambda logits: torch.topk(torch.softmax(logits, -1), 8),
            inputs={"logits": normal(257, 128)}, top_k=8, row_counts=counts,
        ),
        attention=AttentionOperator(
            name="scaled_dot_product_attention",
            run=lambda q, k, v, allowed: F.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=allowed[:, None],
                enable_gqa=True,
            ).transpose(1, 2),
            query=normal(70, 4, 32), key=normal(70, 2, 32), value=normal(70, 2, 32),
        ),
    )  # fmt: skip
    reports = {name: examine(operator) for name, operator in vars(stock).items()}
    failed = {name: sorted(report.failed_checks) for name, report in reports.items()}
    assert "ties" in failed["topk"], failed
    assert "alone" in failed["linear"], failed
    assert failed["attention"], failed
