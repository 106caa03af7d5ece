"""What a conformance run found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from patchkit.errors import Violation, ViolationsError
from patchkit.parity.conformance.bits import Difference


class ConformanceError(ViolationsError):
    """An operator's rows depend on more than themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One trial that an operator failed.

    Attributes:
        operator: Name of the operator, with its shape.
        check: The property tried, such as ``batch size``.
        case: The case of that check, such as ``M=31``.
        problem: What is wrong, as a phrase.
        row: First row concerned, as the operator's inputs count it; -1 when the
            whole call failed.
        output: Which of several outputs.
        difference: First differing element within that output, and its bits.
    """

    operator: str
    check: str
    case: str
    problem: str
    row: int = -1
    output: int = 0
    difference: Difference | None = None

    def __str__(self) -> str:
        place = f"{self.operator}, {self.check}, {self.case}"
        if self.row >= 0:
            place += f", row {self.row}"
        if self.difference is None:
            return f"{place}: {self.problem}"
        d = self.difference
        return (
            f"{place}: {self.problem} at element {list(d.index)} of output {self.output}: "
            f"{d.expected} ({d.expected_bits}) against {d.found} ({d.found_bits}); "
            f"{d.differing} of {d.compared} elements differ"
        )

    def as_violation(self) -> Violation:
        expected, found = "", ""
        if d := self.difference:
            expected = f"row {self.row}, element {list(d.index)}: {d.expected} ({d.expected_bits})"
            found = f"{d.found} ({d.found_bits}); {d.differing} of {d.compared} elements differ"
        return Violation(
            subject=f"{self.operator}: {self.check}, {self.case}",
            problem=self.problem,
            expected=expected,
            found=found,
            remedy="use a provider that is row-invariant here, or take the shape out of the claim",
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything tried on one operator, or on several.

    Attributes:
        operators: What was examined.
        trials: Comparisons made, by check: a check that compared nothing proves nothing.
        skipped: Checks, or cases of them, that do not apply, with the reason.
        findings: Every trial that failed.
        environment: Versions, device and threads of the run.
    """

    operators: tuple[str, ...]
    trials: Mapping[str, int]
    skipped: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.findings and bool(self.trials)

    @property
    def failed_checks(self) -> frozenset[str]:
        return frozenset(finding.check for finding in self.findings)

    def raise_if_failed(self) -> None:
        """Raise with every finding.

        Raises:
            ConformanceError: The operator failed a trial, or none was made.
        """
        if self.passed:
            return
        names = ", ".join(self.operators) or "nothing"
        violations = [finding.as_violation() for finding in self.findings] or [
            Violation(
                subject=names,
                problem="no trial was made",
                expected="at least one comparison",
                remedy="give the operator inputs, and leave at least one check in",
            )
        ]
        raise ConformanceError(f"not row-invariant: {names}", violations)

    def as_dict(self) -> dict[str, Any]:
        return {
            "operators": list(self.operators),
            "passed": self.passed,
            "trials": dict(sorted(self.trials.items())),
            "skipped": dict(sorted(self.skipped.items())),
            "findings": [finding.as_dict() for finding in self.findings],
            "environment": dict(self.environment),
        }


def merge_reports(reports: Iterable[Report]) -> Report:
    """One report of several operators; a skipped check is named with its operator."""
    reports = list(reports)
    trials: dict[str, int] = {}
    for report in reports:
        for check, count in report.trials.items():
            trials[check] = trials.get(check, 0) + count
    return Report(
        operators=tuple(name for report in reports for name in report.operators),
        trials=trials,
        skipped={
            f"{', '.join(report.operators)}: {check}": why
            for report in reports
            for check, why in report.skipped.items()
        },
        findings=tuple(finding for report in reports for finding in report.findings),
        environment=reports[0].environment if reports else {},
    )
