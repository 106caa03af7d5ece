"""Exact sums over slots, slices and ranks: no order, no cut and no rank is visible."""

from __future__ import annotations

import itertools
import sys
from fractions import Fraction

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from patchkit.providers.cuda import sums  # noqa: E402

# The package has a function of this name.
linear = sys.modules["patchkit.providers.cuda.linear"]


def draw(device: str, *shape: int, seed: int = 0, spread: float = 8.0) -> torch.Tensor:
    """Numbers of very different size, where the order of a sum shows."""
    made = torch.Generator().manual_seed(seed + sum(shape))
    values = torch.randn(shape, generator=made)
    values *= torch.exp2(torch.empty(shape).uniform_(-spread, spread, generator=made).round())
    return values.to(torch.bfloat16).to(device)


def operand(device: str, *shape: int) -> torch.Tensor:
    """For a product; Triton's interpreter multiplies bf16 numbers as if they were integers."""
    drawn = draw(device, *shape, spread=1.0)
    return drawn if device == "cuda" else drawn.float()


def by_hand(each: torch.Tensor) -> torch.Tensor:
    """The definition, in rational numbers: ``[S, T, k, H]`` to ``[T, H]`` float64."""
    slices, tokens, slots, width = each.shape
    out = torch.empty(tokens, width, dtype=torch.float64)
    for t, h in itertools.product(range(tokens), range(width)):
        quanta = sum(
            # Python rounds halves to even, as IEEE does.
            round(Fraction(float(each[s, t, k, h])) * 2**sums.QUANTUM_BITS)
            for s, k in itertools.product(range(slices), range(slots))
        )
        out[t, h] = float(Fraction(quanta, 2**sums.QUANTUM_BITS))
    return out


@pytest.mark.parametrize("shape", [(2, 3, 8, 40), (1, 1, 1, 7), (2, 5, 1, 64)])
def test_the_sum_is_the_one_of_rational_numbers(device: str, shape: tuple[int, ...]) -> None:
    each = draw(device, *shape, spread=12.0)
    expected = by_hand(each.cpu())
    assert torch.equal(sums.partial_sum(each).cpu(), expected)
    # Triton's interpreter cuts bf16 results off instead of rounding them.
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    assert torch.equal(sums.whole_sum(each.to(dtype)).cpu(), expected.float().to(dtype))
    assert torch.equal(sums.rounded(expected.to(device), dtype).cpu(), expected.float().to(dtype))


def test_summands_below_the_quantum_are_rounded_and_not_lost_silently(device: str) -> None:
    tiny = sums.QUANTUM * 0.75
    each = torch.tensor([[[[tiny]], [[tiny / 2]]]], dtype=torch.bfloat16, device=device)
    assert sums.partial_sum(each).flatten().tolist() == [sums.QUANTUM, 0.0]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[::5])
def test_the_order_is_not_visible(device: str, order: tuple[int, ...]) -> None:
    each = draw(device, 2, 6, 4, 48)
    assert torch.equal(sums.partial_sum(each[:, :, list(order)]), sums.partial_sum(each))
    assert torch.equal(sums.partial_sum(each.flip(0)), sums.partial_sum(each))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("by", ["slices", "slots"])
def test_ranks_are_not_visible(device: str, ranks: int, by: str) -> None:
    """Tensor parallelism shares slices, expert parallelism slots; all-reduces add in any order."""
    each = draw(device, 4, 2, 8, 96, seed=3)
    parts = []
    for rank in range(ranks):
        own = torch.zeros_like(each)
        if by == "slices":
            own = each[rank * 4 // ranks : (rank + 1) * 4 // ranks]
        else:
            own[:, :, rank::ranks] = each[:, :, rank::ranks]
        parts.append(sums.partial_sum(own))
    orders = list(itertools.permutations(parts))
    for order in orders if ranks < 4 else orders[::5]:
        total = order[0].clone()
        for part in order[1:]:
            total += part
        assert torch.equal(sums.rounded(total), sums.whole_sum(each))


def test_bf16_ranks_would_be_visible(device: str) -> None:
    """What the exact sum is for: the engine's own way gives other bits for other cuts."""
    each = draw(device, 4, 5, 8, 96, seed=3)
    inner = each.float().sum(2).to(torch.bfloat16)
    one_by_one = inner[0] + inner[1] + inner[2] + inner[3]
    assert not torch.equal(one_by_one, (inner[0] + inner[2]) + (inner[1] + inner[3]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), sums.LIMIT, -(2.0**20)])
def test_what_does_not_fit_becomes_nan(device: str, bad: float) -> None:
    each = draw(device, 2, 3, 4, 16, spread=1.0)
    each[1, 2, 3, 5] = bad
    total = sums.whole_sum(each)
    assert total[2, 5].isnan()
    assert total.isnan().sum() == 1
    assert sums.partial_sum(each)[2, 5].isnan()


def test_the_largest_sum_is_exact(device: str) -> None:
    """As many summands as may meet, as large as they may be, and the smallest quantum."""
    largest = float(torch.tensor(sums.LIMIT, dtype=torch.bfloat16)) * (1 - 2.0**-8)
    each = torch.full((1, 1, sums.MOST_TERMS, 1), largest, dtype=torch.bfloat16, device=device)
    each[0, 0, 0, 0] = sums.QUANTUM
    found = Fraction(float(sums.partial_sum(each)[0, 0]))
    assert found == (sums.MOST_TERMS - 1) * Fraction(largest) + Fraction(sums.QUANTUM)


def test_more_summands_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match="at most 256 summands"):
        sums.partial_sum(draw(device, 2, 1, 129, 16))


@pytest.mark.parametrize("rows", [1, 5, 33])
def test_slices_of_a_product_are_products_of_slices(device: str, rows: int) -> None:
    x, w = operand(device, rows, 256), operand(device, 96, 256)
    apart = linear.slice_products(x, w, slices=2)
    assert apart.shape == (2, rows, 1, 96)
    for number in (0, 1):
        cut = slice(number * 128, number * 128 + 128)
        alone = linear.linear_forward(x[:, cut].contiguous(), w[:, cut].contiguous())
        assert torch.equal(apart[number, :, 0], alone)


@pytest.mark.parametrize(("slices", "ranks"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_a_row_parallel_product_does_not_show_its_ranks(
    device: str, slices: int, ranks: int
) -> None:
    x, w = operand(device, 9, 512), operand(device, 64, 512)
    whole = linear.linear(x, w, slices=slices, exact=True)
    total = torch.zeros(9, 64, dtype=torch.float64, device=device)
    for rank in range(ranks):
        cut = slice(rank * 512 // ranks, (rank + 1) * 512 // ranks)
        total += sums.partial_sum(
            linear.slice_products(x[:, cut], w[:, cut], slices=slices // ranks)
        )
    assert torch.equal(sums.rounded(total, whole.dtype), whole)


def test_the_gradient_is_the_products(device: str) -> None:
    x, w = operand(device, 6, 256).requires_grad_(), operand(device, 32, 256).requires_grad_()
    grad = operand(device, 6, 32)
    output = linear.linear(x, w, slices=2, exact=True)
    found = torch.autograd.grad(output, [x, w], grad)
    a, b = (t.detach().double().requires_grad_() for t in (x, w))
    assert float((output.double() - a @ b.t()).detach().norm() / (a @ b.t()).detach().norm()) < 5e-3
    expected = torch.autograd.grad(a @ b.t(), [a, b], grad.double())
    for one, other in zip(found, expected, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 5e-3
