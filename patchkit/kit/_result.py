"""What one stage of the suite showed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from patchkit.errors import PatchkitError, Violation, ViolationsError
from patchkit.kit.errors import ConformanceFailedError

Status = Literal["passed", "failed", "not applicable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """One stage.

    Attributes:
        stage: Its name.
        status: A stage that compared nothing has not passed.
        violations: Everything that it found.
        figures: What was counted.
        why: For ``not applicable``, the reason.
        seconds: Wall time.
    """

    stage: str
    status: Status
    violations: tuple[Violation, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "status": self.status,
            "violations": [v.as_dict() for v in self.violations],
            "figures": dict(self.figures),
            "why": self.why,
            "seconds": round(self.seconds, 2),
        }

    def raise_if_failed(self) -> None:
        """Raise with everything that was found.

        Raises:
            ConformanceFailedError: The stage failed.
        """
        if self.status == "failed":
            raise ConformanceFailedError(
                f"conformance stage {self.stage!r} failed", self.violations
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a stage's own code returns; the runner adds name, status and time.

    Attributes:
        violations: Everything found.
        figures: What was counted.
        not_applicable: Why the stage has nothing to look at; empty where it has.
    """

    violations: tuple[Violation, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    not_applicable: str = ""


def told(error: BaseException) -> Iterable[Violation]:
    """An exception as violations: its own, those of the ranks it brings, or one."""
    if isinstance(error, ViolationsError):
        yield from error.violations
        return
    ranks = getattr(error, "errors", None)
    inner = [e for e in ranks.values() if isinstance(e, ViolationsError)] if ranks else []
    if inner:
        # Every rank raises the same; once is enough.
        yield from inner[0].violations
        return
    expected = "no error" if isinstance(error, PatchkitError) else "no exception"
    yield Violation(
        subject=type(error).__name__,
        problem="was raised",
        expected=expected,
        found=str(error)[:2000],
        remedy="run the same step alone; `patchkit check` and `patchkit demo` name more",
    )
