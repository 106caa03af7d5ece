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
    # FSDP loses its hooks where somebody changes such an output in place.
    assert "returned a view tensor" not in run.stderr
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
    attested = json.loads(Path(result["artifact"]).read_text())["attestations"]
    assert {(a["role"], a["rank"]) for a in attested} >= {
        ("worker", 0), ("trainer", 0), ("trainer", 1),
    }  # fmt: skip
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


# What each other adapter has to show: one worker, with the stock pair beside it, and two.
OTHER_ADAPTERS = {
    "qwen3": ("--adapter", "qwen3"),
    "qwen3, tied": ("--adapter", "qwen3", "--setting", "tie_word_embeddings=true"),
    "glm4_moe": ("--adapter", "glm4_moe"),
}


@pytest.mark.parametrize("name", OTHER_ADAPTERS)
def test_every_bit_agrees_under_the_other_adapters(tmp_path: Path, name: str) -> None:
    run = run_demo(tmp_path, *OTHER_ADAPTERS[name], "--sequences", "24", "--no-stock")
    check_phases(passed(run), at_least=1500)


def test_shared_and_routed_experts_agree_with_two_workers(tmp_path: Path) -> None:
    options = ("--adapter", "glm4_moe", "--tp", "2", "--sequences", "16", "--no-stock")
    check_phases(passed(run_demo(tmp_path, *options)), at_least=1000)


# As GLM-4.5-Air is: no norms of queries and keys, one group, a layer for multi-token prediction.
AIR = {
    "use_qk_norm": "false",
    "n_group": "1",
    "topk_group": "1",
    "routed_scaling_factor": "1.0",
    "num_nextn_predict_layers": "1",
}
IN_FULL = {
    **OTHER_ADAPTERS,
    "glm4_moe, as Air": (
        *OTHER_ADAPTERS["glm4_moe"],
        *(option for name, value in AIR.items() for option in ("--setting", f"{name}={value}")),
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", IN_FULL)
def test_the_other_adapters_in_full(tmp_path: Path, name: str) -> None:
    """Both tensor-parallel sizes on the whole workload, beside what the stock pair makes of it."""
    whole = passed(run_demo(tmp_path, *IN_FULL[name]))
    check_phases(whole, at_least=4000)
    for phase in whole["phases"]:
        assert phase["stock"]["mismatch_count"] > 0.9 * phase["stock"]["token_count"]
    two = passed(run_demo(tmp_path, *IN_FULL[name], "--tp", "2", "--no-stock"))
    check_phases(two, at_least=4000)


@pytest.mark.nightly
def test_a_layer_of_qwen3_8b(tmp_path: Path) -> None:
    """Real widths: sums over 4,096 and, in four slices, over 12,288."""
    shape = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 1,
        "initializer_range": 0.02,
    }
    settings = [o for k, v in shape.items() for o in ("--setting", f"{k}={v}")]
    run = run_demo(tmp_path, "--adapter", "qwen3", *settings, "--sequences", "4", "--no-stock")
    check_phases(passed(run), at_least=200)


PLANTED = """
import os, sys
from pathlib import Path
from patchkit.parity.demo_setup import DemoSettings, set_up

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    setup = set_up(DemoSettings(adapter="qwen3", folder=folder, sequences=2, stock=False))
    import torch
    from vllm.model_executor.models import qwen3

    original = qwen3.Qwen3DecoderLayer.__init__

    def planted(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.forgotten_norm = torch.nn.LayerNorm(4, elementwise_affine=False)

    qwen3.Qwen3DecoderLayer.__init__ = planted
    from patchkit.parity.demo import run_demo
    from patchkit.runtime.coverage import UncoveredModelError

    try:
        run_demo(setup, lambda stage: print(stage, file=sys.stderr))
    except UncoveredModelError as error:
        print(error)
        sys.exit(3)
"""


def test_a_layer_that_the_adapter_does_not_list_is_refused_before_a_token_is_sampled(
    tmp_path: Path,
) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PATCHKIT_", "VLLM_"))}
    script = tmp_path / "planted.py"
    script.write_text(PLANTED)
    folder = tmp_path / "run"
    folder.mkdir()
    run = subprocess.run(
        [sys.executable, str(script), str(folder)],
        capture_output=True,
        text=True,
        env=clean,
        timeout=300,
        check=False,
    )
    assert run.returncode == 3, run.stdout + run.stderr[-3000:]
    assert "model.layers.0.forgotten_norm" in run.stdout
    assert "torch.nn.modules.normalization:LayerNorm" in run.stdout
    assert "Qwen3DecoderLayer" in run.stdout
    assert "sample" not in run.stderr


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("tie_word_embeddings", "expected NAME=JSON"),
        ("no name=1", "no setting's name"),
        ('hidden_act="gelu"', "hidden_act"),
    ],
)
def test_a_setting_of_the_model_that_cannot_be_is_refused(
    tmp_path: Path, setting: str, named: str
) -> None:
    run = run_demo(tmp_path, "--adapter", "qwen3", "--setting", setting)
    assert run.returncode in (1, 2)
    assert named in run.stderr


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
