"""One environment for all processes of a run, there before anything imports torch.

torch, vLLM, OpenMP and BLAS read their variables once. A variable that is set
after that, or in the driver but not in a worker that a cluster had started
already, changes nothing and is not noticed: a last bit differs, somewhere. So the
variables are one object, it refuses to be applied too late, and each process
attests what it sees.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from patchkit.errors import Violation, ViolationsError

__all__ = ["Environment", "LateEnvironmentError", "loaded_too_early"]

# Modules that read variables at import, or hand out processes that exist already.
_READERS = ("torch", "vllm", "transformers", "numpy", "triton")


class LateEnvironmentError(ViolationsError):
    """Variables that can no longer take effect."""


def loaded_too_early() -> tuple[str, ...]:
    """Modules in this process that have read their variables already."""
    return tuple(name for name in _READERS if name in sys.modules)


@dataclass(frozen=True, slots=True)
class Environment:
    """Variables with the values that every process must see.

    Attributes:
        variables: Name to value.
        private: Names whose value differs between starts (a folder); given to
            processes, but not compared.
    """

    variables: Mapping[str, str]
    private: frozenset[str] = frozenset()

    @property
    def compared(self) -> dict[str, str]:
        """What attestations are compared with."""
        return {k: v for k, v in sorted(self.variables.items()) if k not in self.private}

    def differing(self, environment: Mapping[str, str] | None = None) -> dict[str, str | None]:
        """Names whose value is another one in ``environment`` (this process's if None)."""
        seen = os.environ if environment is None else environment
        return {k: seen.get(k) for k, v in self.variables.items() if seen.get(k) != v}

    def apply(self) -> None:
        """Put the variables into this process.

        Raises:
            LateEnvironmentError: One would change after a module that reads it was
                imported.
        """
        differing = {k: v for k, v in self.differing().items() if not k.startswith("PATCHKIT_")}
        early = loaded_too_early()
        if differing and early:
            raise LateEnvironmentError(
                "the environment comes too late in this process",
                [
                    Violation(
                        subject=name,
                        problem=f"{', '.join(early)} imported before it was set",
                        expected=self.variables[name],
                        found="not set" if found is None else found,
                        remedy="set it before Python starts, or build the contract before the "
                        "first import of torch or vLLM",
                    )
                    for name, found in sorted(differing.items())
                ],
            )
        os.environ.update(self.variables)

    def for_child(self) -> dict[str, str]:
        """A whole environment for ``subprocess``."""
        return {**os.environ, **self.variables}

    @contextmanager
    def spawning(self) -> Iterator[None]:
        """Start processes in here: a spawned one takes its environment from its parent's."""
        before = {name: os.environ.get(name) for name in self.variables}
        os.environ.update(self.variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def ray_runtime_env(self) -> dict[str, Any]:
        """For ``ray.init`` or an actor's options.

        Actors need it too: an existing cluster's workers were started with an
        environment of their own, and Ray forwards ``VLLM_*`` variables only.
        """
        return {"env_vars": dict(self.variables)}
