"""The doctor on a real engine and trainer: every planted difference, at its place, by its name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.timeout(600)]

# name: operator, layer, kind of the likeliest cause, whether it was computed (and not
# told by size), patch on the rollout side that covers it.
EXPECTED: dict[str, tuple[str, int | None, str, bool, str]] = {
    "epsilon, first norm": ("input_layernorm", 0, "epsilon", True, "RMSNorm.forward_native"),
    "epsilon, later norm": (
        "post_attention_layernorm",
        1,
        "epsilon",
        True,
        "RMSNorm.forward_native",
    ),
    "values on demand": ("input_layernorm", 0, "epsilon", True, "RMSNorm.forward_native"),
    "epsilon, q norm": ("self_attn.q_norm", 1, "epsilon", True, "RMSNorm.forward_native"),
    "epsilon, final norm": ("norm", None, "epsilon", True, "RMSNorm.forward_native"),
    "batch shape": (
        "post_attention_layernorm",
        1,
        "batch shape",
        True,
        "RMSNorm.forward_native",
    ),
    "bf16 cos/sin": (
        "self_attn.rope.q",
        0,
        "cos/sin precision",
        True,
        "RotaryEmbedding.forward_cpu",
    ),
    "unstable top-k": ("mlp.gate.ids", 1, "tie", True, "CPURouter._compute_routing"),
    "bf16 weights": ("mlp.gate.weights", 0, "dtype", True, "CPURouter._compute_routing"),
    "combination in bf16": (
        "mlp.experts",
        1,
        "combination rounding",
        False,
        "UnquantizedFusedMoEMethod.forward_native",
    ),
    "order of combination": (
        "mlp.experts",
        0,
        "order of combination",
        False,
        "UnquantizedFusedMoEMethod.forward_native",
    ),
    "unrounded residual": (
        "post_attention_layernorm",
        0,
        "unrounded residual",
        True,
        "RMSNorm.forward_native",
    ),
    "residual rounding": (
        "input_layernorm.in",
        1,
        "residual rounding",
        True,
        "RMSNorm.forward_native",
    ),
    "partial sums in bf16": (
        "self_attn.o_proj",
        0,
        "order of reduction",
        False,
        "RowParallelLinear.forward",
    ),
    "fp8 cache": (
        "self_attn.attention",
        1,
        "formula",
        False,
        "CPUAttentionBackendImpl.do_kv_cache_update",
    ),
    "bf16 router": ("mlp.gate", 0, "dtype", True, "GateLinear.forward"),
    "bf16 logits": ("lm_head", None, "dtype", True, "UnquantizedEmbeddingMethod.apply"),
    "bf16 log-softmax": ("logprob", None, "dtype", True, "Sampler.compute_logprobs"),
    "temperature": ("logprob", None, "temperature", True, "Sampler.compute_logprobs"),
    "transposed after reload": (
        "self_attn.o_proj",
        1,
        "transposed weights",
        True,
        "RowParallelLinear.forward",
    ),
    "stale after reload": (
        "self_attn.o_proj",
        0,
        "stale weights",
        True,
        "RowParallelLinear.forward",
    ),
    "weights not delivered": ("embed_tokens", None, "stale weights", True, ""),
    "cache of old weights": (
        "self_attn.attention",
        0,
        "stale cache",
        True,
        "CPUAttentionBackendImpl.forward",
    ),
}
EQUAL = (
    "nothing planted",
    "nothing left",
    "version 0",
    "reloaded well",
    "cache filled",
    "cache emptied",
)


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    """What the script found: one engine and one trainer for everything in it."""
    script = Path(__file__).with_name("doctor_plants.py")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PATCHKIT_", "VLLM_"))}
    run = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env=clean,
        timeout=500,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found: dict[str, Any] = json.loads(run.stdout)
    return found


@pytest.fixture(scope="module")
def examined(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every case, by name."""
    return {case["name"]: case for case in answer["cases"]}


def test_every_planted_case_is_expected(examined: dict[str, Any]) -> None:
    assert set(examined) == {*EXPECTED, *EQUAL}


@pytest.mark.parametrize("name", EQUAL)
def test_a_pair_without_a_plant_is_equal(examined: dict[str, Any], name: str) -> None:
    case = examined[name]
    assert case["equal"] is True, case["verdict"]
    assert case["first"] is None and case["causes"] == [] and case["origins"] == []
    assert case["notes"] == []


@pytest.mark.parametrize("name", EXPECTED)
def test_a_plant_is_found_where_it_is(examined: dict[str, Any], name: str) -> None:
    operator, layer, _, _, _ = EXPECTED[name]
    first = examined[name]["first"]
    assert (first["operator"], first["layer"]) == (operator, layer)
    assert 0 < first["differing_rows"] <= first["rows"]
    assert first["max_absdiff"] > 0
    if name == "weights not delivered":  # every operator with a weight differs by itself
        return
    # What was planted is the only difference: everything later only inherits it.
    assert [(o["operator"], o["layer"]) for o in examined[name]["origins"]] == [(operator, layer)]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_plant_is_called_by_its_cause(examined: dict[str, Any], name: str) -> None:
    _, _, kind, certain, _ = EXPECTED[name]
    likeliest = examined[name]["causes"][0]
    assert (likeliest["kind"], likeliest["certain"]) == (kind, certain), examined[name]["causes"]
    assert likeliest["evidence"] and likeliest["remedy"]


