"""The CUDA declarations, read without a GPU and without importing what they patch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from patchkit.engine import find_adapter, inspect_plan, resolve_reference
from patchkit.runtime.providers import (
    find_implementation,
    load_record,
    standing_of,
    used_implementations,
)
from patchkit.symbols import stored_manifest
from patchkit_adapters.qwen3_moe.cuda import EVERY

pytestmark = pytest.mark.anywhere

OPERATORS = "patchkit.providers.cuda"


def cuda_patches():
    from patchkit_adapters.qwen3_moe.cuda import CUDA_ROLLOUT, CUDA_TRAINER

    return [*CUDA_ROLLOUT, *CUDA_TRAINER]


def test_declaring_imports_nothing_heavy() -> None:
    code = (
        "import sys, patchkit_adapters.qwen3_moe.cuda; "
        "print([m for m in ('torch', 'triton', 'vllm', 'transformers') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(("package", "version"), [("vllm", "0.26.0"), ("transformers", "5.17.0")])
def test_the_versions_that_were_measured_are_reviewed(package: str, version: str) -> None:
    manifest = stored_manifest(package, version)
    assert manifest is not None
    reviewed = find_adapter("qwen3_moe").reviewed
    import json

    digests = json.loads(reviewed.read_text())["symbols"]
    targets = {p.symbol for p in cuda_patches()} | {d for p in cuda_patches() for d in p.depends_on}
    for symbol in sorted(t for t in targets if t.startswith(package + ".")):
        known = [digest for digest, versions in digests[symbol].items() if version in versions]
        assert known, f"{symbol} was never reviewed at {version}"
        facts = manifest.symbols.get(symbol)
        if facts is not None:
            assert facts.digest in known, f"{symbol} differs from what was reviewed"


@pytest.mark.stack
@pytest.mark.parametrize("side", ["rollout", "trainer"])
def test_every_replacement_can_be_imported(side: str) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("transformers")
    from patchkit_adapters.qwen3_moe.cuda import CUDA_ROLLOUT, CUDA_TRAINER

    for patch in CUDA_ROLLOUT if side == "rollout" else CUDA_TRAINER:
        assert callable(resolve_reference(patch.replacement)), patch.symbol


@pytest.mark.stack
@pytest.mark.parametrize(
    "profile", ["vllm_bi", "vllm_bi_fast", "tp_independent", "tp_independent_4"]
)
def test_another_vllm_is_refused(profile: str) -> None:
    import vllm

    if vllm.__version__.startswith("0.26."):
        pytest.skip("this is the vLLM that the profile is for")
    plan = inspect_plan("qwen3_moe", "rollout", profile=profile)
    assert any("no patch of this profile is for this vllm" in str(v) for v in plan.violations)


@pytest.mark.parametrize("profile", EVERY)
def test_a_profile_names_the_operators_that_its_patches_import(profile: str) -> None:
    from patchkit.runtime.profile import load_profile

    adapter = find_adapter("qwen3_moe")
    assert used_implementations(adapter, profile) == (OPERATORS,)
    named = load_profile(adapter.profiles / f"{profile}.toml").content.providers
    assert list(named.allow) == [OPERATORS]


def test_the_record_is_of_these_sources() -> None:
    """On a GPU: `patchkit admit patchkit.providers.cuda --write`; nothing else makes it anew."""
    implementation = find_implementation(OPERATORS)
    assert implementation is not None
    for entry in load_record(implementation.record):
        assert entry["digest"] == implementation.digest
        assert set(entry["operators"]) == set(implementation.operators())


def test_operators_with_the_engines_bits_replace_no_reference_provider() -> None:
    implementation = find_implementation(OPERATORS)
    assert implementation is not None
    assert standing_of(implementation).operators == ()
