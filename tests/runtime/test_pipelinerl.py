"""Profile ``pipelinerl_v1``: explicit, in flight, measured, and never called on-policy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from profiles import machine

from patchkit.runtime.contract import ContractError, preflight
from patchkit.runtime.engine_gate import check_settings
from patchkit.runtime.profile import Profile, ProfileError, load_profile
from patchkit_adapters.fp32_lm_head import adapter

HERE = Path(__file__).parent
VERSIONS = {"vllm": "0.32.0+cpu", "torch": "2.13.0+cpu", "transformers": "5.19.0"}


def profile(**changes: Any) -> Profile:
    assert adapter.profiles is not None
    return load_profile(adapter.profiles / "pipelinerl_v1.toml").changed(**changes)


def contract(tmp_path: Path, made: Profile, **changes: Any) -> Any:
    observed = machine(
        packages=VERSIONS,
        adapters=("fp32_lm_head",),
        model_config={"architectures": ["SomeForCausalLM"]},
        environment=made.engine_environment(),
        **changes,
    )
    return preflight(made, observed, opt_in=True, run_dir=tmp_path / "run")


def test_every_default_of_v1_that_matters_is_said():
    arguments = profile().engine_arguments("m")
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments["enable_prefix_caching"] is False
    assert arguments["async_scheduling"] is False
    assert arguments["disable_cascade_attn"] is True
    assert arguments["hf_overrides"] == {"head_dtype": "float32"}
    assert arguments["generation_config"] == "vllm"


def test_it_is_a_contract_for_any_model_that_is_never_on_policy(tmp_path: Path):
    made = contract(tmp_path, profile())
    assert made.on_policy is False
    assert made.environment.variables["PATCHKIT_ADAPTER"] == "fp32_lm_head"
    assert made.environment.variables["PATCHKIT_PROFILE"] == "pipelinerl_v1"
    assert made.environment.variables["PATCHKIT_SAMPLING"] == "on_policy"


def test_calling_it_on_policy_is_refused_for_each_reason(tmp_path: Path):
    with pytest.raises(ContractError) as e:
        contract(tmp_path, profile(**{"profile.claim": "on_policy"}))
    told = str(e.value)
    assert 'the claim "on_policy" is made for one model' in told
    assert "weights.receipts" in told
    assert len(e.value.violations) == 2


def test_a_reset_of_the_caches_is_refused(tmp_path: Path):
    with pytest.raises(ContractError, match="throws away what running requests need"):
        contract(tmp_path, profile(**{"weights.caches": "reset"}))


@pytest.mark.parametrize("policy", ["temperature", "processed", "top_p"])
def test_sampling_that_the_replay_does_not_repeat_has_no_name(policy: str):
    """Processed log-probabilities at another temperature need a replay that does the same."""
    with pytest.raises(ProfileError, match=r"sampling\.policy"):
        profile(**{"sampling.policy": policy})


@pytest.mark.parametrize(
    ("key", "value", "setting"),
    [
        ("engine.logprobs_mode", "raw_logprobs", "model_config.logprobs_mode"),
        ("engine.head_dtype", "model", "model_config.head_dtype"),
        ("engine.prefix_caching", True, "cache_config.enable_prefix_caching"),
        ("engine.async_scheduling", True, "scheduler_config.async_scheduling"),
        ("engine.cascade_attention", True, "model_config.disable_cascade_attn"),
    ],
)
def test_an_engine_with_another_of_them_is_refused(key: str, value: Any, setting: str):
    from test_engine_gate import GOOD

    def wrong(engine: dict[str, Any], wanted: Profile) -> list[str]:
        return [v.subject for v in check_settings(engine, wanted) if setting in v.subject]

    right = {
        **GOOD,
        "model_config.logprobs_mode": "processed_logprobs",
        "model_config.head_dtype": "float32",
        "cache_config.enable_prefix_caching": False,
        "scheduler_config.async_scheduling": False,
        "model_config.disable_cascade_attn": True,
    }
    assert wrong(right, profile()) == []
    assert len(wrong(right, profile(**{key: value}))) == 1


@pytest.mark.stack
@pytest.mark.e2e
def test_on_a_real_engine_from_preflight_to_artifact(tmp_path: Path):
    """Two updates under running requests; then the core is killed under others."""
    pytest.importorskip("vllm")
    from tiny_models import write_tiny

    for number, name in enumerate(("model", "v1", "v2"), start=1):
        write_tiny("qwen2", tmp_path / name, seed=number)

    def run(what: str) -> Any:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PATCHKIT_", "VLLM_"))}
        done = subprocess.run(
            [sys.executable, str(HERE / "pipelinerl_script.py"), str(tmp_path), what],
            env={
                **clean,
                "OMP_NUM_THREADS": "1",
                "TORCHDYNAMO_DISABLE": "1",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_LOGGING_LEVEL": "ERROR",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
                "PYTHONPATH": str(HERE),
            },
            capture_output=True,
            text=True,
            timeout=240,
        )
        lines = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
        assert lines, done.stdout[-2000:] + done.stderr[-4000:]
        return json.loads(lines[0].removeprefix("RESULT "))

    made = run("run")
    assert made["on_policy contract"] is False
    assert made["settings"]["model_config.logprobs_mode"] == "processed_logprobs"
    assert made["settings"]["model_config.head_dtype"] == "float32"
    ((role, state, name),) = made["attested"]
    assert (role, name) == ("worker", "fp32_lm_head")
    assert state in ("active", "pending"), "a core has no use for the front end's modules"
    assert any(s.endswith("LogitsProcessor._apply_head") for s in made["patched"])
    assert "SamplingParams.temperature" in made["refused"]

    assert made["unfinished after update 1"]
    assert made["unfinished after update 2"]
    assert made["versions"] == [[0, 1, 2]] * 3, "each request went on under new weights, twice"
    assert made["covered"] == [300] * 3, "every token has a version"
    lag = made["lag"]
    assert lag["tokens"] == 900
    assert set(lag["histogram"]) == {"0", "1", "2"}
    assert sum(lag["histogram"].values()) == 900
    assert lag["on_policy"] is False
    assert "3 of 3 sequences are not of version 2" in made["as on-policy"]
    assert "NOT ON-POLICY: weights changed under running requests" in made["verdict"]
    # What is loaded after two in-flight updates is the checkpoint, to the last bit.
    assert made["scores"] == run("score")
    assert len(made["scores"]) > 30

    assert made["killed"] == ["EngineDeadError"] * 3
    assert made["named"] in made["update"]
    assert "EngineLostError" in made["poisoned"]
    assert made["noticed after"] < 20
