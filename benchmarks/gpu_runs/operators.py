"""What each operator takes, and what that is of the card's limits.

The experts also by tile and number of slices, since a tile that suits the whole width
need not suit a slice of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HIDDEN, WIDTH, EXPERTS, TOP_K, VOCABULARY = 2048, 768, 128, 8, 151936
ROWS = (64, 256, 2048, 8192)
TILES = tuple(
    {
        "BLOCK_SIZE_M": m,
        "BLOCK_SIZE_N": n,
        "BLOCK_SIZE_K": k,
        "GROUP_SIZE_M": 1,
        "SPLIT_K": 1,
        "num_warps": warps,
        "num_stages": stages,
    }
    for m, n, k, warps, stages in (
        (16, 128, 128, 4, 3),
        (32, 128, 64, 4, 4),
        (32, 256, 128, 4, 2),
        (64, 64, 32, 4, 3),
        (64, 128, 64, 4, 4),
        (128, 256, 64, 8, 4),
    )
)


def measure(target: Path) -> list[dict[str, Any]]:
    """Time everything on the current GPU and write it."""
    limits = _limits()
    found: list[dict[str, Any]] = [{"limits": limits}]
    for rows in ROWS:
        for name, work, bytes_moved, operations in _operators(rows):
            seconds = _median(work)
            found.append(
                {
                    "operator": name,
                    "rows": rows,
                    "microseconds": round(seconds * 1e6, 2),
                    "of_memory_limit": round(bytes_moved / seconds / limits["bytes_per_second"], 3),
                    "of_arithmetic_limit": round(
                        operations / seconds / limits["operations_per_second"], 3
                    ),
                }
            )
            print(found[-1], flush=True)
            target.write_text(json.dumps(found, indent=1))
    return found


def _median(work: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    return float(do_bench(work, warmup=25, rep=100, return_mode="median")) / 1e3


def _limits() -> dict[str, float]:
    """A large copy and a large product on this card."""
    source = torch.empty(2**30, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    copied = _median(partial(target.copy_, source))
    a, b = (_draw(8192, 8192) for _ in range(2))
    multiplied = _median(partial(torch.matmul, a, b))
    return {
        "bytes_per_second": 2 * 2**32 / copied,
        "operations_per_second": 2 * 8192**3 / multiplied,
    }


def _draw(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * scale


def _operators(rows: int) -> list[tuple[str, Callable[[], Any], int, int]]:
    """Name, call, bytes that have to move, operations that have to be done."""
    from patchkit.providers import cuda
    from patchkit.providers.cuda import sums
    from patchkit.providers.cuda.experts import expert_outputs, tile_for
    from patchkit.providers.cuda.linear import linear_forward, slice_products
    from patchkit.providers.cuda.router import route_forward

    def exact_product(x: Tensor, w: Tensor) -> Tensor:
        return sums.whole_sum(slice_products(x, w, slices=2))

    found: list[tuple[str, Callable[[], Any], int, int]] = []
    for name, outputs, inputs in (
        ("qkv", 5120, HIDDEN),
        ("o", HIDDEN, 4096),
        ("router", EXPERTS, HIDDEN),
        ("lm_head", VOCABULARY, HIDDEN),
    ):
        if name == "lm_head" and rows > 2048:
            continue  # logits are asked for where a token was sampled
        x, w = _draw(rows, inputs), _draw(outputs, inputs, scale=0.02)
        moved = 2 * (rows * inputs + outputs * inputs + rows * outputs)
        done = 2 * rows * inputs * outputs
        found.append((f"linear {name}", partial(linear_forward, x, w), moved, done))
        found.append((f"cuBLAS {name}", partial(torch.matmul, x, w.t()), moved, done))
        if name == "o":
            found.append(("linear o, exact", partial(exact_product, x, w), moved, done))
    x, r, g = _draw(rows, HIDDEN), _draw(rows, HIDDEN), _draw(HIDDEN)
    norm = partial(cuda.add_rms_norm_forward, x, r, g, 1e-6)
    found.append(("add and norm", norm, 8 * x.numel(), 0))
    weights, chosen = route_forward(_draw(rows, EXPERTS), TOP_K, True)
    w13, w2 = _draw(EXPERTS, 2 * WIDTH, HIDDEN, scale=0.02), _draw(EXPERTS, HIDDEN, WIDTH)
    touched = int(chosen.unique().numel())
    moved = 2 * touched * 3 * WIDTH * HIDDEN + 4 * rows * HIDDEN
    done = 2 * rows * TOP_K * 3 * WIDTH * HIDDEN
    for tile in (tile_for(rows, EXPERTS, WIDTH), *TILES):
        label = "x".join(str(tile[f"BLOCK_SIZE_{d}"]) for d in "MNK")
        label += f" {tile.get('num_warps')} warps {tile.get('num_stages')} stages"
        for slices in (1, 2):
            work = partial(expert_outputs, x, chosen, weights, w13, w2, slices=slices, tile=tile)
            found.append((f"experts, {slices} slices, {label}", work, moved, done))
    each = _draw(2, rows, TOP_K, HIDDEN)
    found.append(
        (
            "exact sum of 2 x 8 outputs",
            partial(sums.whole_sum, each),
            2 * each.numel() + 2 * rows * HIDDEN,
            0,
        )
    )
    return found
