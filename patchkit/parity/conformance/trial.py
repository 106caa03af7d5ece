"""Trials: two results that must be equal, and the loop that holds them.

A *check* is a generator of trials for one operator. It says what has to be
equal; this module computes, compares, counts and never stops at the first
failure.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from patchkit.parity.conformance.bits import first_difference
from patchkit.parity.conformance.report import Finding, Report

Result = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One comparison.

    Attributes:
        case: Names the case within its check.
        found: Computes what is judged. The outputs' dimension 0 counts rows.
        expected: What it must equal; not used where ``want`` is ``"nan"``.
        rows: The operator's number of each row compared; counted from 0 if absent.
        want: ``"bits"``: equal bit patterns. ``"nan"``: every row shows a NaN in
            the first output, because a damaged input must not be swallowed.
    """

    case: str
    found: Callable[[], Result]
    expected: Result = ()
    rows: tuple[int, ...] = ()
    want: Literal["bits", "nan"] = "bits"


@dataclass(frozen=True, slots=True)
class Skipped:
    """Yielded instead of a trial: why this check does not apply."""

    why: str


class Operator(Protocol):
    """What :func:`examine` needs to know of an operator."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    def checks(self) -> Mapping[str, Check]: ...


Check = Callable[[], Iterable[Trial | Skipped]]


def outputs_of(result: Result) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def take(result: Result, rows: slice | list[int]) -> tuple[Tensor, ...]:
    """Some rows of every output."""
    return tuple(output[rows] for output in outputs_of(result))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with ``count`` intra-operator threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _judge(operator: str, check: str, trial: Trial) -> Iterator[Finding]:
    def finding(problem: str, **details: Any) -> Finding:
        return Finding(operator=operator, check=check, case=trial.case, problem=problem, **details)

    try:
        found = outputs_of(trial.found())
    except Exception as error:  # a call that fails is a finding, the rest still runs
        yield finding(f"raised {type(error).__name__}: {error}")
        return
    if trial.want == "nan":
        swallowed = ~torch.isnan(found[0].reshape(len(found[0]), -1)).any(1)
        for row in swallowed.nonzero()[:1].flatten().tolist():
            number = trial.rows[row] if trial.rows else row
            yield finding("a NaN in the input does not show in the output", row=number)
        return
    expected = outputs_of(trial.expected)
    if len(expected) != len(found):
        yield finding(f"has {len(found)} outputs instead of {len(expected)}")
        return
    for position, (want, have) in enumerate(zip(expected, found, strict=True)):
        if want.shape != have.shape or want.dtype != have.dtype:
            yield finding(
                f"is {have.dtype} {list(have.shape)} instead of {want.dtype} {list(want.shape)}",
                output=position,
            )
            continue
        difference = first_difference(want, have)
        if difference is not None:
            row = difference.index[0] if difference.index else 0
            yield finding(
                "differs",
                row=trial.rows[row] if trial.rows else row,
                output=position,
                difference=difference,
            )


def _environment(device: torch.device) -> dict[str, Any]:
    name = platform.machine() or "cpu"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"{device.type} ({name})",
        "threads": torch.get_num_threads(),
    }


def examine(operator: Operator, *, only: Iterable[str] = ()) -> Report:
    """Put one operator through its checks.

    Args:
        operator: A :class:`RowOperator` or one of its kin.
        only: Names of the checks to run; all when empty.

    Raises:
        ValueError: ``only`` names a check that this operator does not have.
    """
    checks = dict(operator.checks())
    wanted = list(only)
    unknown = sorted(set(wanted) - set(checks))
    if unknown:
        raise ValueError(f"{operator.name} has no check {unknown}; it has {sorted(checks)}")
    trials: dict[str, int] = {}
    skipped: dict[str, str] = {}
    findings: list[Finding] = []
    with torch.no_grad():
        for check in wanted or checks:
            for trial in checks[check]():
                if isinstance(trial, Skipped):
                    skipped[check] = trial.why
                    continue
                trials[check] = trials.get(check, 0) + 1
                findings.extend(_judge(operator.name, check, trial))
            if check not in trials and check not in skipped:
                findings.append(
                    Finding(
                        operator=operator.name, check=check, case="-", problem="compared nothing"
                    )
                )
    return Report(
        operators=(operator.name,),
        trials=trials,
        skipped=skipped,
        findings=tuple(findings),
        environment=_environment(operator.device),
    )
