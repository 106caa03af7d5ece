"""Curves of a run as SVG, for the report: one small plot per quantity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

__all__ = ["render_curves"]

_WIDTH, _HEIGHT = 440, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 10, 12, 26


def render_curves(curves: Sequence[Mapping[str, Any]]) -> str:
    """All curves of an artifact's notes, side by side.

    Args:
        curves: Each with ``title``, ``series`` (``exact`` and, where it was run,
            ``stock``: one value per policy version, None where there is none).
    """
    plots = "".join(_plot(str(c["title"]), c["series"]) for c in curves)
    return f'<div class="curves">{plots}</div>'


def _plot(title: str, series: Mapping[str, Sequence[float | None]]) -> str:
    values = [v for points in series.values() for v in points if v is not None]
    low, high = min(values, default=0.0), max(values, default=0.0)
    # A quantity that starts at nothing is drawn from nothing.
    low = 0.0 if 0 <= low < 0.5 * high or low == high else low
    span = high - low or 1.0
    longest = max((len(points) for points in series.values()), default=1)
    step = (_WIDTH - _LEFT - _RIGHT) / max(longest - 1, 1)
    plot = _HEIGHT - _TOP - _BOTTOM

    def at(index: int, value: float) -> tuple[float, float]:
        return _LEFT + index * step, _TOP + plot * (1 - (value - low) / span)

    floor = _HEIGHT - _BOTTOM
    parts = [f'<line class="axis" x1="{_LEFT}" y1="{floor}" x2="{_WIDTH}" y2="{floor}"/>']
    ticks = (low, (low + high) / 2, high) if values and high > low else (low,)
    for tick in ticks:
        y = at(0, tick)[1]
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>'
        )
    for index in range(longest):
        if longest <= 12 or index % math.ceil(longest / 12) == 0:
            x = at(index, low)[0]
            parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{index}</text>')
    # The stock pair first: where both are equal, the exact line stays visible.
    for name in sorted(series, reverse=True):
        points = [(*at(i, v), i, v) for i, v in enumerate(series[name]) if v is not None]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in points)
        parts.append(f'<polyline class="{escape(name)}" points="{line}"/>')
        parts += [
            f'<circle class="{escape(name)}" cx="{x:.1f}" cy="{y:.1f}" r="3">'
            f"<title>{escape(name)}, version {i}: {_number(v)}</title></circle>"
            for x, y, i, v in points
        ]
    label = escape(title, quote=True)
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg><figcaption>{escape(title)}</figcaption></figure>"
    )


def _number(value: float) -> str:
    if value and (abs(value) < 1e-3 or abs(value) >= 1e5):
        return f"{value:.1e}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