@pytest.mark.parametrize("name", EXPECTED)
def test_the_patch_that_stands_there_is_named(examined: dict[str, Any], name: str) -> None:
    covered = examined[name]["covered_by"]
    if not EXPECTED[name][4]:  # a lookup, which no patch replaces
        assert covered == {"rollout": [], "trainer": []}
        return
    assert any(p["symbol"].endswith(EXPECTED[name][4]) for p in covered["rollout"]), covered
    assert covered["trainer"], "the other half of the same operator"


def test_the_epsilons_are_computed_from_the_values_alone(examined: dict[str, Any]) -> None:
    # The planted norm has its right epsilon back before anybody could read it.
    first = examined["epsilon, first norm"]["first"]
    assert first["facts"]["rollout"]["eps"] == first["facts"]["trainer"]["eps"] == 1e-6
    evidence = examined["epsilon, first norm"]["causes"][0]["evidence"]
    assert evidence.startswith("1e-05 explains") and "1e-06 " in evidence


def test_values_are_recorded_again_where_none_were_held(examined: dict[str, Any]) -> None:
    held = examined["values on demand"]["bytes_held"]
    everything = examined["epsilon, first norm"]["bytes_held"]
    for name in ("rollout", "trainer"):
        assert 0 < held[name] < 0.2 * everything[name], "the first difference and its inputs alone"


def test_stale_weights_are_told_with_their_version(examined: dict[str, Any]) -> None:
    assert "version 2" in examined["stale after reload"]["causes"][0]["evidence"]
    assert "version 3" in examined["weights not delivered"]["causes"][0]["evidence"]


def test_rows_that_cannot_differ_do_not(examined: dict[str, Any]) -> None:
    # At position 0 cosines are one and sines zero, in bf16 as well.
    first = examined["bf16 cos/sin"]["first"]
    assert first["differing_rows"] == first["rows"] - examined["bf16 cos/sin"]["sequences"]


def separated(answer: dict[str, Any], name: str) -> Any:
    pytest.importorskip("numpy")
    from patchkit.parity.doctor.runs import made
    from patchkit.parity.doctor.separation import separate

    pair = answer["pairs"][name]
    return separate(made("rollout", pair["rollout"]), made("trainer", pair["trainer"]))


def test_a_real_run_with_older_weights_has_staleness_and_nothing_else(
    answer: dict[str, Any],
) -> None:
    found = separated(answer, "lag")
    by_lag = {g.name: g for g in found.groups}
    assert by_lag["lag 0"].k3 == 0 and by_lag["lag 0"].ratio_mean == 1, "the exact pair"
    assert found.part("stale").share == pytest.approx(1)
    assert 0 < by_lag["lag 1"].k3 < by_lag["lag 3"].k3
    assert found.part("semantic").kind == "none" and found.part("numerical").size == 0


def test_a_real_run_at_another_temperature_is_told_by_its_value(answer: dict[str, Any]) -> None:
    part = separated(answer, "temperature").part("semantic")
    # The planted engine reports log-probabilities of logits divided by 0.8.
    assert part.kind == "temperature" and part.share > 0.5
    assert part.value == pytest.approx(0.8, rel=0.25), "without entropies it is a rough estimate"


def doctor(*options: str, folder: Path) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PATCHKIT_", "VLLM_"))}
    return subprocess.run(
        [sys.executable, "-m", "patchkit", "doctor", "--json", "--runs", str(folder), *options],
        capture_output=True,
        text=True,
        env=clean,
        timeout=400,
        check=False,
    )


def test_a_stock_pair_shows_where_it_parts_and_what_would_cover_it(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    options = ("--stock", "--tensors", "self_attn.rope.q@0", "-o", str(page))
    run = doctor(*options, folder=tmp_path)
    assert run.returncode == 1, run.stderr[-4000:]
    found = json.loads(run.stdout)
    assert found["pair"] == "stock" and found["equal"] is False
    assert found["first"]["layer"] == 0, "two stacks do not agree through a whole layer"
    assert found["covered_by"]["rollout"] and found["covered_by"]["trainer"]
    assert all(o["status"] != "not compared" for o in found["operators"])
    assert found["notes"] == []
    text = page.read_text()
    assert found["verdict"] in text and "http" not in text
    (tensors,) = found["tensors"]
    assert Path(tensors).stat().st_size > 1000


@pytest.mark.nightly
@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("adapter", ["qwen3_moe", "qwen3", "glm4_moe"])
def test_every_adapter_is_equal_without_a_line_of_its_own(
    tmp_path: Path, adapter: str, workers: str
) -> None:
    run = doctor("--adapter", adapter, "--tp", workers, "--ranks", workers, folder=tmp_path)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    found = json.loads(run.stdout)
    assert found["equal"] is True
    assert sum(o["status"] == "equal" for o in found["operators"]) >= 30
