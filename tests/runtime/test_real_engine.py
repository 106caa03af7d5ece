"""The runtime on a real vLLM engine: attested, synchronised, refused, poisoned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent

pytestmark = [pytest.mark.e2e, pytest.mark.stack]


def drive(folder: Path, tp: int | str = 1, *, script: str = "engine_script.py", **env: str) -> dict:
    pytest.importorskip("vllm")
    run = folder / "attestations"
    run.mkdir()
    settings = {
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if tp == 2 else "0",
        "PATCHKIT_ENABLE": "1",
        "PATCHKIT_ADAPTER": "qwen3_moe",
        "PATCHKIT_RUN_DIR": str(run),
        "PYTHONPATH": str(HERE),
    }
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PATCHKIT_", "VLLM_"))}
    done = subprocess.run(
        [sys.executable, str(HERE / script), str(folder), str(tp)],
        env={**clean, **settings, **env},
        capture_output=True,
        text=True,
        timeout=240,
    )
    lines = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("RESULT "))


def check_updates(result: dict, tp: int) -> None:
    workers = [f"worker {r}" for r in range(tp)]
    assert result["version 0"] == [["0", 0, 8]]
    assert result["cached"] > 0, "the test would show nothing without a prefix-cache hit"
    assert result["salts"][0] == 0
    assert result["salts"][1] > 0
    assert result["salts"][2] == 0, "another salt must not hit"
    assert result["salts"][3:] == [result["salts"][1]] * 2
    refused = result["refused"]
    both = refused["{'temperature': 0.7, 'top_p': 0.9}"]
    assert both.startswith("RequestRefusedError")
    assert "SamplingParams.temperature" in both
    assert "SamplingParams.top_p" in both
    assert "SamplingParams.min_tokens" in refused["{'min_tokens': 3}"]
    assert "SamplingParams.logit_bias" in refused["{'logit_bias': {7: 1.0}}"]
    assert refused["{'bad_words': []}"] == "nothing was raised"
    assert result["still works"] == [["0", 0, 8]]
    assert result["receipts"] == workers
    assert result["parameters"] > 20
    assert result["version 1"] == [["1", 0, 8]]
    assert result["cached after the update"] == 0, "entries of old weights must not be served"
    assert "delivered twice" in result["twice"]
    assert result["usable after a refusal"] == [["1", 0, 8]]
    salted = result["salted"]
    assert salted["before"] > 0
    assert salted["new salt"] == 0, "entries of old weights must not be served"
    assert salted["new salt again"] == salted["before"]
    assert salted["old salt"] == salted["before"], "nothing was thrown away"
    assert salted["version"] == [["2", 0, 8]]
    assert result["rearranged"].startswith("WeightSyncError")
    assert "model.layers.1.mlp.experts.gate_up_proj" in result["rearranged"]
    assert f"worker {tp - 1}" in result["rearranged"]
    assert result["sabotaged"].startswith("WeightSyncError")
    assert "model.layers.1.self_attn.q_proj.weight" in result["sabotaged"]
    assert f"differs on worker {tp - 1} (region" in result["sabotaged"]
    assert result["later"].startswith("EnginePoisonedError: generate refused")


def test_in_process(tmp_path):
    result = drive(tmp_path)
    assert result["attested"] == [["worker", 0, "active"]]
    assert result["files"] == ["driver-0", "worker-0"]
    check_updates(result, 1)


def check_schedules(result: dict) -> tuple[list[str], int]:
    """Requests whose tokens or bits are not those of the request alone; and comparisons made."""
    alone, wrong, made = result["alone"], [], 0
    for name in ("chunks of 13", "chunks of 1 and 7", "together", "reversed"):
        for number, found in result[name].items():
            made += 1
            if any(found[k] != alone[number][k] for k in ("tokens", "bits")):
                wrong.append(f"{name}: request {number}")
    assert result["alone"]["0"]["cached"] == 0
    assert (result["cached"]["cached"], result["cached"]["prefill"]) == (64, [1])
    assert result["chunks of 13"]["40"]["prefill"] == [13, 13, 13, 13, 8]
    assert set(result["chunks of 1 and 7"]["17"]["prefill"]) == {1}
    assert result["together"]["0"]["beside"] == 63
    assert result["preemptions"] > 0
    return wrong, made


def test_no_schedule_changes_a_bit(tmp_path):
    """Fully cached with one token left, odd chunks, beside 63 others, preempted, reversed."""
    result = drive(tmp_path, script="schedule_script.py", PATCHKIT_SAMPLING="greedy_smoke")
    assert check_schedules(result) == ([], 12)
    assert result["cached"]["bits"] == result["alone"]["0"]["bits"]
    assert result["differ between orders"] == []
    rows = whole_rows(tmp_path / "model", result["rows"])
    assert rows.token_count == 2 * 4 * 512, "every token of the vocabulary, at eight positions"
    assert rows.exact, rows.violations


def whole_rows(folder: Path, sampled: list[dict]) -> Any:
    """The engine's log-probabilities of the whole vocabulary against the trainer's."""
    import torch
    from transformers import Qwen3MoeForCausalLM

    import patchkit
    from patchkit.parity.metrics import compare_rows
    from patchkit.providers import log_softmax

    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    found, positions = [], []
    with patchkit.install(adapter="qwen3_moe", side="trainer", profile="cpu_tree"):
        for row in sampled:
            ids = torch.tensor([row["prompt"] + row["tokens"]])
            with patchkit.exact_context(), torch.no_grad():
                logits = model(input_ids=ids, use_cache=False).logits[0]
            found.append(log_softmax(logits[len(row["prompt"]) - 1 : -1]))
            positions += range(len(row["prompt"]), ids.shape[1])
    engine = torch.tensor([p for row in sampled for p in row["logprobs"]], dtype=torch.float32)
    return compare_rows(engine, torch.cat(found), positions=positions)


@pytest.mark.nightly
def test_an_output_layer_that_depends_on_the_batch_shows_in_that_test(tmp_path):
    """vLLM's float32 option without patches: what the comparison is worth."""
    result = drive(tmp_path, "option", script="schedule_script.py", PATCHKIT_ENABLE="0")
    wrong, _ = check_schedules(result)
    assert "together: request 17" in wrong


