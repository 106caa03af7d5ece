"""rollout = recompute = first training forward."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from patchkit.parity.oracle import SelectedLogprobs, three_way  # noqa: E402

pytestmark = pytest.mark.stack


def selected(values=(-1.0, -2.0, -3.0), *, tokens=(7, 8, 9), positions=(4, 5, 2)):
    return SelectedLogprobs(
        logprobs=torch.tensor(values, dtype=torch.float32),
        sequences=torch.tensor([0, 0, 1]),
        positions=torch.tensor(positions),
        token_ids=torch.tensor(tokens),
    )


def judge(rollout=None, recompute=None, first=None, *, start=3, end=3, **kwargs):
    return three_way(
        rollout,
        recompute,
        first,
        trainer_version=3,
        start_versions=start,
        end_versions=end,
        **kwargs,
    )


def test_three_equal_ones_are_exact():
    r = judge(selected(), selected(), selected())
    assert r.exact
    assert r.token_count == 3


@pytest.mark.parametrize(
    ("given", "subject"),
    [
        ((selected(), None, selected()), "recompute"),
        ((selected(), selected(), None), "first training forward"),
        ((None, selected(), selected()), "rollout"),
    ],
)
def test_a_missing_side_is_a_violation(given, subject):
    r = judge(*given)
    assert [v.subject for v in r.violations] == [subject]
    assert "missing" in r.violations[0].problem


def test_each_comparison_is_judged_by_itself():
    other = selected((-1.0, -2.0, -3.5))
    r = judge(selected(), selected(), other)
    assert (r.recompute.mismatch_count, r.first_forward.mismatch_count) == (0, 1)
    (v,) = r.violations
    assert "first training forward" in v.subject
    assert "sequence 1, position 2, token 9" in v.found


@pytest.mark.parametrize(
    ("other", "subject"),
    [
        (selected(tokens=(7, 8, 1)), "token_ids"),
        (selected(positions=(5, 6, 3)), "positions"),
    ],
)
def test_other_tokens_are_not_compared(other, subject):
    r = judge(selected(), other, selected())
    (v,) = r.violations
    assert v.subject.startswith(subject)
    assert r.recompute.mismatch_count == 3


@pytest.mark.parametrize(
    ("start", "end", "words"),
    [
        ([3, 2], [3, 3], ["start", "sequence 1: version 2"]),
        ([3, 3], [3, 4], ["end", "sequence 1: version 4"]),
        (2, 2, ["start", "sequence 0: version 2"]),
    ],
)
def test_versions(start, end, words):
    r = judge(selected(), selected(), selected(), start=start, end=end)
    text = str(r.violations[0])
    assert all(w in text for w in words)
    assert not r.exact


@pytest.mark.parametrize(("start", "end"), [([], []), ([3], [3, 3]), (3, iter([3]))])
def test_every_sequence_needs_a_version(start, end):
    r = judge(selected(), selected(), selected(), start=start, end=end)
    assert "not given for every sequence" in str(r.violations[0])
    nothing = SelectedLogprobs.from_sequences([], [], [])
    assert judge(nothing, nothing, nothing, start=[], end=[]).exact, "a rank without sequences"


def test_an_optimizer_step_before_the_first_forward():
    r = judge(selected(), selected(), selected(), optimizer_version=4)
    assert "optimizer step came before" in str(r.violations[0])


def test_padded_and_listed_tokens_are_the_same():
    lps = torch.tensor([[0.0, 0.0, -1.0, -2.0], [0.0, -3.0, 0.0, 0.0]])
    ids = torch.tensor([[5, 6, 7, 8], [5, 9, 0, 0]])
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 0]], dtype=torch.bool)
    padded = SelectedLogprobs.from_padded(lps, ids, mask)
    listed = SelectedLogprobs.from_sequences([[-1.0, -2.0], [-3.0]], [[7, 8], [9]], [2, 1])
    assert judge(listed, padded, padded).exact


def test_left_padding_is_told_by_position_ids():
    lps = torch.tensor([[0.0, 0.0, 0.0, -1.0]])
    mask = torch.tensor([[False, False, False, True]])
    padded = SelectedLogprobs.from_padded(
        lps, torch.tensor([[0, 0, 5, 7]]), mask, position_ids=torch.tensor([[0, 0, 0, 1]])
    )
    assert judge(SelectedLogprobs.from_sequences([[-1.0]], [[7]], [1]), padded, padded).exact


def test_a_wrong_dtype_is_not_cast_away():
    wrong = SelectedLogprobs.from_sequences([torch.tensor([-1.0]).bfloat16()], [[7]], [1])
    right = SelectedLogprobs.from_sequences([[-1.0]], [[7]], [1])
    assert "wrong dtype" in str(judge(right, wrong, right).violations[0])
