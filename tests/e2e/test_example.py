"""The reference loop, as a user runs it: Ray actors, a real engine, real FSDP2 ranks."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from patchkit.runtime.artifact import load_artifact, verify_artifact

pytest.importorskip("ray")

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("--prompts", "4", "--group", "4", "--new-tokens", "8", "--cost-pairs", "0", "--no-stock")


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    ours = ("PATCHKIT_", "VLLM_", "RAY_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env={**clean, "PYTHONPATH": str(EXAMPLES), **environment},
        timeout=400,
        check=False,
    )


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    (log,) = folder.glob("**/loop.jsonl")
    return [e for e in map(json.loads, log.read_text().splitlines()) if e["event"] == name]


def test_every_token_of_every_version_is_proven_and_the_artifact_says_so(tmp_path: Path) -> None:
    made = run("-m", "grpo_qwen3_moe", "--refits", "2", "--runs", str(tmp_path), "--json", *SMALL)
    assert made.returncode == 0, made.stderr[-4000:]
    result = json.loads(made.stdout)
    assert result["exact"] is True
    assert [(r["version"], r["tokens"], r["mismatches"]) for r in result["rounds"]] == [
        (0, 128, 0),
        (1, 128, 0),
        (2, 128, 0),
    ]
    # The first two were trained on, the last only proven.
    assert [r["grad_norm"] is not None for r in result["rounds"]] == [True, True, False]

    artifact = Path(result["artifact"])
    assert verify_artifact(artifact).exact
    document = load_artifact(artifact)
    assert [r["version"] for r in document["refits"]] == [0, 1, 2]
    processes = {f"{a['role']} {a['rank']}" for a in document["attestations"]}
    assert processes == {"worker 0", "trainer 0", "trainer 1"}
    assert len({a["pid"] for a in document["attestations"]}) == 3
    rounds = [r for p in document["phases"].values() for r in p["rounds"]]
    assert all(r["notes"]["lag"]["on_policy"] for r in rounds)

    assert len(events(tmp_path, "version")) == 3
    synced = events(tmp_path, "synced")
    assert [e["version"] for e in synced] == [0, 1, 2]
    assert len({e["trainer"] for e in synced}) == 3
    assert all(e["workers"] == [e["trainer"]] for e in synced)
    page = Path(result["page"]).read_text()
    assert page.count("<polyline") == 4
    assert "mean reward" in page


@pytest.mark.nightly
def test_more_workers_on_both_sides_are_the_same_code(tmp_path: Path) -> None:
    options = ("--tp", "2", "--ranks", "3", "--refits", "1", "--runs", str(tmp_path), "--json")
    made = run("-m", "grpo_qwen3_moe", *options, *SMALL)
    assert made.returncode == 0, made.stderr[-4000:]
    result = json.loads(made.stdout)
    assert [r["mismatches"] for r in result["rounds"]] == [0, 0]
    document = load_artifact(Path(result["artifact"]))
    processes = sorted(f"{a['role']} {a['rank']}" for a in document["attestations"])
    assert processes == ["trainer 0", "trainer 1", "trainer 2", "worker 0", "worker 1"]


def test_lost_processes_are_named_and_no_step_is_taken(tmp_path: Path) -> None:
    """A killed engine is replaced and proven again; a killed rank ends the run in its bound."""
    script = Path(__file__).with_name("example_chaos.py")
    made = run(str(script), str(tmp_path))
    assert made.returncode == 0, made.stderr[-4000:]
    told = json.loads(made.stdout)

    engine = told["engine"]
    assert engine["error"].startswith("rollout actor: lost during 'generate'")
    assert engine["noticed_s"] < 30
    assert engine["versions_before"] == engine["versions_after"] == [1, 1]
    assert engine["receipt_before"] == engine["receipt_after"]
    assert engine["restarted_round"] == {"version": 1, "mismatches": 0}
    assert len(list(tmp_path.glob("**/attestations-1/worker-0-*.json"))) == 1

    rank = told["rank"]
    assert "rank 1: process ended" in rank["error"]
    assert "rank 0: " in rank["error"]
    assert rank["lost"] == [1]
    assert rank["noticed_s"] < rank["bound_s"]
    assert rank["version_before"] == rank["version_after"] == 2


@pytest.mark.nightly
def test_a_lost_tensor_parallel_worker_is_named_and_the_next_engine_proven(tmp_path: Path) -> None:
    """The actor lives on; one process of its engine does not."""
    script = Path(__file__).with_name("example_chaos.py")
    made = run(str(script), str(tmp_path), "2")
    assert made.returncode == 0, made.stderr[-4000:]
    engine = json.loads(made.stdout)["engine"]
    assert f"worker 1 (pid {engine['victim']}) ended" in engine["error"]
    assert engine["noticed_s"] < 30
    assert engine["versions_before"] == engine["versions_after"] == [1, 1]
    assert engine["receipt_before"] == engine["receipt_after"]
    assert engine["restarted_round"] == {"version": 1, "mismatches": 0}


def test_a_cluster_of_another_environment_is_refused(tmp_path: Path) -> None:
    script = Path(__file__).with_name("example_cluster.py")
    # A cluster and whoever joins it share a token; this one lives as long as the test.
    access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    cluster = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **access, "OMP_NUM_THREADS": "2"},
    )
    try:
        assert cluster.stdout is not None
        address = cluster.stdout.readline().strip()
        options = ("--address", address, "--runs", str(tmp_path))
        made = run("-m", "grpo_qwen3_moe", *options, *SMALL, **access)
    finally:
        cluster.communicate("", timeout=60)
    assert made.returncode == 1, made.stderr[-4000:]
    assert "this Ray cluster is refused; no actor was started" in made.stderr
    assert "OMP_NUM_THREADS" in made.stderr
    assert "TORCHDYNAMO_DISABLE" in made.stderr
    assert not list(tmp_path.glob("*/artifact.json"))


def test_the_contract_is_judged_before_ray_is_touched(tmp_path: Path) -> None:
    options = ("--tp", "3", "--address", "nowhere:1", "--runs", str(tmp_path))
    made = run("-m", "grpo_qwen3_moe", *options, *SMALL)
    # The address is wrong, too; that nobody tried it shows the order.
    assert made.returncode in (1, 2)
    assert "tensor-parallel size" in made.stderr
    assert "nowhere" not in made.stderr
