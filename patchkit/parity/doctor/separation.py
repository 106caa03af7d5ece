"""Three kinds of mismatch, told apart from two runs' selected-token log-probabilities.

``d = log p_trainer - log p_rollout`` of every sampled token is the sum of

* **semantics**: the two call other numbers "log-probability" (another temperature, a
  distribution renormalised after top-p, a constant). It has a shape over tokens, and is
  there for tokens that the trainer's own weights drew as well;
* **numerics**: the two round differently. No shape, no offset, a spread;
* **staleness**: older weights drew the token. It grows with the lag between versions.

Semantics and numerics are therefore read off tokens without lag, and what older tokens
have beyond them is staleness. Everything is an estimate from samples; how much each part
is worth is its share of the mean square of ``d``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from patchkit.parity.doctor.runs import Run, aligned, lags

__all__ = ["Group", "Part", "Separation", "separate"]

# Standard errors by which an offset or slope must leave zero before it counts.
_SIGNIFICANT = 6.0
# Further groups than these are merged when versions are missing and steps are not.
_GROUPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Figures of the tokens of one lag (or of all).

    Attributes:
        name: "all", "lag 0", "steps 0–9" and so on.
        lag: The lag, or the place of a group of steps; None for all.
        tokens: How many.
        mean: Of ``d``.
        std: Of ``d``.
        ratio_mean: Of ``exp(d)``; one in expectation when both call the same thing a
            log-probability and the rollout's policy drew the tokens.
        ratio_std: Its spread.
        clipped: Share of ratios outside the trust region.
        k1: ``mean(-d)``, an estimate of KL(rollout || trainer).
        k3: ``mean(exp(d) - 1 - d)``, the estimate that is never negative.
        entropy: Of the rollout's policy: of whole distributions where they were given,
            otherwise estimated from the drawn tokens.
    """

    name: str
    lag: int | None
    tokens: int
    mean: float
    std: float
    ratio_mean: float
    ratio_std: float
    clipped: float
    k1: float
    k3: float
    entropy: float

    def row(self) -> list[str]:
        """Cells of a table."""
        return [
            self.name,
            f"{self.tokens:,}",
            f"{self.mean:+.2e}",
            f"{self.std:.2e}",
            f"{self.ratio_mean:.5f}",
            f"{self.ratio_std:.2e}",
            f"{self.clipped:.2%}",
            f"{self.k1:+.2e}",
            f"{self.k3:.2e}",
            f"{self.entropy:.3f}",
        ]

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of the three.

    Attributes:
        name: "semantic", "numerical" or "stale".
        kind: Of a semantic part: "none", "constant", "temperature" or "processed";
            of a stale one: "lag" or "steps"; empty otherwise.
        share: Of the mean square of ``d``.
        size: Square root of its part of the mean square.
        value: The constant, the temperature, the mean mass kept, the KL per version;
            None where there is none.
        told: A sentence.
    """

    name: str
    kind: str
    share: float
    size: float
    value: float | None
    told: str

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Separation:
    """What separates two runs.

    Attributes:
        names: Of the rollout's and the trainer's run.
        tokens: Compared.
        unmatched: Tokens that only one run has.
        mismatches: Tokens whose log-probabilities differ at all.
        clip: Half-width of the trust region.
        groups: All tokens, then each lag.
        corrected: The same without the semantic part; empty where there is none.
        parts: Semantic, numerical, stale.
        advice: What to do, the largest part first.
        notes: What limits the estimate.
        difference: ``d`` of every token, for the page.
        logprob: The trainer's log-probability of every token.
        lag: Of every token; None if unknown.
    """

    names: tuple[str, str]
    tokens: int
    unmatched: int
    mismatches: int
    clip: float
    groups: tuple[Group, ...]
    corrected: tuple[Group, ...]
    parts: tuple[Part, ...]
    advice: tuple[str, ...]
    notes: tuple[str, ...]
    difference: np.ndarray = field(repr=False)
    logprob: np.ndarray = field(repr=False)
    lag: np.ndarray | None = field(repr=False)

    @property
    def equal(self) -> bool:
        """Whether both runs have the same tokens, and the same log-probability of each."""
        return self.mismatches == 0 and self.unmatched == 0

    def part(self, name: str) -> Part:
        return next(p for p in self.parts if p.name == name)

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.equal:
            return f"Equal: {self.tokens:,} tokens, every log-probability"
        if not self.mismatches:
            return (
                f"Of {self.tokens:,} tokens no log-probability differs, and {self.unmatched:,} "
                "that only one run has were compared with nothing"
            )
        largest = max(self.parts, key=lambda p: p.share)
        return (
            f"{self.mismatches:,} of {self.tokens:,} log-probabilities differ; the largest part "
            f"is {_ADJECTIVES[largest.name]} ({largest.share:.0%} of the mean square)"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data, without the tokens."""
        return {
            "equal": self.equal,
            "verdict": self.verdict,
            "names": list(self.names),
            "tokens": self.tokens,
            "unmatched": self.unmatched,
            "mismatches": self.mismatches,
            "clip": self.clip,
            "groups": [g.as_dict() for g in self.groups],
            "corrected": [g.as_dict() for g in self.corrected],
            "parts": [p.as_dict() for p in self.parts],
            "advice": list(self.advice),
            "notes": list(self.notes),
        }


