"""How fast the reference providers are, beside three other ways.

    python benchmarks/providers.py --threads 2 --json providers.json

Four implementations of the same operators, one after the other in one process:

* ``exact``: the reference providers (pre-rounding, float64, exact sums);
* ``tree``: float32 products added as an adjacent-pair tree over K;
* ``float64``: float64 without pre-rounding, rounded once: usually the same
  bits for every batch size, never with a guarantee;
* ``stock``: PyTorch in bf16: whatever the library does.

Times are the best of several runs, in milliseconds: processor time with one
thread (other processes then hardly matter), wall time with more.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from patchkit import providers

IMPLEMENTATIONS = ("exact", "tree", "float64", "stock")

LINEAR = [(2048, 2048), (1536, 2048), (2048, 768)]
ROWS = (1, 8, 64, 256)
VOCABULARY = (151_936, 2048, 8)  # N, K, M
CONTEXTS = ((256, 1), (256, 256), (4096, 1), (4096, 64))  # keys, queries
EXPERT_ROWS = (1, 8, 64)

# Elements that the tree holds at a time.
_TREE_ELEMENTS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One implementation on one case."""

    operator: str
    case: str
    implementation: str
    best_ms: float
    median_ms: float
    runs: int


# --- the tree, compact ----------------------------------------------------------


def tree_matmul(a_BMK: Tensor, b_BNK: Tensor) -> Tensor:
    """``a @ b^T`` in float32; every element is a tree of adjacent pairs over K."""
    a, b = (x.float().permute(2, 0, 1).contiguous() for x in (a_BMK, b_BNK))
    step = max(1, _TREE_ELEMENTS // b.numel())
    blocks = [
        providers.pairwise_tree(a[:, :, i : i + step, None] * b[:, :, None, :])
        for i in range(0, a.shape[2], step)
    ]
    return torch.cat(blocks, dim=1)


def tree_linear(x: Tensor, w: Tensor) -> Tensor:
    return tree_matmul(x[None], w[None])[0]


# --- linear -----------------------------------------------------------------------


def linear_case(outputs: int, inputs: int, rows: int) -> dict[str, Callable[[], object]]:
    x = torch.randn(rows, inputs).bfloat16()
    w = torch.randn(outputs, inputs).bfloat16() * inputs**-0.5
    return {
        "exact": lambda: providers.linear(x, w),
        "tree": lambda: tree_linear(x, w),
        "float64": lambda: (x.double() @ w.double().t()).float(),
        "stock": lambda: F.linear(x, w),
    }


# --- attention: 32 query heads, 4 key/value heads, head size 128 -----------------------


def attention_case(keys: int, queries: int) -> dict[str, Callable[[], object]]:
    heads, groups, size = 32, 4, 128
    q = torch.randn(1, queries, heads, size).bfloat16()
    k, v = (torch.randn(1, keys, groups, size).bfloat16() for _ in range(2))
    allowed = torch.ones(1, queries, keys, dtype=torch.bool).tril(keys - queries)
    scale, share = size**-0.5, heads // groups

    def apart(product: Callable[[Tensor, Tensor], Tensor], total: Callable[[Tensor], Tensor]):
        grouped = q[0].view(queries, groups, share, size).permute(1, 2, 0, 3)
        grouped = grouped.reshape(groups, share * queries, size)
        scores = product(grouped, k[0].transpose(0, 1)).float() * scale
        scores = scores.masked_fill(~allowed[0].repeat(share, 1), -torch.inf)
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        return product(weights, v[0].permute(1, 2, 0)) / total(weights)

    return {
        "exact": lambda: providers.attention(q, k, v, allowed, scale=scale),
        "tree": lambda: apart(
            tree_matmul, lambda w: providers.pairwise_tree(w.movedim(-1, 0))[..., None]
        ),
        "float64": lambda: apart(
            lambda a, b: a.double() @ b.double().transpose(1, 2),
            lambda w: w.double().sum(-1, keepdim=True),
        ),
        "stock": lambda: F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=allowed[:, None], enable_gqa=True
        ),
    }


# --- experts: 128, 8 chosen, hidden 2048, width 768 ------------------------------------


