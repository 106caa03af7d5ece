"""Admission of a faster operator: only after trials beside its reference.

An implementation names its cases (``CASES``); each holds an operator of the conformance
kit and the reference's function of the same arguments. ``same bits``: every bit of
every row. ``same guarantees``: every row depends on itself
alone, and the result stays within a stated distance of the reference. Gradients are
finite and close to the reference's in both: no profile promises their bits.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from patchkit.engine import resolve_reference
from patchkit.errors import ConfigurationError, Violation, ViolationsError
from patchkit.parity.conformance import Report, RowOperator, examine
from patchkit.runtime.canonical import canonical_json
from patchkit.runtime.files import write_atomically
from patchkit.runtime.providers import (
    SCHEMA,
    Implementation,
    find_implementation,
    hardware,
    load_record,
    versions_now,
)

__all__ = ["AdmissionCase", "AdmissionRefusedError", "admit", "write_admission"]

# Float32 sums over a row in another order; a bf16 gradient is rounded to 2**-8 besides.
_GRADIENTS_WITHIN = 2.0**-7

Promise = Literal["same bits", "same guarantees"]


class AdmissionRefusedError(ViolationsError):
    """An implementation that failed its trials; nothing is recorded."""


@dataclass(frozen=True, kw_only=True)
class AdmissionCase:
    """One operator at one shape, beside its reference.

    Attributes:
        name: The operator, as the reference calls it.
        operator: On the device, with its inputs; also one of the other kinds of the kit,
            whose own checks then are all there is.
        reference: Called with the operator's inputs and weights as keywords, on their
            device. Needed for a :class:`RowOperator`.
        promise: What its admission says.
        within: For ``same guarantees``: the largest difference, relative to the largest
            value of the reference's result.
    """

    name: str
    operator: Any
    reference: Callable[..., Any] | None = None
    promise: Promise = "same bits"
    within: float = 0.0


def admit(module: str) -> dict[str, Any]:
    """Put an implementation through its trials on this machine.

    Returns:
        The admission, ready to be recorded.

    Raises:
        ConfigurationError: The module is no implementation, or has no such device here.
        AdmissionRefusedError: With everything that was found.
    """
    implementation = find_implementation(module)
    if implementation is None:
        raise ConfigurationError(
            f"{module} is no implementation of operators: an importable package that says "
            "IMPLEMENTS, DEVICE and CASES in constants of its __init__"
        )
    if not hardware(implementation.device):
        raise ConfigurationError(
            f"{module} runs on {implementation.device}, of which this machine has none; run "
            "`patchkit admit` where it is to be used"
        )
    violations: list[Violation] = []
    operators: dict[str, dict[str, Any]] = {}
    for case in resolve_reference(implementation.cases)():
        outcome = _tried(case)
        violations += outcome.pop("violations")
        _merge(operators, case, outcome)
    violations += _untried(implementation, operators)
    if violations:
        raise AdmissionRefusedError(f"{module} is not admitted", violations)
    return {
        "device": implementation.device,
        "hardware": hardware(implementation.device),
        "versions": versions_now(implementation.device),
        "digest": implementation.digest,
        "seen_with": {"torch": torch.__version__, "python": platform.python_version()},
        "operators": operators,
    }


def write_admission(module: str, admission: Mapping[str, Any]) -> Path:
    """Put an admission into the implementation's record, in place of what it makes stale.

    Admissions of the same hardware and versions are replaced, and so are those of other
    sources: what was seen of other code says nothing.
    """
    implementation = find_implementation(module)
    assert implementation is not None  # admitted
    kept = [
        entry
        for entry in load_record(implementation.record)
        if entry["digest"] == admission["digest"]
        and (entry["hardware"], entry["versions"]) != (admission["hardware"], admission["versions"])
    ]
    content = {
        "schema": SCHEMA,
        "implementation": module,
        "admissions": sorted([*kept, admission], key=canonical_json),
    }
    text = json.dumps(content, indent=1, sort_keys=True) + "\n"
    return write_atomically(implementation.record, text.encode())


# -- trials ----------------------------------------------------------------------------


def _tried(case: AdmissionCase) -> dict[str, Any]:
    operator = case.operator
    if isinstance(operator, RowOperator):
        if case.reference is None:
            raise ConfigurationError(
                f"{case.name}: a row operator is admitted beside a reference; name it"
            )
        if case.promise == "same bits":
            operator = replace(operator, reference=case.reference)
    report: Report = examine(operator)
    violations = [finding.as_violation() for finding in report.findings]
    outcome: dict[str, Any] = {"trials": sum(report.trials.values())}
    if isinstance(operator, RowOperator):
        assert case.reference is not None
        distance, found = _forward(case, operator, case.reference)
        violations += found
        backward, found = _backward(case, operator, case.reference)
        violations += found
        outcome |= {"largest_difference": distance, "gradients_compared": backward}
    return {**outcome, "violations": violations}


def _forward(
    case: AdmissionCase, operator: RowOperator, reference: Callable[..., Any]
) -> tuple[float, list[Violation]]:
    """The largest difference to the reference, and whether it is within the promise."""
    with torch.no_grad():
        wanted = _outputs(reference(**operator.inputs, **operator.weights))
        found = _outputs(operator.run(**operator.inputs, **operator.weights))
    worst = 0.0
    for a, b in zip(wanted, found, strict=True):
        scale = float(a.double().abs().max()) or 1.0
        worst = max(worst, float((a.double() - b.double()).abs().max()) / scale)
    if worst <= case.within:
        return worst, []
    return worst, [
        Violation(
            subject=operator.name,
            problem="is further from the reference than promised",
            expected=f"at most {case.within:.3g} of the largest value",
            found=f"{worst:.3g}",
            remedy="correct it, or promise less and take it out of profiles that need more",
        )
    ]


def _backward(
    case: AdmissionCase, operator: RowOperator, reference: Callable[..., Any]
) -> tuple[int, list[Violation]]:
    """Gradients of every floating input, beside the reference's."""
    wanted = _gradients(operator, reference)
    found = _gradients(operator, operator.run)
    violations = []
    for name, gradient in found.items():
        other = wanted[name]
        problem = ""
        if not bool(torch.isfinite(gradient).all()):
            problem = "has a gradient that is not finite"
        else:
            scale = float(other.double().abs().max()) or 1.0
            difference = float((other.double() - gradient.double()).abs().max()) / scale
            # A gradient's own sums are free in their order; far apart, one of them is wrong.
            if difference > max(_GRADIENTS_WITHIN, case.within):
                problem = f"has another gradient, by {difference:.3g} of its largest element"
        if problem:
            violations.append(
                Violation(
                    subject=f"{operator.name}: {name}",
                    problem=problem,
                    expected="the reference's gradient",
                    found="another",
                    remedy="correct the backward",
                )
            )
    return len(found), violations