_ADJECTIVES = {"semantic": "semantics", "numerical": "numerics", "stale": "staleness"}


def separate(rollout: Run, trainer: Run, *, clip: float = 0.2) -> Separation:
    """Tell the three apart.

    Args:
        rollout: The run whose policy drew the tokens.
        trainer: The run whose weights are trained.
        clip: Half-width of the trust region around a ratio of one.

    Raises:
        ConfigurationError: The runs are not of the same tokens.
    """
    a, b, unmatched = aligned(rollout, trainer)
    lag = lags(a, b)
    d = b.columns["logprob"] - a.columns["logprob"]
    entropy = a.get("entropy") if a.get("entropy") is not None else b.get("entropy")
    grouping, kind, notes = _grouping(a, b, lag)
    reference = grouping == 0 if grouping is not None else np.ones(len(d), bool)
    semantic = _semantics(d[reference], b.columns["logprob"][reference], _at(entropy, reference))
    removed = semantic.predict(b.columns["logprob"], entropy)
    parts = _parts(d, removed, reference, grouping, kind, semantic)
    names = _group_names(grouping, kind, a, lag)
    spread = entropy if entropy is not None else -a.columns["logprob"]
    if entropy is None:
        notes.append("entropies were not given; they are estimated from the drawn tokens")
    groups = _groups(d, spread, grouping, names, clip)
    corrected: tuple[Group, ...] = ()
    if semantic.kind in ("constant", "temperature"):
        corrected = _groups(d - removed, spread, grouping, names, clip)
    mismatches = int((d != 0).sum())
    return Separation(
        names=(rollout.name, trainer.name),
        tokens=len(d),
        unmatched=unmatched,
        mismatches=mismatches,
        clip=clip,
        groups=groups,
        corrected=corrected,
        parts=parts,
        advice=_advice(parts) if mismatches else (),
        notes=tuple(notes),
        difference=d,
        logprob=b.columns["logprob"],
        lag=grouping,
    )


def _at(values: np.ndarray | None, where: np.ndarray) -> np.ndarray | None:
    return None if values is None else values[where]


# -- groups -----------------------------------------------------------------------------------


