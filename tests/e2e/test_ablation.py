"""Every patch is needed: without it tokens differ, something fails, or its operator differs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from patchkit import providers

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.timeout(600)]

RUN = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from dataclasses import asdict
from patchkit.parity.ablation import ablate
json.dump([asdict(case) for case in ablate("qwen3_moe", "cpu_tree")], answers)
"""


def row_parallel_is_rounded_per_rank() -> bool:
    """One tensor-parallel rank needs no tree; two that round their halves to bf16 do."""
    x, w = torch.randn(64, 128).bfloat16(), torch.randn(128, 128).bfloat16()
    tree = providers.linear(x, w, chunks=4).bfloat16()
    halves = [providers.linear(x[:, s], w[:, s]).bfloat16() for s in (slice(64), slice(64, 128))]
    return not torch.equal(tree, halves[0] + halves[1])


def stock_norm_differs() -> bool:
    x, weight = (3 * torch.randn(20_000, 128)).bfloat16(), torch.randn(128).bfloat16()
    stock = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return not torch.equal(weight * stock.bfloat16(), providers.rms_norm(x, weight, 1e-6))


def stock_router_differs() -> bool:
    logits = torch.randn(512, 8)
    weights, _ = providers.route(logits, 2, renormalize=True)
    top = torch.softmax(logits, -1).topk(2, -1).values
    return not torch.equal(top / top.sum(-1, keepdim=True), weights)


# Where a small sample may come out equal by luck, the operator itself has to differ.
OPERATORS = {
    "RowParallelLinear.forward": row_parallel_is_rounded_per_rank,
    "Qwen3MoeRMSNorm.forward": stock_norm_differs,
    "CPURouter._compute_routing": stock_router_differs,
}


@pytest.fixture(scope="module")
def cases() -> dict[tuple[str, str], dict]:
    run = subprocess.run(
        [sys.executable, "-c", RUN], capture_output=True, text=True, timeout=550, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return {(c["side"], c["symbol"].rpartition(":")[2]): c for c in json.loads(run.stdout)}


def test_the_complete_adapter_is_exact(cases: dict[tuple[str, str], dict]) -> None:
    complete = cases["", ""]
    assert (complete["error"], complete["mismatches"]) == ("", 0)
    assert complete["tokens"] > 400


def test_leaving_any_one_patch_out_is_noticed(cases: dict[tuple[str, str], dict]) -> None:
    silent = [
        name
        for (side, name), case in cases.items()
        if side and not case["mismatches"] and not case["error"]
    ]
    unproven = [name for name in silent if name not in OPERATORS or not OPERATORS[name]()]
    assert not unproven
    assert len([key for key in cases if key[0] == "rollout"]) >= 14
    assert len([key for key in cases if key[0] == "trainer"]) >= 5


@pytest.mark.parametrize("name", OPERATORS)
def test_the_operators_that_luck_could_hide_differ_from_stock(name: str) -> None:
    torch.manual_seed(0)
    assert OPERATORS[name]()
