"""Every patch is needed: without it tokens differ, something fails, or its operator differs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from patchkit.bindings import evidence as all_evidence
from patchkit.engine import find_adapter, resolve_reference

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.timeout(900)]

RUN = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from dataclasses import asdict
from patchkit.parity.ablation import ablate
json.dump([asdict(case) for case in ablate(sys.argv[1], "cpu_tree")], answers)
"""

# At least so many patches of the rollout and of the trainer side are left out in turn.
ADAPTERS = {"qwen3_moe": (14, 5), "qwen3": (10, 4), "glm4_moe": (13, 6)}


@pytest.fixture(
    scope="module",
    params=[
        "qwen3_moe",
        pytest.param("qwen3", marks=pytest.mark.nightly),
        pytest.param("glm4_moe", marks=pytest.mark.nightly),
    ],
)
def adapter(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def cases(adapter: str) -> dict[tuple[str, str], dict]:
    run = subprocess.run(
        [sys.executable, "-c", RUN, adapter],
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return {(c["side"], c["symbol"]): c for c in json.loads(run.stdout)}


def test_the_complete_adapter_is_exact(cases: dict[tuple[str, str], dict]) -> None:
    complete = cases["", ""]
    assert (complete["error"], complete["mismatches"]) == ("", 0)
    assert complete["tokens"] > 400


def test_leaving_any_one_patch_out_is_noticed(
    adapter: str, cases: dict[tuple[str, str], dict]
) -> None:
    evidence: dict[tuple[str, str], set[str]] = {}
    for side in ("rollout", "trainer"):
        for patch in find_adapter(adapter).patches(side):
            # One symbol may have a patch per version and per profile.
            if "cpu_tree" in (patch.profiles or ("cpu_tree",)):
                evidence.setdefault((side, patch.identity), set()).add(patch.evidence)
    silent = [
        key
        for key, case in cases.items()
        if key[0] and not case["mismatches"] and not case["error"]
    ]
    # Where a small sample may come out equal by luck, the operator itself has to differ.
    unproven = [
        key
        for key in silent
        if not all(named and resolve_reference(named)() for named in evidence[key])
    ]
    assert not unproven
    rollout, trainer = ADAPTERS[adapter]
    assert len([key for key in cases if key[0] == "rollout"]) >= rollout
    assert len([key for key in cases if key[0] == "trainer"]) >= trainer


@pytest.mark.parametrize(
    "name", [name for name in vars(all_evidence) if name.endswith(("_differs", "_per_rank"))]
)
def test_the_operators_that_luck_could_hide_differ_from_stock(name: str) -> None:
    torch.manual_seed(0)
    assert getattr(all_evidence, name)()


def test_there_is_evidence_to_look_at() -> None:
    names = [name for name in vars(all_evidence) if name.endswith(("_differs", "_per_rank"))]
    assert len(names) >= 5
