"""The main job on a tiny model: sample, replay, compare, step, update, compare again."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchkit.engine import find_adapter, inspect_plan
from patchkit.errors import Violation
from patchkit.kit._result import Outcome
from patchkit.parity.demo_setup import DemoSettings, set_up

if TYPE_CHECKING:
    from patchkit.kit._stages import SuiteSettings
    from patchkit.parity.demo import DemoResult


def exact_end_to_end(settings: SuiteSettings) -> Outcome:
    """One run; the canaries of both sides are part of it.

    More tensor-parallel sizes mean more runs, each in a process of its own.
    """
    from patchkit.kit._process import in_child
    from patchkit.kit._stages import SuiteSettings

    if len(settings.tensor_parallel) == 1:
        return _run(settings)
    violations: list[Violation] = []
    figures: dict[str, Any] = {}
    for size in settings.tensor_parallel:
        one = SuiteSettings(**{**settings.as_dict(), "tensor_parallel": (size,)})
        outcome = in_child("job", one)
        violations += outcome.violations
        figures.update(outcome.figures)
    return Outcome(violations=tuple(violations), figures=figures)


def _run(settings: SuiteSettings) -> Outcome:
    (size,) = settings.tensor_parallel
    with tempfile.TemporaryDirectory(prefix="patchkit-job-") as folder:
        setup = set_up(
            DemoSettings(
                adapter=settings.adapter,
                profile=settings.profile,
                folder=Path(folder),
                tensor_parallel_size=size,
                sequences=settings.sequences,
                seed=settings.seed,
                stock=False,
            )
        )
        from patchkit.parity.demo import run_demo

        result = run_demo(setup)
        from patchkit.runtime.artifact import verify_artifact

        assert result.artifact is not None
        verified = verify_artifact(result.artifact)
        figures = {f"TP={size}": _figures(settings, result, verified.verdict)}
        return Outcome(violations=tuple(_different(size, result)), figures=figures)


def _figures(settings: SuiteSettings, result: DemoResult, verdict: str) -> dict[str, Any]:
    adapter = find_adapter(settings.adapter)
    trainer = inspect_plan(adapter, "trainer", profile=settings.profile).patches
    return {
        "verdict": verdict,
        "phases": {
            phase.name: {
                "tokens": phase.recompute.token_count,
                "mismatches": phase.recompute.mismatch_count,
                "first_forward_mismatches": phase.first_forward.mismatch_count,
                **phase.evidence.as_dict(),
            }
            for phase in result.phases
        },
        "rollout_hits": dict(sorted(result.hits.items())),
        # The trainer's first step is a canary run: it raises where one is missed.
        "trainer_reached": [p.patch.identity for p in trainer if p.patch.required],
    }


def _different(size: int, result: DemoResult) -> Iterator[Violation]:
    for phase in result.phases:
        for name, metrics in (
            ("recompute", phase.recompute),
            ("first training forward", phase.first_forward),
        ):
            if metrics.token_count and not metrics.mismatch_count:
                continue
            yield Violation(
                subject=f"TP={size}, {phase.name}, rollout against {name}",
                problem="log-probabilities differ",
                expected=f"{metrics.token_count} tokens, 0 mismatches",
                found=f"{metrics.mismatch_count} mismatches, largest {metrics.max_absdiff:.3g}",
                remedy="`patchkit doctor` names the first operator that differs",
            )
