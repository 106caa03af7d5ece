"""From the rounds of both loops to curves, verdict, artifact and report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_qwen3_moe.loop import Round
from grpo_qwen3_moe.settings import LoopSettings
from grpo_qwen3_moe.task import MARGIN, MARGIN_REFITS
from patchkit.runtime.artifact import Artifact, verify_artifact
from patchkit.runtime.report import write_report

_CURVES = (
    ("mean reward", "reward"),
    ("KL (k3) between rollout and trainer", "k3"),
    ("share of tokens outside the clip range", "clip_rate"),
    ("tokens that differ from the trainer's", "mismatches"),
)
# The reward of one version is a sample; its rise is judged between means of two.
_ENDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run showed.

    Attributes:
        exact: No token differed, as the artifact's own verification found.
        learnt: The reward rose by the margin; None if the run was too short to ask.
        rise: By how much it rose.
        verdict: The artifact's, in words.
        artifact: The file.
        page: The report.
    """

    exact: bool
    learnt: bool | None
    rise: float
    verdict: str
    artifact: Path
    page: Path

    @property
    def good(self) -> bool:
        return self.exact and self.learnt is not False


def rise(rounds: Sequence[Round]) -> float:
    """How much the reward rose from the first versions to the last."""
    ends = min(_ENDS, max(1, len(rounds) // 2))
    first = sum(r.reward for r in rounds[:ends]) / ends
    return sum(r.reward for r in rounds[-ends:]) / ends - first


def conclude(
    settings: LoopSettings,
    artifact: Artifact,
    exact: Sequence[Round],
    stock: Sequence[Round],
    cost: dict[str, Any] | None,
) -> Outcome:
    """Write the artifact with the curves, verify it from disk, and render it."""
    series = {"exact": exact, **({"stock": stock} if stock else {})}
    risen = rise(exact)
    notes: dict[str, Any] = {
        "curves": [
            {
                "title": title,
                "series": {
                    name: [getattr(r, key) for r in rounds] for name, rounds in series.items()
                },
            }
            for title, key in _CURVES
        ],
        "training": {
            "seed": settings.seed,
            "refits": settings.refits,
            "reward_rise": risen,
            "reward_margin": MARGIN,
            "rounds": {name: [r.as_dict() for r in rounds] for name, rounds in series.items()},
        },
    }
    if stock:
        notes["training"]["stock_reward_rise"] = rise(stock)
    if cost is not None:
        notes["gate_cost"] = cost
    artifact.note(**notes)
    path = artifact.write(settings.folder / "artifact.json")
    verified = verify_artifact(path)
    page = path.with_suffix(".html")
    write_report(path, page)
    return Outcome(
        exact=verified.exact,
        learnt=None if settings.refits < MARGIN_REFITS else risen >= MARGIN,
        rise=risen,
        verdict=verified.verdict,
        artifact=path,
        page=page,
    )
