"""The CPU side of qwen3_moe as it stood at vLLM 0.26: of later versions it knows nothing.

Written by hand out of today's adapter: the patches that 0.26 needs, with the range of
versions that an author widens to see what an upgrade brings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from packaging.specifiers import SpecifierSet

from patchkit.engine import Adapter, Patch
from patchkit_adapters.qwen3_moe import adapter as now


def then(patches: Iterable[Patch]) -> Iterator[Patch]:
    """Patches of the CPU profile that apply at 0.26, for 0.26 and whatever comes."""
    for patch in patches:
        cpu = not patch.profiles or "cpu_tree" in patch.profiles
        if patch.symbol.startswith("vllm.") and cpu:
            if not patch.versions or SpecifierSet(patch.versions).contains("0.26.0"):
                yield replace(patch, profiles=(), versions=patch.versions and ">=0.26")


adapter = Adapter(
    name="moe_at_0_26",
    rollout=tuple(then(now.rollout)),
    relies_on=tuple(symbol for symbol in now.relies_on if symbol.startswith("vllm.")),
    reviewed=Path(__file__).with_name("reviewed.json"),
)
