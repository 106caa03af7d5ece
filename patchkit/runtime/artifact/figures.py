"""Figures of an artifact: from the arrays alone, summed up, and in words."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PHASES = ("initial_checkpoint", "post_update_reload")

# What every round says of each token.
TOKENS = ("sequences", "positions", "token_ids")

# Comparisons with the rollout: the first two must be exact, the last is for the
# reader: the unpatched replay of the same tokens, against what an unpatched engine
# scores them with, where that was made, and against the rollout otherwise.
REQUIRED = ("recompute", "first_forward")
BASELINE = "stock"
BASELINE_ROLLOUT = "stock_rollout"

_FIRST = 8


def compared(own: Mapping[str, array[Any]]) -> dict[str, dict[str, Any]]:
    return {name: _compare(own, name) for name in (*REQUIRED, BASELINE) if name in own}


def _compare(own: Mapping[str, array[Any]], name: str) -> dict[str, Any]:
    reference = BASELINE_ROLLOUT if name == BASELINE and BASELINE_ROLLOUT in own else "rollout"
    a, b = own[reference], own[name]
    bits_a, bits_b = _bits(a), _bits(b)
    worst = [i for i in range(len(a)) if bits_a[i] != bits_b[i] or not math.isfinite(a[i] + b[i])]
    k3_sum = k3_max = max_absdiff = 0.0
    finite = len(a)
    for i in worst:
        if not (math.isfinite(a[i]) and math.isfinite(b[i])):
            finite -= 1
            continue
        d = b[i] - a[i]
        k3 = math.expm1(d) - d if d < 700 else 1e300  # JSON has no infinity
        k3_sum, k3_max = min(k3_sum + k3, 1e300), max(k3_max, k3)
        max_absdiff = max(max_absdiff, abs(d))
    return {
        "token_count": len(a),
        "mismatch_count": len(worst),
        "finite_count": finite,
        "max_absdiff": max_absdiff,
        "k3_mean": k3_sum / finite if finite else 0.0,
        "k3_max": k3_max,
        "first_mismatches": [
            {
                "sequence": own["sequences"][i],
                "position": own["positions"][i],
                "token_id": own["token_ids"][i],
                "rollout_bits": f"0x{bits_a[i]:08x}",
                "replay_bits": f"0x{bits_b[i]:08x}",
            }
            for i in worst[:_FIRST]
        ],
    }


def _bits(values: array[float]) -> array[int]:
    made = array("I")
    made.frombytes(values.tobytes())
    return made


def totals_of(rounds: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        name: _add([r["comparisons"][name] for r in rounds if name in r["comparisons"]])
        for name in (*REQUIRED, BASELINE)
        if any(name in r["comparisons"] for r in rounds)
    }


def _add(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    finite = sum(p["finite_count"] for p in parts)
    weighted = sum(p["k3_mean"] * p["finite_count"] for p in parts)
    return {
        "token_count": sum(p["token_count"] for p in parts),
        "mismatch_count": sum(p["mismatch_count"] for p in parts),
        "finite_count": finite,
        "max_absdiff": max(p["max_absdiff"] for p in parts),
        "k3_mean": weighted / finite if finite else 0.0,
        "k3_max": max(p["k3_max"] for p in parts),
        "first_mismatches": [m for p in parts for m in p["first_mismatches"]][:_FIRST],
    }


def sum_up(
    documents: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, dict[str, dict[str, Any]]], list[str]]:
    totals = {
        p: totals_of([{"comparisons": d["phases"][p]["totals"]} for d in documents]) for p in PHASES
    }
    return totals, sorted({s for d in documents for s in d["unreviewed"]})


def same_figures(a: Any, b: Any) -> bool:
    """Equal, but for the last digits of sums of transcendental functions."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(
            math.isclose(a[k], b[k], rel_tol=1e-9)
            if k.startswith("k3")
            else same_figures(a[k], b[k])
            for k in a
        )
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same_figures, a, b))
    return bool(a == b)


def is_exact(totals: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> bool:
    return all(
        name in totals.get(phase, {})
        and totals[phase][name]["token_count"] > 0
        and totals[phase][name]["mismatch_count"] == 0
        for phase in PHASES
        for name in REQUIRED
    )


def verdict_of(
    totals: Mapping[str, Mapping[str, Mapping[str, Any]]], runs: Sequence[Mapping[str, Any]]
) -> str:
    """The figures in words, with every reservation that the runs carry."""
    tokens = sum(t.get("recompute", {}).get("token_count", 0) for t in totals.values())
    bad = sum(t[name]["mismatch_count"] for t in totals.values() for name in REQUIRED if name in t)
    if is_exact(totals):
        verdict = f"exact: {tokens:,} tokens, 0 mismatches in both phases"
    elif bad:
        verdict = f"not exact: {bad:,} mismatches in {tokens:,} tokens"
    else:
        lacking = [p for p in PHASES if not totals.get(p, {}).get("recompute")]
        verdict = f"incomplete: no tokens compared in {', '.join(lacking) or 'some comparison'}"
    return "; ".join([verdict, *_reservations(runs)])


def _reservations(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if unreviewed := {s for run in runs for s in run["unreviewed"]}:
        yield f"UNREVIEWED: {len(unreviewed)} symbol(s) accepted without review"
    if modes := {r["mode"] for run in runs for r in run["refits"]} - {"enforce"}:
        yield f"weight receipts not enforced ({', '.join(sorted(modes))})"
    if any(r.get("in_flight") for run in runs for r in run["refits"]):
        yield "NOT ON-POLICY: weights changed under running requests"
    if not all(run["attestations"] for run in runs):
        yield "no process attested what was installed in it"
