"""Each patch left out must be noticed, or have evidence of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from patchkit.engine import Adapter, find_adapter, resolve_reference
from patchkit.errors import Violation
from patchkit.kit._result import Outcome
from patchkit.parity.ablation import AblationCase, ablate

if TYPE_CHECKING:
    from patchkit.kit._stages import SuiteSettings


def needed(settings: SuiteSettings) -> Outcome:
    """Leave out one patch at a time on real vLLM and the real model."""
    complete, *cases = ablate(settings.adapter, settings.profile or None)
    figures: dict[str, Any] = {"complete": _figure(complete)}
    if complete.error or complete.mismatches or not complete.tokens:
        return Outcome(
            violations=(
                Violation(
                    subject="the complete adapter",
                    problem="is not exact, so leaving something out shows nothing",
                    expected="0 mismatches",
                    found=_figure(complete),
                    remedy="make stage 'reached' pass first",
                ),
            ),
            figures=figures,
        )
    adapter = find_adapter(settings.adapter)
    silent = []
    for case in cases:
        figures[f"without {case.side} {case.symbol}"] = _figure(case)
        if not case.noticed:
            silent.append(case)
    violations = [v for case in silent if (v := unproven(adapter, case.side, case.symbol, figures))]
    return Outcome(violations=tuple(violations), figures=figures)


def unproven(
    adapter: Adapter, side: str, identity: str, figures: dict[str, Any]
) -> Violation | None:
    """What to say about a patch that nobody missed; None where its evidence speaks for it."""
    patches = [p for p in adapter.patches(side) if p.identity == identity]
    references = {p.evidence for p in patches if p.evidence}
    for reference in references:
        differs = bool(resolve_reference(reference)())
        figures[f"evidence {reference}"] = "differs" if differs else "does not differ"
        if not differs:
            return Violation(
                subject=identity,
                problem="nobody missed it, and its evidence shows no difference",
                expected=f"{reference} returns True",
                found="False",
                remedy="delete the patch, or find an input at which the operators differ",
            )
    if references:
        return None
    return Violation(
        subject=identity,
        problem="nobody missed it",
        expected="other bits, or an error, without this patch",
        found="the same bits",
        remedy="delete the patch; or, where a small sample may come out equal by luck, "
        "declare Patch(evidence=…): a function that returns whether the operators differ",
    )


def _figure(case: AblationCase) -> str:
    if case.error:
        return f"error: {case.error[:200]}"
    return f"{case.mismatches} of {case.tokens} tokens differ"
