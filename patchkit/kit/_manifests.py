"""Is everything that the adapter needs as reviewed, and as the stored manifests say?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from patchkit.cli._requirements import requirements, reviewed_of
from patchkit.engine import Adapter, find_adapter
from patchkit.errors import Violation
from patchkit.kit._result import Outcome
from patchkit.symbols import Manifest, find_facts, installed_version, stored_manifest
from patchkit.symbols.drift import Requirement, State, judge_requirement
from patchkit.symbols.errors import PackageNotInstalledError

if TYPE_CHECKING:
    from patchkit.kit._stages import SuiteSettings


def fresh_manifests(settings: SuiteSettings) -> Outcome:
    """Read the installed sources, import nothing, and compare."""
    adapter = find_adapter(settings.adapter)
    needed = requirements(adapter, adapter.profile(settings.profile))
    reviewed = reviewed_of(adapter)
    violations: list[Violation] = []
    versions: dict[str, str] = {}
    manifests: dict[str, Manifest] = {}
    for package in sorted({r.package for r in needed}):
        try:
            versions[package] = version = installed_version(package)
        except PackageNotInstalledError as error:
            violations.append(_absent(package, error))
            continue
        stored = stored_manifest(package, version, extra=adapter.manifests)
        if stored is None:
            violations.append(_no_manifest(adapter, package, version))
        else:
            manifests[package] = stored
    compared = 0
    for requirement in needed:
        version = versions.get(requirement.package, "")
        if not version or not requirement.applies(version):
            continue
        compared += 1
        violations += _judged(adapter, requirement, version, reviewed)
        if requirement.package in manifests:
            violations += _stored(adapter, requirement, manifests[requirement.package])
    figures = {"symbols": compared, "versions": versions} if compared else {}
    return Outcome(violations=tuple(violations), figures=figures)


def _judged(
    adapter: Adapter,
    requirement: Requirement,
    version: str,
    reviewed: dict[str, dict[str, list[str]]],
) -> Iterator[Violation]:
    facts = find_facts(requirement.symbol)
    verdict = judge_requirement(requirement, version, facts, None, reviewed, {}, adapter.name)
    if verdict.state is not State.READY:
        yield Violation(
            subject=requirement.symbol,
            problem=f"{verdict.state} in {requirement.package} {version}",
            expected="a digest that reviewed.json knows",
            found=verdict.digest or "no such symbol",
            remedy=verdict.reason,
        )


def _stored(adapter: Adapter, requirement: Requirement, manifest: Manifest) -> Iterator[Violation]:
    symbol = requirement.symbol
    facts = find_facts(symbol)
    if facts is None:
        return  # said already
    stored = manifest.symbols.get(symbol)
    if stored is not None and stored.digest == facts.digest:
        return
    yield Violation(
        subject=symbol,
        problem="the stored manifest is not fresh",
        expected=f"digest {facts.digest}, as installed",
        found=f"digest {stored.digest}" if stored else "nothing about this symbol",
        remedy=_build(adapter, manifest.package, manifest.version),
    )


def _absent(package: str, error: Exception) -> Violation:
    return Violation(
        subject=package,
        problem="not installed",
        expected="the package whose symbols the adapter needs",
        found=str(error),
        remedy=f"install {package} here, at a version that the adapter supports",
    )


def _no_manifest(adapter: Adapter, package: str, version: str) -> Violation:
    return Violation(
        subject=f"{package} {version}",
        problem="no manifest of this version is stored",
        expected="a manifest that patchkit or the adapter ships",
        found="none",
        remedy=_build(adapter, package, version),
    )


def _build(adapter: Adapter, package: str, version: str) -> str:
    version = version.partition("+")[0]
    folder = adapter.manifests[0] if adapter.manifests else "MANIFESTS"
    command = (
        f"patchkit manifest build {package} installed --adapter {adapter.name} "
        f"--output {folder}/{package}/{version}.json"
    )
    if adapter.manifests:
        return f"build it: `{command}`"
    return f"build it: `{command}`, and declare the folder: Adapter(manifests=(MANIFESTS,))"
