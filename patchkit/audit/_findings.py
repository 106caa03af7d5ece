"""The audit's answer: findings, verdicts, and what could not be seen."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from patchkit.audit._sightings import BlindSpot, Door, Place

REPORT_SCHEMA = 1

# What is said of a patch that adds something.
A_NEW_NAME = "a new name: nothing of that name is there"
# Ends the label of a package of which no version is at hand.
NOTHING_AT_HAND = "(none)"


class VerdictKind(str, Enum):
    """How a patch fares at one version; the value is what users and files say."""

    FINE = "fine"
    GONE = "gone"
    MOVED = "moved"
    RENAMED = "renamed"
    SIGNATURE = "signature"
    ANCHOR = "anchor-lost"
    GUARD = "guard-never-true"
    ABSORBED = "absorbed"
    OFF_PATH = "off-path"
    BODY = "body-changed"
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value

    @property
    def sentence(self) -> str:
        """The kind in words."""
        return _SENTENCES[self]

    @property
    def level(self) -> str:
        """``error``, ``warning`` or ``note``."""
        return _LEVELS.get(self, "note")

    @property
    def survives(self) -> bool:
        """Whether the patch does at this version what it was written for."""
        return self is VerdictKind.FINE


_SENTENCES = {
    VerdictKind.FINE: "fine",
    VerdictKind.GONE: "target gone",
    VerdictKind.MOVED: "target moved",
    VerdictKind.RENAMED: "target renamed",
    VerdictKind.SIGNATURE: "signature no longer fits",
    VerdictKind.ANCHOR: "anchor no longer matches",
    VerdictKind.GUARD: "guard never true",
    VerdictKind.ABSORBED: "upstream has absorbed it",
    VerdictKind.OFF_PATH: "no longer on the path",
    VerdictKind.BODY: "body changed",
    VerdictKind.UNKNOWN: "not judged",
}
_LEVELS = {
    VerdictKind.GONE: "error",
    VerdictKind.MOVED: "error",
    VerdictKind.RENAMED: "error",
    VerdictKind.SIGNATURE: "error",
    VerdictKind.ANCHOR: "error",
    VerdictKind.GUARD: "warning",
    VerdictKind.ABSORBED: "warning",
    VerdictKind.OFF_PATH: "warning",
    VerdictKind.BODY: "warning",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How one patch fares at one version.

    Attributes:
        version: The label of the version.
        kind: How it fares.
        text: Why, in one sentence.
        level: ``error``, ``warning`` or ``note``.
        new_symbol: Where the target is now.
        parameter: The parameter that does not fit.
        confidence: How sure the verdict is, from 0 to 1.
        also: What else is to be said, gravest first.
        diff: The original's difference, as lines of a unified diff.
        alias_sites: Names elsewhere in the package that the patch does not reach.
        silent: Whether the patch fails without a word at this version.
    """

    version: str
    kind: VerdictKind
    text: str = ""
    level: str = ""
    new_symbol: str | None = None
    parameter: str | None = None
    confidence: float = 1.0
    also: tuple[str, ...] = ()
    diff: tuple[str, ...] = ()
    alias_sites: tuple[str, ...] = ()
    silent: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "kind": self.kind.value,
            "level": self.level or self.kind.level,
            "text": self.text,
            "new_symbol": self.new_symbol,
            "parameter": self.parameter,
            "confidence": self.confidence,
            "also": list(self.also),
            "diff": list(self.diff),
            "alias_sites": list(self.alias_sites),
            "silent": self.silent,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One patch of the project.

    Attributes:
        target: What is patched: ``package.module:Qual.name``, a module or a file.
        package: Its import package.
        action: ``replace``, ``wrap``, ``value``, ``register``, ``dispatch``, ``delete``,
            ``class-swap``, ``module`` or ``rewrite``.
        form: How the project writes it.
        key: The entry of a registry, or the dispatch key.
        place: Where.
        through: The helper that does the write, where there is one.
        function: The function it stands in, empty at a module's top.
        conditions: The tests it stands under, and those of the calls that lead to it.
        replacement: What is written, as a reference where one exists.
        replacement_kind: ``function``, ``class``, ``value`` …
        signature: The replacement's signature.
        keeps_original: Whether it keeps the original and calls it.
        importable: Whether an adapter can name the replacement.
        versions: The guards as a PEP 440 range of the target's package.
        unexpressed: Conditions that are no version range.
        also_patched: Other places of the project that patch the same.
        workers: Through which entry points it runs in spawned workers; empty where none.
        source: The line.
        verdicts: One per version asked about.
    """

    target: str
    package: str
    action: str
    form: str
    place: Place
    key: str | None = None
    through: Place | None = None
    function: str = ""
    conditions: tuple[str, ...] = ()
    replacement: str = ""
    replacement_kind: str = ""
    signature: str = ""
    keeps_original: bool = False
    importable: bool = False
    descriptor: str = ""
    value: Any = None
    versions: str = ""
    unexpressed: tuple[str, ...] = ()
    also_patched: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    anchors: tuple[str, ...] = ()
    source: str = ""
    verdicts: tuple[Verdict, ...] = ()

    @property
    def fingerprint(self) -> str:
        """What stays the same while lines are added above: for baselines and SARIF."""
        parts = (
            self.target, self.key or "", self.action, self.place.file, self.function,
            self.replacement if "<" not in self.replacement else "",
        )  # fmt: skip
        return hashlib.blake2b("\x00".join(parts).encode(), digest_size=10).hexdigest()

    @property
    def identity(self) -> str:
        """The target, with its key where it has one."""
        return f"{self.target}[{self.key}]" if self.key else self.target

    def worst(self) -> Verdict | None:
        """The gravest verdict."""
        order = {"error": 0, "warning": 1, "note": 2}
        return min(self.verdicts, key=lambda v: order[v.level or v.kind.level], default=None)

    def as_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "package": self.package,
            "action": self.action,
            "form": self.form,
            "key": self.key,
            "file": self.place.file,
            "line": self.place.line,
            "through": str(self.through) if self.through else None,
            "function": self.function,
            "conditions": list(self.conditions),
            "replacement": {
                "reference": self.replacement,
                "kind": self.replacement_kind,
                "signature": self.signature,
                "calls_original": self.keeps_original,
                "importable": self.importable,
            },
            "versions": self.versions,
            "also_patched": list(self.also_patched),
            "workers": list(self.workers),
            "anchors": list(self.anchors),
            "source": self.source,
            "fingerprint": self.fingerprint,
            "verdicts": {v.version: v.as_dict() for v in self.verdicts},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What an audit says.

    Attributes:
        root: The folder that was audited.
        findings: The patches, by target file.
        blind_spots: What may patch and could not be followed.
        doors: Entry points through which workers come into the project.
        versions: Package -> labels of the versions asked about.
        files: How many files were looked at.
        skipped_tests: How many test files were left out.
        unreadable: File -> why it could not be read.
        baseline: Fingerprints that are known already.
        hints: What to do about the patches that were not judged.
        seconds: How long it took.
    """

    root: str
    findings: tuple[Finding, ...]
    blind_spots: tuple[BlindSpot, ...] = ()
    doors: tuple[Door, ...] = ()
    versions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    files: int = 0
    skipped_tests: int = 0
    unreadable: Mapping[str, str] = field(default_factory=dict)
    baseline: frozenset[str] = frozenset()
    hints: tuple[str, ...] = ()
    seconds: float = 0.0

    def summary(self) -> dict[str, dict[str, int]]:
        """Version -> verdict kind -> how many."""
        found: dict[str, Counter[str]] = {}
        for finding in self.findings:
            for verdict in finding.verdicts:
                found.setdefault(verdict.version, Counter())[verdict.kind.value] += 1
        return {version: dict(counts) for version, counts in found.items()}

    def survivors(self, version: str) -> tuple[int, int]:
        """How many of how many judged patches are fine at a version."""
        counts = self.summary().get(version, {})
        judged = sum(counts.values()) - self.unjudged(version)
        return counts.get(VerdictKind.FINE.value, 0), judged

    def unjudged(self, version: str) -> int:
        """How many patches nothing could be said about at a version."""
        return self.summary().get(version, {}).get(VerdictKind.UNKNOWN.value, 0)

    @property
    def new(self) -> tuple[Finding, ...]:
        """Findings with something to do that the baseline does not know."""
        return tuple(f for f in self.findings if self.is_new(f))

    def is_new(self, finding: Finding) -> bool:
        """Whether a finding has something to do and is not in the baseline."""
        return bool(self._marks(finding) - self.baseline)

    def marks(self) -> list[str]:
        """What a baseline of this report holds."""
        return sorted({mark for f in self.findings for mark in self._marks(f)})

    @staticmethod
    def _marks(finding: Finding) -> set[str]:
        return {
            f"{finding.fingerprint}:{v.kind}"
            for v in finding.verdicts
            if (v.level or v.kind.level) != "note"
        }

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": REPORT_SCHEMA,
            "root": self.root,
            "versions": {p: list(v) for p, v in self.versions.items()},
            "summary": {
                "files": self.files,
                "findings": len(self.findings),
                "new": len(self.new),
                "blind_spots": len(self.blind_spots),
                "skipped_tests": self.skipped_tests,
                "verdicts": self.summary(),
                "survive": {
                    v: {
                        "fine": self.survivors(v)[0],
                        "judged": self.survivors(v)[1],
                        "not_judged": self.unjudged(v),
                    }
                    for v in self.summary()
                },
            },
            "findings": [{**f.as_dict(), "new": self.is_new(f)} for f in self.findings],
            "entry_points": [
                {
                    "group": d.group,
                    "name": d.name,
                    "target": d.target,
                    "file": d.place.file,
                    "line": d.place.line,
                }
                for d in self.doors
            ],
            "not_seen": [
                {
                    "kind": b.kind,
                    "file": b.place.file,
                    "line": b.place.line,
                    "source": b.text,
                    "reason": b.reason,
                }
                for b in self.blind_spots
            ],
            "hints": list(self.hints),
            "unreadable": dict(self.unreadable),
            "seconds": self.seconds,
        }
