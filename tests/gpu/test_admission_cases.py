"""The trials of ``patchkit admit patchkit.providers.cuda``, dry: what passes, what is refused.

On a GPU the command itself is the test. Here vLLM's kernels are played by PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from conftest import DEVICE  # noqa: E402

from patchkit.bindings import cuda_cases  # noqa: E402
from patchkit.bindings.cuda_cases import Cases, Sizes  # noqa: E402
from patchkit.parity.admission import tried  # noqa: E402
from patchkit.providers import cuda  # noqa: E402

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="a GPU has `patchkit admit`")

SMALL = Cases(
    device="cpu",
    dtype=torch.float32,
    whole=True,
    sizes=Sizes(
        hidden=256,
        outputs=64,
        heads=4,
        kv_heads=2,
        head_size=16,
        positions=64,
        theta=1e4,
        experts=8,
        top_k=2,
        width=64,
        vocabularies=(99,),
        rows=(1, 3, 17),
        few_rows=(1, 3, 8),
        many_rows=9,
        sequences=(1, 3, 8),
        longest=20,
    ),
)


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    if DEVICE == "cpu":
        from stand_ins import install

        install()


@pytest.mark.parametrize("case", list(SMALL.all()), ids=lambda case: case.operator.name)
def test_what_equals_the_engine_passes(case: Any) -> None:
    outcome = tried(case)
    assert not outcome["violations"], str(outcome["violations"][0])
    assert outcome["trials"] > 30
    assert outcome["largest_difference"] == 0.0


def test_every_operator_is_tried() -> None:
    names = {name for name in cuda.__all__ if not isinstance(getattr(cuda, name), type)}
    assert {case.name for case in SMALL.all()} == names


def named_case(name: str) -> Any:
    method, *slices = name.split()
    return getattr(SMALL, method)(*map(int, slices))


def one_ulp(result: Any) -> Any:
    return (
        result + (torch.nextafter(result.detach(), result.new_tensor(torch.inf)) - result).detach()
    )


def alone(result: Any) -> Any:
    return one_ulp(result) if len(result) == 1 else result


def first(result: Any) -> Any:
    return torch.cat([one_ulp(result[:1]), result[1:]])


def beside(result: Any) -> Any:
    return result + 0 * result.sum()


def next_to(result: Any) -> Any:
    return result + result.roll(1, 0)


def steeper(result: Any) -> Any:
    return result.detach() + 2 * (result - result.detach())


def flat(result: Any) -> Any:
    return result.detach()


@pytest.mark.parametrize(
    ("case", "operator", "wrong", "named"),
    [
        ("linear", "linear", one_ulp, "same bits as the reference"),
        ("linear", "linear", alone, "alone"),
        ("linear", "linear", first, "position"),
        ("linear", "linear", beside, "neighbours"),
        ("linear", "linear", steeper, "has another gradient"),
        ("linear", "linear", flat, "has no gradient"),
        ("linear_of_any_rank 2", "linear", one_ulp, "tensor parallel, TP=2"),
        ("rotate", "rotate", one_ulp, "same bits as the reference"),
        ("attention", "attention", one_ulp, "same bits as the reference"),
        ("attention", "attention", next_to, "neighbours"),
        ("experts_of_one_rank", "experts", alone, "batch size"),
        ("experts_of_two_blocks", "experts", one_ulp, "same bits as the reference"),
        ("experts_of_any_block 4", "experts", one_ulp, "tensor parallel, TP=4"),
        ("add_rms_norm", "add_rms_norm_forward", lambda both: both[::-1], "same bits"),
        ("route", "route", lambda both: (both[0], both[1].flip(1)), "ties"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_wrong_is_refused(
    case: str,
    operator: str,
    wrong: Callable[[Any], Any],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = getattr(cuda, operator)
    monkeypatch.setattr(cuda, operator, lambda *a, **k: wrong(right(*a, **k)))
    found = "\n".join(map(str, tried(named_case(case))["violations"]))
    assert named in found


def test_a_sum_that_shows_its_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank rounds what it has, as an all-reduce of the operands' format would."""
    right = cuda_cases.partial_sum
    coarse = 2.0**2
    monkeypatch.setattr(
        cuda_cases, "partial_sum", lambda each: (right(each) * coarse).round() / coarse
    )
    found = "\n".join(map(str, tried(SMALL.linear_of_any_rank(2))["violations"]))
    assert "tensor parallel, TP=2" in found