def _gradients(operator: RowOperator, run: Callable[..., Any]) -> dict[str, Tensor]:
    arguments = {**operator.inputs, **operator.weights}
    leaves = {
        name: value.detach().clone().requires_grad_()
        for name, value in arguments.items()
        if value.is_floating_point()
    }
    results = _outputs(run(**{**arguments, **leaves}))
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros((), device=operator.device)
    for result in results:
        if result.requires_grad:
            weight = torch.randn(result.shape, generator=generator).to(result.device)
            total = total + (result.float() * weight).sum()
    if not total.requires_grad:
        return {}
    total.backward()
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def _outputs(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _merge(
    operators: dict[str, dict[str, Any]], case: AdmissionCase, outcome: Mapping[str, Any]
) -> None:
    """One entry per operator, over all of its shapes."""
    entry = operators.setdefault(
        case.name, {"promise": case.promise, "trials": 0, "shapes": [], "largest_difference": 0.0}
    )
    if entry["promise"] != case.promise:
        raise ConfigurationError(f"{case.name}: one operator cannot promise two things")
    entry["trials"] += outcome["trials"]
    entry["shapes"].append(case.operator.name)
    entry["largest_difference"] = max(
        entry["largest_difference"], outcome.get("largest_difference", 0.0)
    )


def _untried(implementation: Implementation, operators: Iterable[str]) -> Iterable[Violation]:
    for operator in sorted(set(implementation.operators()) - set(operators)):
        yield Violation(
            subject=f"{implementation.module}:{operator}",
            problem="no case tries it",
            expected="at least one AdmissionCase of that name",
            found="none",
            remedy=f"add one to {implementation.cases}, or take it out of __all__",
        )
