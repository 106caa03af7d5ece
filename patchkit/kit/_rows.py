"""The operators of the forward path, each through its trials."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from patchkit.engine import find_adapter, resolve_reference
from patchkit.kit._result import Outcome
from patchkit.parity.conformance import examine

if TYPE_CHECKING:
    from patchkit.kit._stages import SuiteSettings


def row_invariant(settings: SuiteSettings) -> Outcome:
    """Examine everything that the adapter's ``operators`` yields."""
    adapter = find_adapter(settings.adapter)
    operators = resolve_reference(adapter.operators)
    figures: dict[str, Any] = {}
    violations = []
    for operator in operators():
        report = examine(operator)
        figures[operator.name] = sum(report.trials.values())
        violations += [finding.as_violation() for finding in report.findings]
    return Outcome(violations=tuple(violations), figures=figures)
