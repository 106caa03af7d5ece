"""The grouped product against a plain one, on a GPU or in Triton's interpreter.

In the interpreter bf16 is not multiplied as such, so operands are float16 there.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from patchkit.providers.cuda.grouped import Aligned, grouped_product, tile_for  # noqa: E402
from patchkit.providers.cuda.linear import Tile  # noqa: E402

EXPERTS, OUTPUTS, WIDTH, TOKENS, TOP_K = 6, 48, 192, 11, 3
TILE = Tile(16, 32, 64, 2, 4, 2)


def operand(device: str, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    dtype = torch.float16 if device == "cpu" else torch.bfloat16
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def chosen(device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)]
    return torch.stack(rows).flatten().to(device)


def aligned(ids: torch.Tensor, block: int, local: dict[int, int]) -> Aligned:
    """As vLLM's, with rubbish where nothing may be read."""
    pairs: list[int] = []
    experts: list[int] = []
    for expert in range(EXPERTS):
        mine = (ids == expert).nonzero()[:, 0].tolist()
        while len(mine) % block:
            mine.append(ids.numel())
        pairs += mine
        experts += [local.get(expert, -1)] * (len(mine) // block)
    filled = len(pairs)
    return Aligned(
        *(
            torch.tensor(values, dtype=torch.int32, device=ids.device)
            for values in (pairs + [99999] * block, [*experts, 77], [filled])
        )
    )


@pytest.mark.parametrize("slices", [1, 2, 3, 4])
@pytest.mark.parametrize("absent", [(), (0, 4)])
@pytest.mark.parametrize("tile", [TILE, TILE._replace(m=32, k=128, group=1)])
def test_every_slice_of_every_pair(
    device: str, slices: int, absent: tuple[int, ...], tile: Tile
) -> None:
    x, ids = operand(device, TOKENS * TOP_K, WIDTH), chosen(device)
    here = [e for e in range(EXPERTS) if e not in absent]
    w = operand(device, EXPERTS, OUTPUTS, WIDTH)
    weight = torch.rand(TOKENS * TOP_K, device=device)
    out = torch.full((slices, TOKENS * TOP_K, OUTPUTS), float("nan"), device=device).to(x.dtype)
    blocks = aligned(ids, tile.m, {e: i for i, e in enumerate(here)})
    grouped_product(x, w[here], blocks, out, tile, weight_P=weight)
    for number, cut in enumerate(torch.arange(WIDTH).chunk(slices)):
        expected = torch.einsum("pk,pnk->pn", x[:, cut].double(), w[ids][:, :, cut].double())
        expected *= weight[:, None].double()
        for expert in absent:
            expected[ids == expert] = 0
        error = (out[number].double() - expected).norm() / expected.norm()
        assert float(error) < (1e-3 if device == "cpu" else 1e-2)


def test_a_token_is_the_operand_of_all_its_pairs(device: str) -> None:
    x, ids = operand(device, TOKENS, WIDTH), chosen(device)
    w = operand(device, EXPERTS, OUTPUTS, WIDTH)
    one, other = (torch.empty(1, TOKENS * TOP_K, OUTPUTS).to(x) for _ in range(2))
    blocks = aligned(ids, TILE.m, {e: e for e in range(EXPERTS)})
    grouped_product(x, w, blocks, one, TILE)
    grouped_product(x.repeat_interleave(TOP_K, dim=0), w, blocks, other, TILE)
    assert torch.equal(one, other)
    assert float(one.abs().sum()) > 0


@pytest.mark.parametrize(
    ("width", "slices", "wrong"),
    [(192, 5, "do not belong together"), (96, 4, "multiple of 16")],
)
def test_what_cannot_be_sliced_is_refused(device: str, width: int, slices: int, wrong: str) -> None:
    x, w = operand(device, TOKENS * TOP_K, width), operand(device, EXPERTS, OUTPUTS, width)
    out = torch.empty(slices, TOKENS * TOP_K, OUTPUTS).to(x)
    blocks = aligned(chosen(device), TILE.m, {})
    with pytest.raises(ValueError, match=wrong):
        grouped_product(x, w, blocks, out, TILE)


def test_few_tiles(device: str) -> None:
    tiles = {tile_for(count / 128) for count in range(0, 2**17, 8)}
    assert len(tiles) == 3, "every tile is compiled while an engine starts"
