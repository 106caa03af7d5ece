"""What drift means for those who patch: may this patch run on that version?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from patchkit.symbols._compare import Change, Kind
from patchkit.symbols._drift import Finding
from patchkit.symbols._facts import SymbolFacts
from patchkit.symbols._store import public_version
from patchkit.symbols._symbol import Symbol

Reviewed = Mapping[str, Mapping[str, Iterable[str]]]


class State(str, Enum):
    """A verdict; the worst one of a version is the version's own."""

    READY = "ready"
    REVIEW = "review"
    MOVED = "moved"
    BROKEN = "broken"
    SKIPPED = "skipped"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """One symbol that an adapter needs, and what for.

    Attributes:
        symbol: The symbol.
        role: ``patch``, ``relies_on`` or ``depends_on``.
        side: ``rollout``, ``trainer``, or empty for what the whole adapter relies on.
        versions: Versions of the package for which it holds, as PEP 440 specifiers.
        label: What the adapter calls it.
        patched_by: For ``depends_on``: the patch that needs it.
        action: What the patch does.
    """

    symbol: str
    role: str = "patch"
    side: str = ""
    versions: str = ""
    label: str = ""
    patched_by: str = ""
    action: str = ""

    @property
    def package(self) -> str:
        return Symbol.parse(self.symbol).package

    def applies(self, version: str) -> bool:
        """Whether it holds at a version; a version that cannot be read counts as one."""
        if not self.versions or not version:
            return not self.versions
        from packaging.specifiers import SpecifierSet
        from packaging.version import InvalidVersion

        try:
            return SpecifierSet(self.versions).contains(public_version(version), prereleases=True)
        except InvalidVersion:
            return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether one requirement holds at a version.

    Attributes:
        requirement: What is required.
        state: The verdict.
        reason: Why, in one sentence, with what to do.
        digest: The digest found.
        unreviewed: Whether it is ready only because its digest was accepted for this run.
        new_symbol: Where it went, for what moved.
    """

    requirement: Requirement
    state: State
    reason: str
    digest: str = ""
    unreviewed: bool = False
    new_symbol: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "symbol": self.requirement.symbol,
            "role": self.requirement.role,
            "side": self.requirement.side,
            "versions": self.requirement.versions,
            "verdict": self.state.value,
            "reason": self.reason,
            "digest": self.digest,
            "unreviewed": self.unreviewed,
            "new_symbol": self.new_symbol,
        }


def judge_requirement(
    requirement: Requirement,
    version: str,
    facts: SymbolFacts | None,
    finding: Finding | None,
    reviewed: Reviewed,
    accept: Mapping[str, str],
    adapter: str,
) -> Verdict:
    """The verdict on one requirement.

    Args:
        requirement: What is required.
        version: The version that is asked about.
        facts: What the symbol is there, None where it is gone.
        finding: How it fared since a version known to work, None where nobody knows.
        reviewed: symbol -> digest -> versions, as an adapter's ``reviewed.json`` says.
        accept: symbol -> digest, accepted for this run without a review.
        adapter: The adapter's name, for what to do.
    """

    def verdict(state: State, reason: str, **more: Any) -> Verdict:
        digest = facts.digest if facts else ""
        return Verdict(requirement=requirement, state=state, reason=reason, digest=digest, **more)

    symbol = requirement.symbol
    if not requirement.applies(version):
        return verdict(State.SKIPPED, f"for versions {requirement.versions} only")
    if facts is not None:
        known = reviewed.get(symbol, {})
        if facts.digest in known:
            return verdict(State.READY, "reviewed body")
        if accept.get(symbol) == facts.digest:
            return verdict(
                State.READY, "UNREVIEWED: its digest was accepted for this run", unreviewed=True
            )
    if finding is not None and finding.new_symbol is not None:
        also = f", {finding.also}" if finding.also else ""
        return verdict(
            State.MOVED,
            f"moved to {finding.new_symbol} (confidence {finding.confidence:.2f}{also}): "
            f"apply with `patchkit adapt {adapter}`",
            new_symbol=finding.new_symbol,
        )
    if facts is None:
        return verdict(
            State.BROKEN,
            "it is gone, and nothing resembles it: find what does its work now, and limit "
            "`versions` of the patch",
        )
    if finding is not None and finding.kind is Kind.SIGNATURE_BREAKING:
        what = "; ".join(c.text for c in finding.changes if c.kind is Kind.SIGNATURE_BREAKING)
        if requirement.role == "patch":
            return verdict(State.BROKEN, f"{what}: write a replacement of the new signature")
        return verdict(
            State.BROKEN,
            f"{what}: change what calls it by the old signature, then `patchkit adapt {adapter}`",
        )
    accept_hint = f"or, for one run, --accept '{symbol}={facts.digest}'"
    if finding is None:
        reason = "never reviewed"
    elif finding.kind is Kind.UNCHANGED:
        reason = "unchanged, but not reviewed"
    else:
        reason = _first(finding.changes) + "; the signature fits"
    return verdict(
        State.REVIEW,
        f"{reason}: read it, then `patchkit adapt {adapter}` ({accept_hint})",
    )


def _first(changes: tuple[Change, ...]) -> str:
    return next((c.text for c in changes if c.kind is not Kind.UNCHANGED), "changed")


def overall(verdicts: Iterable[Verdict]) -> State:
    """The verdict on a version: its worst one; what moved needs work like what broke."""
    states = {v.state for v in verdicts}
    if states & {State.BROKEN, State.MOVED}:
        return State.BROKEN
    if State.REVIEW in states:
        return State.REVIEW
    return State.READY if State.READY in states else State.BROKEN