def _grouping(a: Run, b: Run, lag: np.ndarray | None) -> tuple[np.ndarray | None, str, list[str]]:
    """Which group each token is in (0: the one that semantics and numerics are read off)."""
    notes: list[str] = []
    if lag is not None and len(np.unique(lag)) >= 1:
        least = int(lag.min())
        if least:
            notes.append(
                f"no token was drawn by the trainer's own version; the smallest lag is {least}, "
                "and its staleness is counted with semantics and numerics"
            )
        return lag - least, "lag", notes
    steps = a.get("step") if a.get("step") is not None else b.get("step")
    if steps is not None and len(np.unique(steps)) > 1:
        notes.append("versions were not given; growth over steps stands for staleness")
        values, which = np.unique(steps, return_inverse=True)
        merged = which * min(_GROUPS, len(values)) // len(values)
        return merged.astype(np.int64), "steps", notes
    notes.append("neither versions nor steps were given; staleness cannot be told from numerics")
    return None, "", notes


def _group_names(
    grouping: np.ndarray | None, kind: str, a: Run, lag: np.ndarray | None
) -> dict[int, str]:
    if grouping is None:
        return {}
    if kind == "lag":
        assert lag is not None
        least = int(lag.min())
        return {int(g): f"lag {int(g) + least}" for g in np.unique(grouping)}
    steps = a.columns["step"]
    found = {}
    for g in np.unique(grouping):
        inside = steps[grouping == g]
        low, high = int(inside.min()), int(inside.max())
        found[int(g)] = f"steps {low}–{high}" if low != high else f"step {low}"
    return found


def _groups(
    d: np.ndarray,
    entropy: np.ndarray,
    grouping: np.ndarray | None,
    names: dict[int, str],
    clip: float,
) -> tuple[Group, ...]:
    found = [_group("all", None, d, entropy, clip)]
    if grouping is not None:
        for g, name in names.items():
            inside = grouping == g
            found.append(_group(name, g, d[inside], entropy[inside], clip))
    return tuple(found)


def _group(name: str, lag: int | None, d: np.ndarray, entropy: np.ndarray, clip: float) -> Group:
    # A ratio beyond e^30 is no figure any more, and would hide all others in a mean.
    ratio = np.exp(np.clip(d, -30, 30))
    return Group(
        name=name,
        lag=lag,
        tokens=len(d),
        mean=float(d.mean()),
        std=float(d.std()),
        ratio_mean=float(ratio.mean()),
        ratio_std=float(ratio.std()),
        clipped=float((np.abs(ratio - 1) > clip).mean()),
        k1=float(0.0 - d.mean()),  # no negative zero
        # expm1 keeps the digits that exp(d) - 1 loses for small d.
        k3=float((np.expm1(np.clip(d, -30, 30)) - d).mean()),
        entropy=float(entropy.mean()),
    )


# -- semantics ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Semantics:
    """A model of the offset: ``d = constant + slope * logprob + tilt * entropy``."""

    kind: str
    constant: float = 0.0
    slope: float = 0.0
    tilt: float = 0.0
    noise: float = 0.0
    value: float | None = None
    least: float = 1.0

    def predict(self, logprob: np.ndarray, entropy: np.ndarray | None) -> np.ndarray:
        found = self.constant + self.slope * logprob
        if entropy is not None:
            found = found + self.tilt * entropy
        result: np.ndarray = np.broadcast_to(found, logprob.shape)
        return result


def _semantics(d: np.ndarray, logprob: np.ndarray, entropy: np.ndarray | None) -> _Semantics:
    """Which shape the offset has, over tokens without lag."""
    square = float((d**2).mean())
    spread, count = float(d.std()), len(d)
    if square == 0 or count < 8:
        return _Semantics(kind="none", noise=spread)
    # Tokens drawn from one policy and scored by another have E[d] = -var/2 at least.
    mean = float(d.mean())
    beyond = mean + spread**2 / 2
    error = max(spread / math.sqrt(count), 1e-12)
    tempered = _temperature(d, logprob, entropy, square)
    if tempered is not None:
        return tempered
    offset = abs(beyond) > _SIGNIFICANT * error
    if offset and spread < 0.05 * abs(mean):
        return _Semantics(kind="constant", constant=mean, noise=spread, value=mean)
    if (one_sided := _processed(d, mean)) is not None:
        return one_sided
    if offset and abs(beyond) > 0.2 * spread:
        return _Semantics(kind="constant", constant=mean, noise=spread, value=mean)
    return _Semantics(kind="none", noise=math.sqrt(square))


