"""What can go wrong while reading symbols, manifests and packages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from patchkit.errors import ConfigurationError, PatchkitError


class MalformedSymbolError(ConfigurationError):
    """A name that is not of the form ``package.module:Qual.name``."""

    def __init__(self, text: str, problem: str) -> None:
        self.text = text
        self.problem = problem
        super().__init__(text, problem)

    def __str__(self) -> str:
        return (
            f"{self.text!r} is not a symbol: {self.problem}. "
            "Write it as entry points do, package.module:Qual.name, "
            "for example vllm.v1.sample.sampler:Sampler.forward"
        )


class SourceUnreadableError(PatchkitError):
    """One source file that cannot be read; the others still can.

    Attributes:
        file: The file, as a path relative to the directory that contains the package.
        problem: What is wrong with it.
        line: The line at which reading stopped, where known.
    """

    def __init__(self, file: str, problem: str, line: int | None = None) -> None:
        self.file = file
        self.problem = problem
        self.line = line
        super().__init__(file, problem, line)

    def __str__(self) -> str:
        at = f", line {self.line}" if self.line else ""
        return f"cannot read {self.file}{at}: {self.problem}"


class SourceNotFoundError(ConfigurationError):
    """OLD or NEW names nothing that symbols can be read from."""

    def __init__(self, text: str, problem: str, remedy: str) -> None:
        self.text = text
        self.problem = problem
        self.remedy = remedy
        super().__init__(text, problem, remedy)

    def __str__(self) -> str:
        return f"{self.text}: {self.problem}. {self.remedy}"


class PackageNotInstalledError(ConfigurationError):
    """An import package that no installed distribution provides."""

    def __init__(self, package: str) -> None:
        self.package = package
        super().__init__(package)

    def __str__(self) -> str:
        return (
            f"no installed distribution provides the import package {self.package!r}; "
            "install it, or name a wheel, a folder or a stored version instead"
        )


class ManifestError(ConfigurationError):
    """A manifest file that cannot be used.

    Attributes:
        path: The file.
        problem: What is wrong with it.
        remedy: How to get a good one.
    """

    def __init__(self, path: Path | str, problem: str, remedy: str = "") -> None:
        self.path = str(path)
        self.problem = problem
        self.remedy = remedy or "build it again with `patchkit manifest build`"
        super().__init__(self.path, problem, self.remedy)

    def __str__(self) -> str:
        return f"manifest {self.path}: {self.problem}; {self.remedy}"


class ManifestSchemaError(ManifestError):
    """A manifest of a schema that this patchkit does not know."""


class ManifestConflictError(ManifestError):
    """Two manifests that say different things about one symbol of one version.

    Attributes:
        symbols: symbol -> the two digests.
    """

    def __init__(
        self, first: Path | str, second: Path | str, symbols: Mapping[str, tuple[str, str]]
    ) -> None:
        self.first = str(first)
        self.second = str(second)
        self.symbols = dict(symbols)
        listing = "; ".join(f"{s}: {a} there, {b} here" for s, (a, b) in self.symbols.items())
        super().__init__(
            second,
            f"disagrees with {first} about {len(self.symbols)} symbol(s): {listing}",
            "build one of them again from the released wheel, or delete the wrong one",
        )
