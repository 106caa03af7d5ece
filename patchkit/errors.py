"""The errors patchkit raises: a small tree under :class:`PatchkitError`.

Every error carries its data as attributes and formats its own message from
them, so that callers never parse text. What can be wrong in several places at
once is reported in one :class:`ViolationsError`, never one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


class PatchkitError(Exception):
    """Base of everything that patchkit raises on purpose."""


class ConfigurationError(PatchkitError):
    """A name, option or file given by the user is unusable (exit code 2)."""


@dataclass(frozen=True, kw_only=True)
class Violation:
    """One thing that is not as it has to be.

    Attributes:
        subject: The symbol (``package.module:Qual.name``) or setting concerned.
        problem: What is wrong, as a short phrase that can stand in a table.
        expected: What was required.
        found: What is there instead.
        remedy: What the reader can do about it.
    """

    subject: str
    problem: str
    expected: str = ""
    found: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        lines = [f"{self.subject}: {self.problem}"]
        lines += [
            f"    {label} {text}"
            for label, text in (
                ("expected:", self.expected),
                ("found:   ", self.found),
                ("to do:   ", self.remedy),
            )
            if text
        ]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class ViolationsError(PatchkitError):
    """Everything that preflight found wrong, together.

    Attributes:
        headline: What was refused.
        violations: All of it, in the order in which it was found.
    """

    def __init__(self, headline: str, violations: Iterable[Violation]) -> None:
        self.headline = headline
        self.violations = tuple(violations)
        super().__init__(headline, self.violations)

    def __str__(self) -> str:
        count = len(self.violations)
        noun = "violation" if count == 1 else "violations"
        body = "\n".join(f"  {i}. {v}" for i, v in enumerate(self.violations, 1))
        return f"{self.headline} ({count} {noun})\n{body}"