def _temperature(
    d: np.ndarray, logprob: np.ndarray, entropy: np.ndarray | None, square: float
) -> _Semantics | None:
    """A slope over the log-probability.

    With ``log p_rollout = log p / T - log Z(context)``, ``d`` has the slope ``1 - 1/T``
    over ``log p``; the rest depends on the context alone, and the entropy stands for it.
    """
    columns = [np.ones_like(logprob), logprob]
    if entropy is not None:
        columns.append(entropy)
    design = np.stack(columns, 1)
    if float(logprob.std()) < 1e-9 or len(d) <= len(columns) + 8:
        return None
    fit, *_ = np.linalg.lstsq(design, d, rcond=None)
    rest = d - design @ fit
    residual = float((rest**2).sum()) / (len(d) - len(columns))
    covariance = residual * np.linalg.pinv(design.T @ design)
    error = math.sqrt(max(float(covariance[1, 1]), 1e-30))
    explained = 1 - float((rest**2).mean()) / square
    constant = float(d.mean()) ** 2 / square
    slope = float(fit[1])
    if abs(slope) < _SIGNIFICANT * error or abs(slope) < 2e-3 or explained - constant < 0.2:
        return None
    # A mass that was cut has a slope as well (rare tokens stand where little is cut),
    # but is never positive; a temperature moves tokens both ways.
    if _processed(d, float(d.mean())) is not None:
        return None
    return _Semantics(
        kind="temperature",
        constant=float(fit[0]),
        slope=slope,
        tilt=float(fit[2]) if entropy is not None else 0.0,
        noise=math.sqrt(float((rest**2).mean())),
        value=1 / (1 - slope) if slope < 1 else math.inf,
    )


def _processed(d: np.ndarray, mean: float) -> _Semantics | None:
    """Renormalised after top-p, top-k or min-p: ``d = log(mass kept)``, never positive."""
    positive = d[d > 0]
    # Where nothing was cut only noise is left, and half of it is positive.
    noise = math.sqrt(float((positive**2).mean())) if len(positive) else 0.0
    cut = d < -max(6 * noise, 1e-6)
    if mean >= 0 or cut.mean() < 0.05:
        return None
    largest = float(np.quantile(positive, 0.99)) if len(positive) else 0.0
    if largest > 0.1 * float(-d[cut].mean()):
        return None
    # A constant with noise lies as much below its mean as above; what truncation keeps
    # has a bound on one side (the p of top-p) and a tail on the other.
    centred = d - mean
    skew = float((centred**3).mean()) / max(float((centred**2).mean()) ** 1.5, 1e-30)
    if abs(skew) < _SIGNIFICANT * math.sqrt(6 / len(d)):
        return None
    return _Semantics(
        kind="processed",
        noise=noise,
        value=float(np.exp(d[cut]).mean()),
        least=float(np.exp(d.min())),
    )


# -- shares --------------------------------------------------------------------------------------


def _parts(
    d: np.ndarray,
    removed: np.ndarray,
    reference: np.ndarray,
    grouping: np.ndarray | None,
    kind: str,
    semantic: _Semantics,
) -> tuple[Part, ...]:
    base = d[reference]
    if semantic.kind == "processed":
        # What was cut differs from token to token and is not known of any one.
        numerical = semantic.noise**2
        shift = max(float((base**2).mean()) - numerical, 0.0)
        rest = d**2
        floor = float((base**2).mean())
    else:
        rest = (d - removed) ** 2
        numerical = floor = float(rest[reference].mean())
        shift = float((removed**2).mean())
    excess = np.maximum(_excess(rest, floor, grouping, reference), 0.0)
    stale = float(excess.mean()) if grouping is not None else 0.0
    total = shift + numerical + stale or 1.0
    return (
        Part(
            name="semantic",
            kind=semantic.kind,
            share=shift / total,
            size=math.sqrt(shift),
            value=semantic.value,
            told=_semantic_told(semantic),
        ),
        Part(
            name="numerical",
            kind="",
            share=numerical / total,
            size=math.sqrt(numerical),
            value=math.sqrt(numerical),
            told=f"a spread of {math.sqrt(numerical):.2e} without shape or offset",
        ),
        _stale(d, removed, grouping, kind, stale / total, stale),
    )


