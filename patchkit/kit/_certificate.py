"""What a complete run of the suite showed, as a file."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from patchkit.engine import Adapter, find_adapter
from patchkit.files import write_atomically, writing
from patchkit.kit._result import StageResult
from patchkit.kit._stages import STAGES, SuiteSettings
from patchkit.runtime.canonical import canonical_json, digest_of
from patchkit.symbols import Symbol, find_facts, installed_version

SCHEMA = 1


def certificate(settings: SuiteSettings, results: Iterable[StageResult]) -> dict[str, Any]:
    """The content of a certificate; ``green`` only where every stage ran and none failed."""
    adapter = find_adapter(settings.adapter)
    stages = [result.as_dict() for result in results]
    ran = {stage["stage"]: stage["status"] for stage in stages}
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "adapter": adapter.name,
        "profile": adapter.profile(settings.profile),
        "green": set(ran) == set(STAGES) and "failed" not in ran.values(),
        "not_run": [name for name in STAGES if name not in ran],
        "settings": settings.as_dict(),
        "declaration": _declaration(adapter, settings.profile),
        "versions": {"patchkit": version("patchkit"), **_versions(adapter)},
        "machine": {
            "python": platform.python_version(),
            "system": platform.system(),
            "processor": processor(),
        },
        "stages": stages,
    }
    return {**content, "digest": digest_of(content)}


def write_certificate(path: Path, content: dict[str, Any]) -> Path:
    """Write it whole or not at all.

    Raises:
        ConfigurationError: The folder cannot be written to.
    """
    with writing(path):
        return write_atomically(path, canonical_json(content) + b"\n")


def processor() -> str:
    """Vendor and model where the system tells, as operators' bits may depend on it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _declaration(adapter: Adapter, profile: str) -> dict[str, str]:
    """Patch to the digest of its replacement's source: what was certified."""
    chosen = adapter.profile(profile)
    found = {}
    for side in ("rollout", "trainer"):
        for patch in adapter.patches(side):
            if patch.profiles and chosen not in patch.profiles:
                continue
            key = f"{side} {patch.identity}" + (f" {patch.versions}" if patch.versions else "")
            facts = find_facts(patch.replacement) if isinstance(patch.replacement, str) else None
            found[key] = facts.digest if facts else patch.replacement_name
    return dict(sorted(found.items()))


def _versions(adapter: Adapter) -> dict[str, str]:
    patches = (*adapter.rollout, *adapter.trainer)
    packages = sorted({Symbol.parse(p.symbol).package for p in patches})
    return {package: installed_version(package) for package in packages}
