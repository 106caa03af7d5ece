"""The stages of the suite, in the order in which a failure is cheapest to find."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from patchkit.engine import Adapter, find_adapter
from patchkit.errors import ConfigurationError, Violation
from patchkit.kit._process import in_child
from patchkit.kit._result import Outcome, StageResult, told


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteSettings:
    """What to certify.

    Attributes:
        adapter: The adapter's name, as its entry point registers it.
        profile: One of its profiles; the default one if empty.
        sequences: Sampled per phase of the end-to-end run.
        tensor_parallel: vLLM workers of each end-to-end run.
        seed: Of weights, prompts and sampling.
    """

    adapter: str
    profile: str = ""
    sequences: int = 16
    tensor_parallel: tuple[int, ...] = (1,)
    seed: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "adapter": self.adapter,
            "profile": self.profile,
            "sequences": self.sequences,
            "tensor_parallel": list(self.tensor_parallel),
            "seed": self.seed,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One thing that the suite looks at.

    Attributes:
        title: What has passed when it passes, as a sentence.
        run: Looks.
        needs: Fields of :class:`Adapter` that have to be declared.
        claim_needs: The same, where only an adapter with a claim has to.
        models_only: Whether it means nothing to an adapter that claims no equal
            log-probabilities.
    """

    title: str
    run: Callable[[SuiteSettings], Outcome]
    needs: tuple[str, ...] = ()
    claim_needs: tuple[str, ...] = ()
    models_only: bool = False


_CLAIM = ("tiny_model", "logprobs", "weight_map", "profiles")


def claims_logprobs(adapter: Adapter) -> bool:
    """Whether the adapter is for a model: then nothing of the suite can be left out.

    It is when it declares anything that only such a claim needs, or has a profile that
    makes it.
    """
    if any(getattr(adapter, field) for field in ("tiny_model", "logprobs", "weight_map")):
        return True
    if adapter.profiles is None:
        return False
    from patchkit.runtime.profile import load_profile

    files = sorted(adapter.profiles.glob("*.toml"))
    return any(load_profile(file).content.profile.claim == "on_policy" for file in files)


def _manifests(settings: SuiteSettings) -> Outcome:
    from patchkit.kit._manifests import fresh_manifests

    return fresh_manifests(settings)


def _reached(settings: SuiteSettings) -> Outcome:
    adapter = find_adapter(settings.adapter)
    return in_child("job" if claims_logprobs(adapter) else "exercise", settings)


def _ablation(settings: SuiteSettings) -> Outcome:
    adapter = find_adapter(settings.adapter)
    return in_child("ablation" if claims_logprobs(adapter) else "exercise_ablation", settings)


STAGES: dict[str, Stage] = {
    "manifests": Stage(
        title="every symbol that the adapter needs is as reviewed, and as its manifest says",
        run=_manifests,
    ),
    "undo": Stage(
        title="both sides install, and undoing leaves every function and class as it was",
        run=lambda settings: in_child("undo", settings),
    ),
    "plugin": Stage(
        title="without opt-in the rollout plugin changes nothing and imports nothing",
        run=lambda settings: in_child("plugin", settings),
    ),
    "rows": Stage(
        title="a row of an operator depends on that row alone",
        run=lambda settings: in_child("rows", settings),
        needs=("operators",),
        models_only=True,
    ),
    "reached": Stage(
        title="every required patch runs, and for a model every log-probability agrees, "
        "before and after an update",
        run=_reached,
        claim_needs=("modules",),
    ),
    "ablation": Stage(
        title="each patch left out changes bits, or its operator is shown to differ",
        run=_ablation,
    ),
}


def run_stage(name: str, settings: SuiteSettings) -> StageResult:
    """Run one stage; whatever goes wrong is part of the result.

    Raises:
        ConfigurationError: There is no such stage, adapter or profile.
    """
    stage = STAGES.get(name)
    if stage is None:
        raise ConfigurationError(f"no stage is called {name!r}; there are: {', '.join(STAGES)}")
    adapter = find_adapter(settings.adapter)
    adapter.profile(settings.profile)
    started = time.monotonic()

    def result(status: Any, **more: Any) -> StageResult:
        seconds = time.monotonic() - started
        return StageResult(stage=name, status=status, seconds=seconds, **more)

    claims = claims_logprobs(adapter)
    declared = bool(stage.needs) and all(getattr(adapter, field) for field in stage.needs)
    if stage.models_only and not claims and not declared:
        return result("not applicable", why="the adapter claims no equal log-probabilities")
    needed = stage.needs + ((*stage.claim_needs, *_CLAIM) if claims else ())
    if name == "manifests":
        needed = ()  # reads sources, whatever is declared
    if absent := [field for field in needed if not getattr(adapter, field)]:
        return result("failed", violations=tuple(_undeclared(adapter, absent)))
    try:
        outcome = stage.run(settings)
    except ConfigurationError:
        raise
    except Exception as error:  # a stage that cannot be run is a stage that failed
        return result("failed", violations=tuple(told(error)))
    if outcome.not_applicable:
        return result("not applicable", why=outcome.not_applicable)
    violations = outcome.violations
    if not violations and not outcome.figures:
        violations = (
            Violation(
                subject=f"stage {name}",
                problem="compared nothing",
                expected="at least one comparison",
                found="none",
                remedy="declare patches, and what the stage needs to try them",
            ),
        )
    status = "failed" if violations else "passed"
    return result(status, violations=violations, figures=outcome.figures)


def run_suite(settings: SuiteSettings, stages: Iterable[str] = ()) -> Iterator[StageResult]:
    """Run stages in order, all of them where none is named; yields each as it ends."""
    for name in stages or STAGES:
        yield run_stage(name, settings)


def _undeclared(adapter: Adapter, absent: Iterable[str]) -> Iterator[Violation]:
    what = {
        "operators": "a reference to a function that yields the forward path's operators",
        "tiny_model": "a reference to a function that writes a small checkpoint",
        "logprobs": "a reference to the trainer's selected-token log-probabilities",
        "weight_map": "a reference to the map of loaded weights, for receipts",
        "modules": "what becomes of every class of submodule, on both sides",
        "profiles": "the folder with the adapter's profiles",
    }
    for field in absent:
        yield Violation(
            subject=f"adapter {adapter.name!r}: {field}",
            problem="not declared",
            expected=what[field],
            found="nothing",
            remedy=f"set Adapter({field}=…); docs/adapter-guide.md has an example",
        )
