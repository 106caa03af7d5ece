"""What each operator takes, and what that is of the card's limits.

The experts also by tile and number of slices: a tile that suits the whole width need not
suit a slice of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchkit.providers.cuda.linear import Tile

HIDDEN, WIDTH, EXPERTS, TOP_K, VOCABULARY = 2048, 768, 128, 8, 151936
ROWS = (64, 256, 2048, 8192)


def measure(target: Path) -> list[dict[str, Any]]:
    """Time everything on the current GPU and write it."""
    # Kernels are compiled side by side first; the cache on disk hands them over.
    with ProcessPoolExecutor(len(ROWS), mp_context=get_context("spawn")) as pool:
        list(pool.map(_warm, ROWS))
    limits = _limits()
    found: list[dict[str, Any]] = [{"limits": limits}]
    for rows in ROWS:
        for name, work, bytes_moved, operations in _operators(rows):
            try:
                seconds = _median(work)
            except Exception as error:  # a tile that does not fit is a result, too
                found.append({"operator": name, "rows": rows, "failed": str(error)[:200]})
                continue
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


def _warm(rows: int) -> None:
    for _, work, _, _ in _operators(rows):
        with suppress(Exception):  # told where it is timed
            work()
    torch.cuda.synchronize()


def _median(work: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    return float(do_bench(work, warmup=10, rep=40, return_mode="median")) / 1e3


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
    from vllm.model_executor.layers.batch_invariant import matmul_persistent

    from patchkit.providers import cuda
    from patchkit.providers.cuda import sums
    from patchkit.providers.cuda.attention import attention_forward
    from patchkit.providers.cuda.experts import expert_outputs
    from patchkit.providers.cuda.linear import linear_forward, slice_products
    from patchkit.providers.cuda.router import route_forward

    def exact_product(x: Tensor, w: Tensor, slices: int) -> Tensor:
        return sums.whole_sum(slice_products(x, w, slices=slices))

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
        found.append((f"vLLM's {name}", partial(matmul_persistent, x, w.t()), moved, done))
        found.append((f"cuBLAS {name}", partial(torch.matmul, x, w.t()), moved, done))
        if name == "o":
            for slices in (2, 4):
                work = partial(exact_product, x, w, slices)
                found.append((f"linear o, exact, {slices} slices", work, moved, done))
    x, r, g = _draw(rows, HIDDEN), _draw(rows, HIDDEN), _draw(HIDDEN)
    norm = partial(cuda.add_rms_norm_forward, x, r, g, 1e-6)
    found.append(("add and norm", norm, 8 * x.numel(), 0))
    table = cuda.cos_sin_table(128, 1e6, 40960, torch.device("cuda"))
    heads, position = _draw(rows, 36, 128), torch.arange(rows, device="cuda")
    found.append(("rotation", partial(cuda.rotate, heads, position, table), 4 * heads.numel(), 0))
    if rows <= 2048:
        logits, tokens = _draw(rows, VOCABULARY), torch.arange(rows, device="cuda")
        picked = partial(cuda.selected_token_logprobs, logits, tokens)
        found.append(("log-softmax of one token", picked, 2 * logits.numel(), 0))
    if rows >= 2048:  # causal, in sequences of 512
        query, key, value = (_draw(rows, heads, 128) for heads in (32, 4, 4))
        starts = torch.arange(0, rows + 1, 512, dtype=torch.int32, device="cuda")
        attend = partial(attention_forward, query, key, value, cuda.Packing(starts, 512), 128**-0.5)
        moved = 2 * (2 * query.numel() + 2 * key.numel())
        found.append(("attention", attend, moved, 2 * rows * 512 * 32 * 128))
    weights, chosen = route_forward(_draw(rows, EXPERTS), TOP_K, True)
    w13, w2 = _draw(EXPERTS, 2 * WIDTH, HIDDEN, scale=0.02), _draw(EXPERTS, HIDDEN, WIDTH)
    touched = int(chosen.unique().numel())
    moved = 2 * touched * 3 * WIDTH * HIDDEN + 4 * rows * HIDDEN
    done = 2 * rows * TOP_K * 3 * WIDTH * HIDDEN
    for slices in (1, 2, 4):
        work = partial(expert_outputs, x, chosen, weights, w13, w2, slices=slices)
        found.append((f"experts, {slices} slices, chosen tile", work, moved, done))
    found += _expert_stages(rows, x, chosen, weights, w13, w2, touched)
    for slices in (2, 4):
        each = _draw(slices, rows, TOP_K, HIDDEN)
        size = 2 * each.numel() + 2 * rows * HIDDEN
        work = partial(sums.whole_sum, each)
        found.append((f"exact sum of {slices} x {TOP_K} outputs", work, size, 0))
    return found


# Few rows, some, many; the tiles that were tried when the three were chosen.
TILES = (
    Tile(16, 128, 128, 1, 4, 3),
    Tile(32, 128, 128, 1, 4, 3),
    Tile(64, 64, 32, 8, 4, 3),
    Tile(64, 128, 64, 1, 4, 3),
    Tile(128, 256, 64, 1, 8, 3),
)


def _expert_stages(
    rows: int,
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    touched: int,
) -> list[tuple[str, Callable[[], Any], int, int]]:
    """Up and down projection apart, by tile, and the down projection by number of slices."""
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

    from patchkit.providers.cuda.grouped import Aligned, grouped_product

    pairs = rows * TOP_K
    activated = _draw(pairs, WIDTH)
    gate_up = x.new_empty((1, pairs, 2 * WIDTH))
    up = 2 * (touched * 2 * WIDTH * HIDDEN + rows * HIDDEN + pairs * 2 * WIDTH)
    operations = 2 * pairs * WIDTH * HIDDEN
    found: list[tuple[str, Callable[[], Any], int, int]] = []
    outputs = {slices: x.new_empty((slices, pairs, HIDDEN)) for slices in (1, 2, 4)}
    for tile in TILES:
        label = "{}x{}x{}, {} warps, {} stages".format(*tile[:3], tile.warps, tile.stages)
        aligned = Aligned(*moe_align_block_size(chosen, tile.m, EXPERTS, None))
        work = partial(grouped_product, x, w13, aligned, gate_up, tile)
        found.append((f"up, {label}", work, up, 2 * operations))
        for slices, each in outputs.items():
            moved = 2 * (touched * WIDTH * HIDDEN + pairs * WIDTH + slices * pairs * HIDDEN)
            work = partial(
                grouped_product, activated, w2, aligned, each, tile, weight_P=weights.view(-1)
            )
            found.append((f"down, {slices} slices, {label}", work, moved, operations))
    return found
