"""What the trainer sides are declared for, read off stored manifests: nothing is imported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from packaging.specifiers import SpecifierSet

from patchkit.cli._readiness import readiness
from patchkit.engine import Patch, find_adapter
from patchkit.engine import _shape as shape
from patchkit.runtime.profile import load_profile
from patchkit.symbols import SymbolFacts, find_facts, stored_manifest, stored_versions

ADAPTERS = ("qwen3_moe", "qwen3", "glm4_moe")
RENAMED = "5.24.0"  # past_key_values became cache
# Version, and what its patches call the cache.
VERSIONS = (("5.19.0", "past_key_values"), (RENAMED, "cache"))


def patches(adapter: str, version: str) -> Iterator[tuple[Patch, SymbolFacts, SymbolFacts]]:
    """Every patch of the default profile for that transformers, target, and replacement."""
    manifest = stored_manifest("transformers", version)
    assert manifest is not None
    declared = find_adapter(adapter)
    for patch in declared.trainer:
        ours = not patch.profiles or declared.default_profile in patch.profiles
        if not ours or not patch.symbol.startswith("transformers."):
            continue
        if SpecifierSet(patch.versions).contains(version):
            replacement = find_facts(str(patch.replacement))
            assert replacement is not None, patch.replacement
            yield patch, manifest.symbols[patch.symbol], replacement


def told(target: SymbolFacts, replacement: SymbolFacts) -> str:
    return shape.difference(
        shape.static_params(target.parameters),
        shape.static_params(replacement.parameters),
        bound=True,
    )


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize(("version", "cache"), VERSIONS)
def test_every_replacement_has_the_signature_of_that_version(
    adapter: str, version: str, cache: str
) -> None:
    found = list(patches(adapter, version))
    assert len({patch.symbol for patch, *_ in found}) == len(found)
    assert {patch.symbol: told(target, ours) for patch, target, ours in found} == {
        patch.symbol: "" for patch, *_ in found
    }
    takes = {patch.symbol.rpartition(":")[2] for patch, _, ours in found
             if cache in {p.name for p in ours.parameters}}  # fmt: skip
    assert {name.partition(".")[0].removeprefix(family(adapter)) for name in takes} == {
        "Attention", "ForCausalLM",
    }  # fmt: skip


def family(adapter: str) -> str:
    return {"qwen3_moe": "Qwen3Moe", "qwen3": "Qwen3", "glm4_moe": "Glm4Moe"}[adapter]


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_patches_of_one_version_do_not_fit_the_other(adapter: str) -> None:
    old, new = ({p.symbol: (t, ours) for p, t, ours in patches(adapter, v)} for v, _ in VERSIONS)
    renamed = {s for s in old if told(new[s][0], old[s][1])}
    assert {s.rpartition(":")[2] for s in renamed} == {
        f"{family(adapter)}Attention.forward",
        f"{family(adapter)}ForCausalLM.forward",
    }
    assert all("lacks cache" in told(new[s][0], old[s][1]) for s in renamed)
    assert all("lacks past_key_values" in told(old[s][0], new[s][1]) for s in renamed)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_callers_of_the_old_name_are_heard_where_the_target_hears_them(adapter: str) -> None:
    """Without upstream's decorator a cache would vanish in ``**kwargs``."""

    def renames(facts: SymbolFacts) -> list[str]:
        return [d for d in facts.decorators if "deprecate_kwarg" in d]

    for version, _ in VERSIONS:
        for _, target, ours in patches(adapter, version):
            assert renames(ours) == renames(target), ours.symbol


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_profile_takes_exactly_what_was_run(adapter: str) -> None:
    ready = {
        r.version for r in readiness(adapter, ["transformers"], None, {}) if r.state == "ready"
    }
    folder = find_adapter(adapter).profiles
    assert folder is not None
    pinned = SpecifierSet(load_profile(folder / "cpu_tree.toml").content.packages["transformers"])
    between = [f"5.{minor}.{patch}" for minor in range(16, 27) for patch in range(2)]
    taken = set(pinned.filter([*stored_versions("transformers"), *between]))
    assert {version for version, _ in VERSIONS} <= taken & ready
    assert {v.rpartition(".")[0] for v in taken} == {"5.19", "5.24"}