def expert_case(weights: tuple[Tensor, Tensor], rows: int) -> dict[str, Callable[[], object]]:
    w13, w2 = weights
    x = torch.randn(rows, w13.shape[2]).bfloat16()
    chosen, ids = providers.route(torch.randn(rows, len(w13)), 8, renormalize=True)

    def one_by_one(linear: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        total = torch.zeros(rows, w2.shape[1])
        for expert in ids.unique().tolist():
            token, slot = torch.where(ids == expert)
            gate, up = linear(x[token], w13[expert]).to(x.dtype).chunk(2, dim=-1)
            output = linear(F.silu(gate) * up, w2[expert])
            total.index_add_(0, token, output.float() * chosen[token, slot, None])
        return total

    return {
        "exact": lambda: providers.experts_chunks(x, ids, chosen, w13, w2, chunks=4),
        "tree": lambda: one_by_one(tree_linear),
        "float64": lambda: one_by_one(lambda a, b: (a.double() @ b.double().t()).float()),
        "stock": lambda: one_by_one(F.linear),
    }


# --- measuring ------------------------------------------------------------------------


def measure(
    function: Callable[[], object], budget_s: float, clock: Callable[[], float]
) -> tuple[float, float, int]:
    """Best and median of as many runs as fit, at least one after a warm-up, in ms."""
    start = clock()
    function()
    first = clock() - start
    times = [first] if first > budget_s else []
    while not times or (sum(times) < budget_s and len(times) < 50):
        start = clock()
        function()
        times.append(clock() - start)
    times.sort()
    return 1e3 * times[0], 1e3 * times[len(times) // 2], len(times)


def cases(only: list[str]) -> Iterator[tuple[str, str, Callable[[], dict]]]:
    """Operator, case, and what builds its implementations."""
    if "linear" in only:
        for outputs, inputs in LINEAR:
            for rows in ROWS:
                yield (
                    "linear",
                    f"N={outputs} K={inputs} M={rows}",
                    lambda n=outputs, k=inputs, m=rows: linear_case(n, k, m),
                )
    if "vocabulary" in only:
        n, k, m = VOCABULARY
        yield "linear", f"N={n} K={k} M={m}", lambda: linear_case(n, k, m)
    if "attention" in only:
        for keys, queries in CONTEXTS:
            yield (
                "attention",
                f"context {keys}, {queries} queries",
                lambda k=keys, q=queries: attention_case(k, q),
            )
    if "experts" in only:
        shapes = ((128, 1536, 2048), (128, 2048, 768))
        weights = tuple(
            torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.03) for shape in shapes
        )
        for rows in EXPERT_ROWS:
            yield "experts", f"8 of 128, M={rows}", lambda m=rows: expert_case(weights, m)


def show(timings: list[Timing], threads: int) -> None:
    table = Table(title=f"milliseconds, best of several, {threads} threads")
    table.add_column("operator")
    table.add_column("case", no_wrap=True)
    for name in IMPLEMENTATIONS:
        table.add_column(name, justify="right")
    table.add_column("tree/exact", justify="right")
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for timing in timings:
        rows.setdefault((timing.operator, timing.case), {})[timing.implementation] = timing.best_ms
    for (operator, case), best in rows.items():
        columns = [f"{best[name]:.2f}" for name in IMPLEMENTATIONS]
        table.add_row(operator, case, *columns, f"{best['tree'] / best['exact']:.1f}")
    Console(width=100).print(table)


def main(
    threads: Annotated[int, typer.Option(help="Threads that PyTorch may use.")] = 1,
    budget: Annotated[float, typer.Option(help="Seconds per case and implementation.")] = 0.5,
    only: Annotated[
        str, typer.Option(help="Which of linear, vocabulary, attention, experts.")
    ] = "linear,vocabulary,attention,experts",
    json_path: Annotated[Path | None, typer.Option("--json", help="Where to write JSON.")] = None,
) -> None:
    """Time the reference providers beside a tree, plain float64 and stock PyTorch."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    clock = time.thread_time if threads == 1 else time.perf_counter
    console = Console()
    timings = []
    with torch.inference_mode():
        for operator, case, build in cases(only.split(",")):
            functions = build()
            for name in IMPLEMENTATIONS:
                best, median, runs = measure(functions[name], budget, clock)
                timings.append(
                    Timing(
                        operator=operator, case=case, implementation=name,
                        best_ms=round(best, 4), median_ms=round(median, 4), runs=runs,
                    )
                )  # fmt: skip
            console.print(f"[dim]{operator}, {case}[/dim]")
    show(timings, threads)
    if json_path is not None:
        document = {
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "threads": threads,
            "clock": clock.__name__,
            "timings": [asdict(timing) for timing in timings],
        }
        json_path.write_text(json.dumps(document, indent=2) + "\n")
        console.print(f"written to {json_path}")


if __name__ == "__main__":
    typer.run(main)
