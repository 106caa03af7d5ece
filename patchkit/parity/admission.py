"""Admission of a faster operator: only after trials beside its reference.

An implementation names its cases (``CASES``); each holds an operator of the conformance
kit and the reference's function of the same arguments. ``same bits``: every bit of
every row. ``same guarantees``: every row depends on itself
alone, and the result stays within a stated distance of the reference. Gradients are
finite and close to the reference's in both: no profile promises their bits. A reference
without a backward (another library's kernel) has a second one for them.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from patchkit.engine import resolve_reference
from patchkit.errors import ConfigurationError, Violation, ViolationsError
from patchkit.files import write_atomically, writing
from patchkit.parity.conformance import Report, RowOperator, examine
from patchkit.runtime.canonical import canonical_json
from patchkit.runtime.providers import (
    SCHEMA,
    Implementation,
    candidate,
    find_implementation,
    hardware,
    load_record,
    releases_now,
    versions_now,
)

__all__ = ["AdmissionCase", "AdmissionRefusedError", "admit", "tried", "write_admission"]

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
        gradients: The same function again, differentiable, where the reference is not:
            what gradients are compared with. The reference if None.
        gradients_within: Their largest difference, relative to the largest element.
    """

    name: str
    operator: Any
    reference: Callable[..., Any] | None = None
    promise: Promise = "same bits"
    within: float = 0.0
    gradients: Callable[..., Any] | None = None
    gradients_within: float = _GRADIENTS_WITHIN


Said = Callable[[str], None]