def _excess(
    rest: np.ndarray, floor: float, grouping: np.ndarray | None, reference: np.ndarray
) -> np.ndarray:
    """For every token, what the mean square of its group has beyond the reference's."""
    found = np.zeros(len(rest))
    if grouping is None:
        return found
    error_reference = rest[reference].std() / math.sqrt(max(int(reference.sum()), 1))
    for g in np.unique(grouping):
        if g == 0:
            continue
        inside = grouping == g
        error = math.hypot(rest[inside].std() / math.sqrt(int(inside.sum())), error_reference)
        beyond = float(rest[inside].mean()) - floor
        # What sampling alone would do is not called staleness.
        found[inside] = beyond if beyond > 3 * error else 0.0
    return found


def _semantic_told(semantic: _Semantics) -> str:
    value = semantic.value or 0.0
    if semantic.kind == "constant":
        return f"the same offset for every token: the trainer's is {value:+.4g}"
    if semantic.kind == "temperature":
        return (
            f"a slope over the log-probability: the rollout's are of temperature {value:.3g} "
            "relative to the trainer's"
        )
    if semantic.kind == "processed":
        return (
            f"never above the rollout's: it renormalised over {value:.1%} of the mass on average "
            f"where it cut, {semantic.least:.1%} at the least (top-p, top-k or min-p)"
        )
    return "no offset and no shape: both call the same thing a log-probability"


def _stale(
    d: np.ndarray,
    removed: np.ndarray,
    grouping: np.ndarray | None,
    kind: str,
    share: float,
    square: float,
) -> Part:
    if grouping is None:
        told, per = "not told: neither versions nor steps were given", None
    elif not (grouping > 0).any():
        told, per = "none: every token was drawn by the trainer's own version", 0.0
    else:
        clean = d - removed
        k3 = np.expm1(np.clip(clean, -30, 30)) - clean
        base = float(k3[grouping == 0].mean())
        older = grouping > 0
        # KL grows with the square of a small step; per version is what a reader compares.
        per = max(float((k3[older] - base).sum() / grouping[older].sum()), 0.0)
        unit = "version of lag" if kind == "lag" else "group of steps"
        told = (
            f"k3 grows by {per:.2e} per {unit}, up to {unit.split()[-1]} {int(grouping.max())}"
            if share
            else "nothing beyond what tokens without lag have"
        )
    return Part(name="stale", kind=kind, share=share, size=math.sqrt(square), value=per, told=told)


def _advice(parts: Sequence[Part]) -> tuple[str, ...]:
    found = []
    for part in sorted(parts, key=lambda p: -p.share):
        if part.share < 0.01:
            continue
        if part.name == "semantic":
            found.append(
                {
                    "constant": "semantics: look for a bias on logits, another base of the "
                    "logarithm, or a mask on one side",
                    "temperature": "semantics: sample at temperature 1, or divide the trainer's "
                    "logits by the temperature that was sampled at",
                    "processed": "semantics: take raw_logprobs, or apply the same truncation in "
                    "the replay; at top-p 1, top-k off and min-p 0 both are the same",
                }[part.kind]
            )
        elif part.name == "numerical":
            found.append(
                "numerics: `patchkit doctor --stock --model CHECKPOINT` names the first operator "
                "that differs"
            )
        else:
            found.append(
                "staleness: update the engine more often or bound the lag; if versions say that "
                "there is none, look for weights that were not loaded and caches that were not "
                "reset (`patchkit doctor`)"
            )
    return tuple(found)
