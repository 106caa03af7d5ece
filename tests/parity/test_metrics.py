"""Comparison of selected-token log-probabilities."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from patchkit.parity.metrics import (  # noqa: E402
    ParityMetrics,
    compare_logprobs,
    compare_rows,
    merge_metrics,
)

pytestmark = pytest.mark.stack


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def compare(a, b, **kwargs) -> ParityMetrics:
    return compare_logprobs(a, b, positions=list(range(5, 5 + max(len(a), len(b)))), **kwargs)


def test_equal_bits_are_exact():
    a = -torch.rand(1000)
    m = compare(a, a.clone())
    assert m.exact
    assert (m.token_count, m.mismatch_count, m.max_absdiff, m.k3_mean) == (1000, 0, 0.0, 0.0)


def test_one_ulp_is_a_mismatch_and_is_described():
    a = vector(-1.0, -2.0, -3.0)
    b = a.clone()
    b[1] = torch.nextafter(b[1], torch.tensor(0.0))
    m = compare(a, b, token_ids=[7, 8, 9], sequences=[4, 4, 5])
    assert not m.exact
    assert m.mismatch_count == 1
    (first,) = m.first_mismatches
    assert (first.sequence, first.position, first.token_id) == (4, 6, 8)
    assert (first.rollout_bits, first.replay_bits) == ("0xc0000000", "0xbfffffff")
    assert m.max_absdiff == float(b[1] - a[1])
    d = float(b[1]) - float(a[1])
    assert m.k3_max == pytest.approx(math.expm1(d) - d)


def test_minus_zero_is_not_zero():
    m = compare(vector(0.0), vector(-0.0))
    assert m.mismatch_count == 1
    assert m.max_absdiff == 0.0
    assert {m.first_mismatches[0].rollout_bits, m.first_mismatches[0].replay_bits} == {
        "0x00000000",
        "0x80000000",
    }


def test_k3_against_its_definition():
    a, b = -torch.rand(64), -torch.rand(64)
    m = compare(a, b)
    d = b.double() - a.double()
    k3 = torch.exp(d) - 1 - d
    assert m.k3_mean == pytest.approx(float(k3.mean()))
    assert m.k3_max == pytest.approx(float(k3.max()))


@pytest.mark.parametrize(
    ("a", "b", "problem"),
    [
        (vector(math.nan), vector(math.nan), "not finite"),
        (vector(-math.inf), vector(-math.inf), "not finite"),
        (vector(-1.0), vector(-1.0).double(), "wrong dtype"),
        (vector(-1.0).bfloat16(), vector(-1.0).bfloat16(), "wrong dtype"),
        (vector(-1.0, -1.0), vector(-1.0), "different shapes"),
        (vector(-1.0).reshape(1, 1), vector(-1.0).reshape(1, 1), "wrong shape"),
    ],
    ids=["nan", "inf", "float64", "both-bf16", "length", "matrix"],
)
def test_what_cannot_be_compared_is_a_violation_and_never_equal(a, b, problem):
    m = compare_logprobs(a, b, positions=[0] * max(a.numel(), b.numel()))
    assert not m.exact
    assert m.mismatch_count == m.token_count
    assert problem in {v.problem for v in m.violations}


def test_a_nan_beside_good_tokens_counts_once():
    m = compare(vector(-1.0, math.nan, -2.0), vector(-1.0, math.nan, -2.0))
    assert (m.mismatch_count, m.finite_count) == (1, 2)
    assert "position 6" in m.violations[0].found


def test_every_wrong_label_is_reported():
    m = compare_logprobs(
        vector(-1.0), vector(-1.0), positions=[1, 2], token_ids=[], sequences=[0, 0, 0]
    )
    assert [v.subject for v in m.violations] == ["positions", "token_ids", "sequences"]


def test_whole_rows_show_a_logit_that_was_not_drawn():
    a = torch.randn(3, 7)
    b = a.clone()
    b[1, 5] = torch.nextafter(b[1, 5], torch.tensor(9.0))
    m = compare_rows(a, b, positions=[10, 11, 30], sequences=[0, 0, 4])
    assert (m.token_count, m.mismatch_count) == (21, 1)
    (first,) = m.first_mismatches
    assert (first.sequence, first.position, first.token_id) == (0, 11, 5)
    assert compare_rows(a, a.clone(), positions=[1, 2, 3]).exact


@pytest.mark.parametrize("shape", [(3, 8), (4, 7), (21,)])
def test_rows_of_another_shape_are_never_equal(shape):
    m = compare_rows(torch.zeros(3, 7), torch.zeros(*shape), positions=[1, 2, 3])
    assert not m.exact
    assert "not the same rows" in m.violations[0].problem


def test_rows_with_masked_entries_are_not_exact():
    a = torch.full((1, 2), -math.inf)
    assert "not finite" in compare_rows(a, a, positions=[1]).violations[0].problem


def test_nothing_compared_is_not_exact():
    assert not compare(torch.zeros(0), torch.zeros(0)).exact


def test_merging_is_the_comparison_of_the_whole():
    a, b = -torch.rand(50), -torch.rand(50)
    b[::3] = a[::3]
    whole = compare(a, b)
    parts = merge_metrics([compare(a[:7], b[:7]), compare(a[7:7], b[7:7]), compare(a[7:], b[7:])])
    assert parts.mismatch_count == whole.mismatch_count
    assert parts.max_absdiff == whole.max_absdiff
    assert parts.k3_mean == pytest.approx(whole.k3_mean)


def test_survives_a_round_trip():
    m = compare(vector(-1.0, math.nan), vector(-1.5, 0.0))
    assert ParityMetrics.from_dict(m.as_dict()) == m
