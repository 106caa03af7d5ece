"""Sequence boundaries and topologies; needs no GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from patchkit.providers.cuda.packing import Packing  # noqa: E402
from patchkit.providers.cuda.topology import RolloutTopology  # noqa: E402

pytestmark = pytest.mark.anywhere


@pytest.mark.parametrize(
    ("positions", "mask", "starts", "longest", "rows"),
    [
        ([[0, 1, 2]], None, [0, 3], 3, None),
        ([[0, 1, 0, 1, 2, 0]], None, [0, 2, 5, 6], 3, None),  # packed
        ([[0, 1], [0, 1]], None, [0, 2, 4], 2, None),  # a batch
        ([[0, 1, 2], [0, 1, 2]], [[1, 1, 0], [1, 1, 1]], [0, 2, 5], 3, [0, 1, 3, 4, 5]),
        ([[0, 0, 1], [0, 1, 2]], [[0, 1, 1], [1, 1, 1]], [0, 2, 5], 3, [1, 2, 3, 4, 5]),
        ([[0, 1], [0, 1]], [[0, 0], [1, 0]], [0, 1], 1, [2]),  # an empty row
    ],
)
def test_boundaries(positions, mask, starts, longest, rows) -> None:
    found = Packing.of(torch.tensor(positions), None if mask is None else torch.tensor(mask))
    assert found.starts.tolist() == starts
    assert found.starts.dtype == torch.int32
    assert found.longest == longest
    assert (None if found.rows is None else found.rows.tolist()) == rows


def test_padding_comes_back_as_zero() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    packing = Packing.of(torch.tensor([[0, 1, 2]] * 2), mask)
    x = torch.arange(1.0, 7.0)[:, None]
    assert packing.scatter(packing.gather(x), 6)[:, 0].tolist() == [1, 2, 0, 4, 0, 0]


def test_more_than_two_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="tensor_parallel=4"):
        RolloutTopology(tensor_parallel=4)


def test_expert_parallelism_cuts_experts_whole() -> None:
    both = RolloutTopology(tensor_parallel=2, expert_parallel=True)
    assert (both.expert_slices, both.expert_blocks) == (1, 2)
    assert RolloutTopology(tensor_parallel=2).expert_slices == 2
