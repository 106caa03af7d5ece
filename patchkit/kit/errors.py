"""What the kit refuses."""

from __future__ import annotations

from patchkit.errors import ConfigurationError, ViolationsError


class ConformanceFailedError(ViolationsError):
    """A stage of the conformance suite failed; carries everything that it found."""


class UnknownModelError(ConfigurationError):
    """A configuration that no adapter can be sketched for.

    Attributes:
        subject: The file, or the setting in it.
        expected: What was needed.
        found: What is there.
        remedy: What to do.
    """

    def __init__(self, subject: str, *, expected: str, found: str, remedy: str) -> None:
        self.subject, self.expected, self.found, self.remedy = subject, expected, found, remedy
        super().__init__(subject, expected, found, remedy)

    def __str__(self) -> str:
        return f"{self.subject}: expected {self.expected}, found {self.found}. To do: {self.remedy}"


class SkeletonRefusedError(ViolationsError, ConfigurationError):
    """A skeleton that cannot be written where, or under the name, that was asked for."""