def test_two_tensor_parallel_workers(tmp_path):
    result = drive(tmp_path, 2)
    assert [a[:2] for a in result["attested"]] == [["worker", 0], ["worker", 1]]
    assert result["caches"] == [True, True], "compiled code in folders of the patch set"
    assert result["files"] == ["driver-0", "engine-core-0", "worker-0", "worker-1"]
    check_updates(result, 2)


def test_a_worker_that_came_up_without_the_plugin_is_refused(tmp_path):
    """VLLM_PLUGINS leaves it out; the engine starts all the same, unpatched."""
    result = drive(tmp_path, VLLM_PLUGINS="something_else")
    assert "worker 0" in result["attestation"]
    assert "absent" in result["attestation"]


def test_the_engine_core_refuses_by_itself_and_its_death_is_bounded(tmp_path):
    """A front end without patchkit; then the core is stopped, then killed at work."""
    result = drive(
        tmp_path,
        script="core_script.py",
        PATCHKIT_ENABLE="0",
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
    )
    assert result["attested"] == [["pending", True]], "it has no use for the front end's modules"
    assert result["good"] == ["length", 4]
    refused = result["refused in the core"]
    assert refused["outputs"] in ([], [["error", 0]]), refused
    assert refused["outputs"] or refused["raised"] != "nothing was raised"
    assert result["again"] == ["length", 4], "one refused request does not hurt the engine"
    text, seconds = result["stuck"]
    assert text.startswith("EngineLostError: attest: "), text
    assert "every process is there, but none answered" in text
    assert 2.0 <= seconds < 10
    assert result["after a pause"] == "length", "a stuck engine that goes on is usable"
    text, seconds = result["killed"]
    assert text.startswith("EngineLostError: generate: the engine is lost"), text
    assert f"worker 0 (pid {result['pid']}) ended" in text
    assert seconds < 15
    assert result["under way"], "the requests must have been under way"
    text, seconds = result["update"]
    assert text.startswith("EnginePoisonedError: the update to policy version 1 refused"), text
    assert seconds < 5
    assert result["later"].startswith("EnginePoisonedError: generate refused")
    assert result["version"] == 0


@pytest.mark.nightly
def test_weights_that_change_under_running_requests(tmp_path):
    """The asynchronous engine: in flight, with the lag measured; and with a barrier."""
    result = drive(tmp_path, script="async_script.py", VLLM_ENABLE_V1_MULTIPROCESSING="1")
    assert result["unfinished after the update"], "the requests must have been under way"
    assert result["lengths"] == [600] * 3
    assert result["versions"] == [[0, 1]] * 3, "each went on with the new weights"
    assert result["in_flight"] is True
    assert result["lag"]["on_policy"] is False
    assert result["lag"]["mixed"] == 3
    assert result["lag"]["tokens"] == 1800
    assert 0 < result["lag"]["histogram"]["1"] < 1800
    assert result["apart"] == [[1]] * 3, "no request saw two versions"
    assert result["late"] == [2]
    assert "asyncio.to_thread" in result["own loop"]
