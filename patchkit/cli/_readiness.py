"""The verdict on every known version of every package that an adapter patches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from patchkit.cli._requirements import Reviewed, requirements, reviewed_of, reviewed_versions
from patchkit.errors import ConfigurationError
from patchkit.symbols import Manifest, stored_manifest, stored_versions
from patchkit.symbols.drift import (
    Finding,
    ManifestView,
    Requirement,
    State,
    Verdict,
    diff,
    judge_requirement,
    overall,
    versions_between,
)

if TYPE_CHECKING:
    from patchkit.engine import Adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """One version of one package.

    Attributes:
        package: The package.
        version: The version.
        state: ready, review or broken.
        reason: Why, in one sentence.
        verdicts: Requirement by requirement.
    """

    package: str
    version: str
    state: State
    reason: str
    verdicts: tuple[Verdict, ...] = ()

    @property
    def unreviewed(self) -> list[str]:
        """Symbols that pass only because their digest was accepted for this run."""
        return sorted({v.requirement.symbol for v in self.verdicts if v.unreviewed})

    def as_dict(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "package": self.package,
            "version": self.version,
            "verdict": self.state.value,
            "reason": self.reason,
            "unreviewed": self.unreviewed,
            "verdicts": [v.as_dict() for v in self.verdicts],
        }


def readiness(
    name: str, packages: Sequence[str], profile: str | None, accept: Mapping[str, str]
) -> list[Readiness]:
    """Every known version, oldest first, package by package.

    Args:
        name: The adapter.
        packages: Only these; all that it patches where empty.
        profile: One of its profiles; the default one where None.
        accept: symbol -> digest, accepted without a review.
    """
    from patchkit.engine import find_adapter

    adapter = find_adapter(name)
    needed = requirements(adapter, adapter.profile(profile))
    patched = list(dict.fromkeys(r.package for r in needed if r.role == "patch"))
    if unknown := sorted(set(packages) - set(patched)):
        raise ConfigurationError(f"adapter {name!r} patches nothing of {', '.join(unknown)}")
    rows = []
    used: set[str] = set()
    for package in packages or patched:
        for row in _package(adapter, package, needed, accept):
            used |= set(row.unreviewed)
            rows.append(row)
    if stale := sorted(set(accept) - used):
        raise ConfigurationError(
            "--accept names what needs no exception, or a digest that no version has: "
            + ", ".join(stale)
        )
    return rows


def _package(
    adapter: Adapter, package: str, needed: Sequence[Requirement], accept: Mapping[str, str]
) -> Iterable[Readiness]:
    mine = [r for r in needed if r.package == package]
    versions = stored_versions(package, extra=adapter.manifests)
    if not versions:
        raise ConfigurationError(
            f"there is no manifest of {package}; build one with `patchkit manifest build`"
        )
    reviewed = reviewed_of(adapter)
    for version in versions:
        manifest = stored_manifest(package, version, extra=adapter.manifests)
        assert manifest is not None
        yield _version(adapter, package, mine, manifest, versions, reviewed, accept)


def _version(
    adapter: Adapter,
    package: str,
    needed: Sequence[Requirement],
    manifest: Manifest,
    versions: Sequence[str],
    reviewed: Reviewed,
    accept: Mapping[str, str],
) -> Readiness:
    version = manifest.version
    patches = [r for r in needed if r.role == "patch"]
    # A few patches for any version (of a gate, say) do not make a version supported for
    # which none of the many that are written version by version is meant.
    limited = [r for r in patches if r.versions]
    if 2 * len(limited) <= len(patches):
        limited = patches
    if not any(r.applies(version) for r in limited):
        reason = f"no patch is declared for {package} {version} ({_declared(limited)})"
        return Readiness(package=package, version=version, state=State.BROKEN, reason=reason)
    view = ManifestView(manifest)
    reference, findings = _since_review(package, needed, view, versions, reviewed, adapter)
    verdicts = []
    for requirement in needed:
        if not view.known(requirement.symbol):
            raise ConfigurationError(
                f"the manifest of {package} {version} says nothing about {requirement.symbol}: "
                f"build it again with `patchkit manifest build {package} {version}`"
            )
        verdicts.append(
            judge_requirement(
                requirement,
                version,
                view.facts(requirement.symbol),
                # Another patch, for other versions, has another shape.
                findings.get(requirement.symbol) if requirement.applies(reference) else None,
                reviewed,
                accept,
                adapter.name,
            )
        )
    state = overall(verdicts)
    return Readiness(
        package=package,
        version=version,
        state=state,
        reason=_reason(state, verdicts),
        verdicts=tuple(verdicts),
    )


def _declared(patches: Sequence[Requirement]) -> str:
    """The versions that patches are declared for, in few words."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    ranges = sorted({r.versions for r in patches})
    bounds = sorted({Version(s.version.rstrip(".*")) for r in ranges for s in SpecifierSet(r)})
    if len(ranges) > 2 and bounds:
        return f"declared: between {bounds[0]} and {bounds[-1]}"
    return "declared: " + " and ".join(ranges)


def _reason(state: State, verdicts: Sequence[Verdict]) -> str:
    if state is State.READY:
        ready = [v for v in verdicts if v.state is State.READY]
        unreviewed = sum(v.unreviewed for v in ready)
        text = f"{len(ready)} symbols as reviewed"
        return text if not unreviewed else f"{text[:-9]}, {unreviewed} of them UNREVIEWED"
    bad = [v for v in verdicts if v.state in (State.BROKEN, State.MOVED)]
    bad = bad or [v for v in verdicts if v.state is State.REVIEW]
    names = [
        f"{v.requirement.symbol.rpartition(':')[2]} ({v.reason.partition(':')[0]})" for v in bad
    ]
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return "; ".join(names[:2]) + more


def _since_review(
    package: str,
    needed: Sequence[Requirement],
    new: ManifestView,
    versions: Sequence[str],
    reviewed: Reviewed,
    adapter: Adapter,
) -> tuple[str, dict[str, Finding]]:
    """A version at which symbols were reviewed, and how each fared since then."""
    from packaging.version import Version

    symbols = [r.symbol for r in needed]
    stored = {Version(v).public: v for v in versions}
    known = {
        stored[public]
        for v in reviewed_versions(reviewed, symbols)
        if (public := Version(v).public) in stored
    }
    here = Version(new.version)
    # The newest reviewed version before this one tells best what changed since.
    earlier = sorted((v for v in known if Version(v) < here), key=Version)
    later = sorted((v for v in known if Version(v) > here), key=Version)
    findings: dict[str, Finding] = {}
    reference = ""
    for text in earlier[-1:] or later[:1]:
        manifest = stored_manifest(package, text, extra=adapter.manifests)
        if manifest is None:
            continue
        reference, old = text, ManifestView(manifest)
        between = versions_between(package, old, new, extra=adapter.manifests)
        for finding in diff(old, new, symbols, between=between).findings:
            findings[finding.symbol] = finding
    return reference, findings
