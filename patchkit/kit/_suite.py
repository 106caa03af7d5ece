"""The suite as pytest tests: one class, made by one line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from patchkit.errors import ConfigurationError
from patchkit.kit._stages import STAGES, SuiteSettings, run_stage


def adapter_suite(
    adapter: str,
    *,
    profile: str = "",
    stages: Sequence[str] = (),
    sequences: int = 16,
    tensor_parallel: Sequence[int] = (1,),
) -> type:
    """A test class with one test per stage; assign it to a name that pytest collects.

    >>> TestConformance = adapter_suite("my_adapter")         # doctest: +SKIP

    Args:
        adapter: The adapter's name, as its entry point registers it.
        profile: One of its profiles; the default one if empty.
        stages: Only these; all where empty. A certificate needs all.
        sequences: Sampled per phase of the end-to-end run.
        tensor_parallel: vLLM workers of each end-to-end run.

    Raises:
        ConfigurationError: There is no such stage.
    """
    if unknown := [name for name in stages if name not in STAGES]:
        raise ConfigurationError(
            f"no stage is called {', '.join(unknown)}; there are: {', '.join(STAGES)}"
        )
    settings = SuiteSettings(
        adapter=adapter,
        profile=profile,
        sequences=sequences,
        tensor_parallel=tuple(tensor_parallel),
    )
    tests = {f"test_{name}": _test(name, settings) for name in stages or STAGES}
    return type("AdapterSuite", (), {"__doc__": f"Conformance of adapter {adapter}.", **tests})


def _test(name: str, settings: SuiteSettings) -> Callable[[Any], None]:
    def test(self: Any) -> None:
        import pytest

        result = run_stage(name, settings)
        if result.status == "not applicable":
            pytest.skip(result.why)
        if result.status == "failed":
            # Without a traceback: all that helps is in the message.
            pytest.fail(f"{STAGES[name].title}: not so\n{_listed(result)}", pytrace=False)

    test.__doc__ = STAGES[name].title
    return test


def _listed(result: Any) -> str:
    return "\n".join(f"{i}. {v}" for i, v in enumerate(result.violations, 1))
