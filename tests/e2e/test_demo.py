"""The main job, as a user runs it: real vLLM, a real FSDP2 group, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.timeout(600)]


def run_demo(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PATCHKIT_", "VLLM_"))}
    return subprocess.run(
        [sys.executable, "-m", "patchkit", "demo", "--json", "--runs", str(folder), *options],
        capture_output=True,
        text=True,
        env={**clean, **environment},
        timeout=550,
        check=False,
    )


def passed(run: subprocess.CompletedProcess[str]) -> dict:
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout)


def check_phases(result: dict, at_least: int) -> None:
    assert [p["name"] for p in result["phases"]] == ["initial_checkpoint", "post_update_reload"]
    for phase in result["phases"]:
        for comparison in ("recompute", "first_forward"):
            assert phase[comparison]["token_count"] >= at_least
            assert phase[comparison]["mismatch_count"] == 0
            assert phase[comparison]["max_absdiff"] == 0.0
        assert phase["step"]["grad_norm"] > 0
    assert result["exact"] is True


def test_every_bit_agrees_in_both_phases_where_the_stock_pair_does_not(tmp_path: Path) -> None:
    result = passed(run_demo(tmp_path))
    check_phases(result, at_least=4000)
    for phase in result["phases"]:
        assert phase["stock"]["token_count"] == phase["recompute"]["token_count"]
        assert phase["stock"]["mismatch_count"] > 0.9 * phase["stock"]["token_count"]
        evidence = phase["evidence"]
        assert evidence["chunked_prefills"] > 0
        assert evidence["cached_tokens"] > 0
        assert evidence["preemptions"] > 0
    verified = subprocess.run(
        [sys.executable, "-m", "patchkit", "artifact", "verify", result["artifact"]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_two_tensor_parallel_workers_give_the_trainers_bits_too(tmp_path: Path) -> None:
    options = ("--tensor-parallel-size", "2", "--sequences", "24", "--no-stock")
    check_phases(passed(run_demo(tmp_path, *options)), at_least=1500)


def test_an_engine_whose_plugin_was_left_out_is_refused_before_a_token_is_sampled(
    tmp_path: Path,
) -> None:
    run = run_demo(tmp_path, "--sequences", "2", VLLM_PLUGINS="somebody_elses")
    assert run.returncode == 1
    assert "worker 0" in run.stderr
    assert "VLLM_PLUGINS" in run.stderr
    assert "sample" not in run.stderr
    assert not list(tmp_path.glob("*/artifact.json"))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--adapter", "nobody"), "nobody"),
        (("--profile", "nothing"), "'nothing'"),
        (("--tp", "3"), "tensor-parallel size"),
    ],
)
def test_bad_input_is_named_at_once(tmp_path: Path, options: tuple[str, ...], named: str) -> None:
    run = run_demo(tmp_path, *options)
    assert run.returncode in (1, 2)
    assert named in run.stderr