def admit(
    module: str, *, as_candidate: tuple[str, str] | None = None, say: Said = lambda line: None
) -> dict[str, Any]:
    """Put an implementation through its trials on this machine.

    Args:
        module: The package.
        as_candidate: Device and reference to the cases of a package that has no constants
            yet: what is seen cannot be recorded, since they would change its digest.
        say: Called with a line for every case that was tried.

    Returns:
        The admission, ready to be recorded.

    Raises:
        ConfigurationError: The module is no implementation, or has no such device here.
        AdmissionRefusedError: With everything that was found.
    """
    if as_candidate is None:
        implementation = find_implementation(module)
    else:
        implementation = candidate(module, device=as_candidate[0], cases=as_candidate[1])
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
    for case in _built(implementation, violations):
        begun = time.monotonic()
        outcome = tried(case)
        found = outcome.pop("violations")
        seconds = time.monotonic() - begun
        say(
            f"{case.operator.name}: {outcome['trials']} trials in {seconds:.1f} s, "
            + (f"{len(found)} FAILED, the first: {found[0]}" if found else "passed")
        )
        violations += found
        _merge(operators, case, outcome)
    violations += _untried(implementation, operators)
    if violations:
        raise AdmissionRefusedError(f"{module} is not admitted", violations)
    return {
        "device": implementation.device,
        "hardware": hardware(implementation.device),
        "versions": versions_now(implementation.device),
        "digest": implementation.digest,
        "seen_with": {
            **releases_now(implementation.device),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
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
    with writing(implementation.record):
        return write_atomically(implementation.record, text.encode())


# -- trials ----------------------------------------------------------------------------


def _built(implementation: Implementation, violations: list[Violation]) -> Iterator[AdmissionCase]:
    """The cases, as far as they can be built: one that cannot is a violation like any other."""
    try:
        yield from resolve_reference(implementation.cases)()
    except ConfigurationError:
        raise
    except Exception as error:
        violations.append(_raised(implementation.cases, "a case cannot be built", error))


def tried(case: AdmissionCase) -> dict[str, Any]:
    """One case: ``trials``, the largest difference, gradients compared, and ``violations``.

    Raises:
        ConfigurationError: A row operator without a reference.
    """
    operator = case.operator
    outcome: dict[str, Any] = {"trials": 0, "violations": []}
    if isinstance(operator, RowOperator):
        if case.reference is None:
            raise ConfigurationError(
                f"{case.name}: a row operator is admitted beside a reference; name it"
            )
        if case.promise == "same bits":
            operator = replace(operator, reference=case.reference)
    violations: list[Violation] = outcome["violations"]
    # What raises, here or in a reference, must not hide what the other cases have to say.
    try:
        report: Report = examine(operator)
    except Exception as error:
        violations.append(_raised(operator.name, "cannot be tried", error))
        return outcome
    violations += [finding.as_violation() for finding in report.findings]
    outcome |= {"trials": sum(report.trials.values()), "left_out": dict(report.skipped)}
    if isinstance(operator, RowOperator):
        assert case.reference is not None
        try:
            outcome["largest_difference"], found = _forward(case, operator, case.reference)
            violations += found
            outcome["gradients_compared"], found = _backward(case, operator)
            violations += found
        except Exception as error:
            violations.append(_raised(operator.name, "cannot be compared", error))
    return outcome


def _raised(subject: str, problem: str, error: Exception) -> Violation:
    return Violation(
        subject=subject,
        problem=problem,
        expected="a result",
        found=f"{type(error).__name__}: {error}",
        remedy="correct the operator, or its case",
    )


def _forward(
    case: AdmissionCase, operator: RowOperator, reference: Callable[..., Any]
) -> tuple[float, list[Violation]]:
    """The largest difference to the reference, and whether it is within the promise."""
    with torch.no_grad():
        wanted = _outputs(reference(**operator.inputs, **operator.weights))
        found = _outputs(operator.run(**operator.inputs, **operator.weights))
    worst = max(_distance(a, b) for a, b in zip(wanted, found, strict=True))
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


def _distance(wanted: Tensor, found: Tensor) -> float:
    """The largest difference, relative to the largest value wanted; infinite if it is none."""
    if wanted.shape != found.shape:
        return math.inf
    if not wanted.numel():
        return 0.0
    wanted, found = wanted.detach().double(), found.detach().double()
    largest = float((wanted - found).abs().max()) / (float(wanted.abs().max()) or 1.0)
    # A NaN is below every bound, and above none.
    return math.inf if math.isnan(largest) else largest


def _backward(case: AdmissionCase, operator: RowOperator) -> tuple[int, list[Violation]]:
    """Gradients of every floating input, beside the reference's."""
    reference = case.gradients or case.reference
    assert reference is not None
    wanted = _gradients(operator, reference)
    found = _gradients(operator, operator.run)
    # A gradient's own sums are free in their order; far apart, one of them is wrong.
    within = max(case.gradients_within, case.within)
    violations = []
    for name in sorted({*wanted, *found}):
        problem = ""
        if name not in found:
            problem = "has no gradient"
        elif not bool(torch.isfinite(found[name]).all()):
            problem = "has a gradient that is not finite"
        elif name not in wanted:
            problem = "has a gradient, and the reference none"
        elif (difference := _distance(wanted[name], found[name])) > within:
            problem = f"has another gradient, by {difference:.3g} of its largest element"
        if problem:
            violations.append(
                Violation(
                    subject=f"{operator.name}: {name}",
                    problem=problem,
                    expected=f"the reference's gradient, within {within:.3g}",
                    found="another" if name in found else "none",
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
    left_out = {f"{check}: {why}" for check, why in outcome.get("left_out", {}).items()}
    entry["left_out"] = sorted({*entry.get("left_out", ()), *left_out})
    entry["shapes"].append(case.operator.name)
    entry["largest_difference"] = max(
        entry["largest_difference"], outcome.get("largest_difference", 0.0)
    )
    entry["gradients_compared"] = max(
        entry.get("gradients_compared", 0), outcome.get("gradients_compared", 0)
    )


def _untried(implementation: Implementation, operators: Iterable[str]) -> Iterable[Violation]:
    exported = implementation.operators()
    if not exported:
        yield Violation(
            subject=f"{implementation.module}: __all__",
            problem="names no operator, so nothing says what has to be tried",
            expected="a list of names, written out",
            found="none that can be read from its source",
            remedy="write the names of the operators into __all__, without computing it",
        )
    for operator in sorted(set(exported) - set(operators)):
        yield Violation(
            subject=f"{implementation.module}:{operator}",
            problem="no case tries it",
            expected="at least one AdmissionCase of that name",
            found="none",
            remedy=f"add one to {implementation.cases}, or take it out of __all__",
        )
