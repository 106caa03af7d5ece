"""What each operator takes, and what that is of the card's limits.

The experts also by tile and number of slices, since a tile that suits the whole width
need not suit a slice of it.
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

HIDDEN, WIDTH, EXPERTS, TOP_K, VOCABULARY = 2048, 768, 128, 8, 151936
ROWS = (64, 256, 2048, 8192)
# Block sizes of M, N and K, group, warps, stages: those that vLLM ships for this GPU and
# batch-invariant mode's fixed one, and what might suit a short K better.
FEW = (
    (16, 128, 64, 1, 4, 4),
    (16, 128, 128, 1, 4, 3),
    (16, 256, 128, 1, 8, 2),
    (32, 64, 128, 1, 4, 4),
    (32, 128, 64, 1, 4, 4),
    (32, 128, 128, 1, 4, 3),
    (32, 256, 128, 16, 4, 2),
    (64, 64, 32, 8, 4, 3),
    (64, 128, 64, 1, 4, 4),
)
MANY = (
    (64, 64, 32, 8, 4, 3),
    (64, 128, 64, 1, 4, 3),
    (128, 128, 64, 1, 8, 3),
    (128, 256, 64, 1, 8, 3),
    (128, 256, 64, 1, 8, 4),
)


def _tile(m: int, n: int, k: int, group: int, warps: int, stages: int) -> dict[str, int]:
    return {
        "BLOCK_SIZE_M": m,
        "BLOCK_SIZE_N": n,
        "BLOCK_SIZE_K": k,
        "GROUP_SIZE_M": group,
        "SPLIT_K": 1,
        "num_warps": warps,
        "num_stages": stages,
    }


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
    import triton.language as tl
    from vllm.model_executor.layers.fused_moe.fused_moe import invoke_fused_moe_triton_kernel
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

    from patchkit.providers.cuda.experts import sliced_down

    plain = dict.fromkeys(
        (
            *("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16"),
            "per_channel_quant",
        ),
        False,
    )
    pairs = rows * TOP_K
    activated = _draw(pairs, WIDTH)
    gate_up = x.new_empty((rows, TOP_K, 2 * WIDTH))
    up = 2 * (touched * 2 * WIDTH * HIDDEN + rows * HIDDEN + pairs * 2 * WIDTH)
    operations = 2 * pairs * WIDTH * HIDDEN
    found: list[tuple[str, Callable[[], Any], int, int]] = []
    outputs = {slices: x.new_empty((slices, pairs, HIDDEN)) for slices in (1, 2, 4)}
    for shape in FEW if rows <= 256 else MANY:
        tile = _tile(*shape)
        label = "x".join(str(n) for n in shape[:3]) + " {} {} warps {} stages".format(*shape[3:])
        aligned = moe_align_block_size(chosen, shape[0], EXPERTS, None)
        work = partial(
            invoke_fused_moe_triton_kernel,
            *(x, w13, gate_up, None, None, None, *aligned, False, TOP_K, tile),
            compute_type=tl.bfloat16, **plain,
        )  # fmt: skip
        found.append((f"up, {label}", work, up, 2 * operations))
        for slices, each in outputs.items():
            moved = 2 * (touched * WIDTH * HIDDEN + pairs * WIDTH + slices * pairs * HIDDEN)
            for way in (0, 2):
                work = partial(
                    sliced_down, activated, w2, weights.view(-1), aligned, each, tile, way
                )
                name = f"down, {slices} slices, way {way}, {label}"
                found.append((name, work, moved, operations))
    return found
