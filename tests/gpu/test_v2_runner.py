"""vLLM's second model runner samples by itself: no profile covers it, and each says so.

Static, from the stored manifests of the versions that have it: a version in which the
symbols move, or a patch that is declared for one, makes this fail until somebody looks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from patchkit.engine import find_adapter
from patchkit.runtime.engine_gate import check_settings
from patchkit.runtime.profile import load_profile
from patchkit.symbols import stored_manifest

pytestmark = pytest.mark.anywhere

VERSIONS = ("0.26.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
# Where its log-probabilities of sampled tokens come from.
V2 = (
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner",
    "vllm.v1.worker.gpu.sample.sampler:Sampler.__call__",
    "vllm.v1.worker.gpu.sample.logprob:compute_token_logprobs",
)
V1 = "vllm.v1.sample.sampler:Sampler.forward"

ADAPTER = find_adapter("qwen3_moe")
assert ADAPTER.profiles is not None
PROFILES = sorted(ADAPTER.profiles.glob("*.toml"))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("symbol", [V1, *V2])
def test_both_samplers_are_where_they_were(version: str, symbol: str) -> None:
    manifest = stored_manifest("vllm", version)
    assert manifest is not None
    assert symbol in manifest.symbols


def test_no_patch_reaches_the_second_runner() -> None:
    assert not [p.symbol for p in ADAPTER.rollout if p.symbol.startswith("vllm.v1.worker.gpu.")]


@pytest.mark.parametrize("path", PROFILES, ids=lambda p: p.stem)
def test_every_profile_fixes_the_first_runner_and_refuses_the_second(path: Path) -> None:
    profile = load_profile(path)
    assert profile.content.engine.model_runner == "v1"
    assert profile.engine_environment()["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    (refused,) = [
        v
        for v in check_settings({"use_v2_model_runner": True}, profile)
        if "use_v2_model_runner" in v.subject
    ]
    assert refused.found == "True"
    assert "a sampler of its own" in refused.problem


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "profile", ["vllm_bi", "vllm_bi_fast", "tp_independent", "tp_independent_4"]
)
def test_patches_for_gpus_apply_to_one_version(profile: str, version: str) -> None:
    from packaging.specifiers import SpecifierSet

    mine = [p for p in ADAPTER.rollout if profile in p.profiles and p.symbol.startswith("vllm.")]
    assert mine
    for patch in mine:
        assert (version in SpecifierSet(patch.versions)) is (version == "0.26.0"), patch.symbol
