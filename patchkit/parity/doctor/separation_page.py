"""A separation as one self-contained page."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from patchkit.files import write_atomically, writing
from patchkit.parity.doctor.markup import document, figure, table, text
from patchkit.parity.doctor.separation import Group, Separation

__all__ = ["render_separation", "write_page"]

_STYLE = """
.bar { display: flex; height: 34px; border-radius: 5px; overflow: hidden; margin: .8rem 0 .4rem;
  background: var(--none); }
.bar span { display: block; color: #fff; font: 600 12px/34px system-ui; text-align: center;
  overflow: hidden; white-space: nowrap; }
.bar .semantic, i.semantic { background: var(--a); } .bar .numerical, i.numerical {
  background: var(--c); } .bar .stale, i.stale { background: var(--b); }
@media (prefers-color-scheme: dark) { .bar span { color: #111315; } }
i.key { display: inline-block; width: 11px; height: 11px; border-radius: 3px;
  margin-right: .45rem; }
.pictures { display: grid; gap: 0 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(25rem, 100%), 1fr)); }
svg polyline { fill: none; stroke-width: 2; }
svg .a { stroke: var(--a); } svg .b { stroke: var(--b); } svg .c { stroke: var(--c); }
svg .band { fill: var(--a); opacity: .16; stroke: none; }
svg circle.a { fill: var(--a); stroke: none; }
svg .zero { stroke: var(--soft); stroke-dasharray: 3 3; }
svg text.a { fill: var(--a); stroke: none; } svg text.b { fill: var(--b); stroke: none; }
"""

_HEAD = (
    "tokens of",
    "tokens",
    "mean d",
    "std d",
    "mean ratio",
    "std ratio",
    "clipped",
    "k1",
    "k3",
    "entropy",
)
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 460, 230, 62, 34, 14


def write_page(separation: Separation, target: str | Path) -> Path:
    """Write the page atomically."""
    page = render_separation(separation).encode()
    with writing(target):
        return write_atomically(target, page)


def render_separation(separation: Separation) -> str:
    """The page's text."""
    a, b = (text(name) for name in separation.names)
    body = [
        "<h1>Doctor: two runs' log-probabilities</h1>",
        f"<p class=lead>{a} (rollout) against {b} (trainer), {separation.tokens:,} tokens"
        + (f"; {separation.unmatched:,} that only one has" if separation.unmatched else "")
        + "</p>",
        f'<p class="verdict {"good" if separation.equal else ""}">{text(separation.verdict)}</p>',
        *_shares(separation),
        "<h2>Figures</h2>",
        "<p class=soft>d is the trainer's log-probability minus the rollout's; the ratio is its "
        f"exponential, clipped outside 1 ± {separation.clip:g}.</p>",
        _groups(separation.groups),
        *_corrected(separation),
        *_pictures(separation),
        *_notes(separation),
    ]
    return document("Doctor: two runs", body, style=_STYLE)


def _shares(separation: Separation) -> Iterator[str]:
    if not separation.mismatches:
        return
    yield "<h2>What the difference is made of</h2><div class=bar>"
    for part in separation.parts:
        name = f"{part.name} {part.share:.0%}" if part.share > 0.12 else ""
        yield (
            f'<span class="{part.name}" style="width:{100 * part.share:.2f}%" '
            f'title="{part.name}: {part.share:.1%} of the mean square">{name}</span>'
        )
    yield "</div>"
    rows = [
        [
            f'<i class="key {p.name}"></i>{p.name}',
            f"{p.share:.1%}",
            f"{p.size:.2e}",
            text(p.told),
        ]
        for p in separation.parts
    ]
    yield table(["part", "share", "size", "what it is"], rows, numeric=(1, 2))
    yield (
        "<ul>" + "".join(f"<li>{_commands(advice)}</li>" for advice in separation.advice) + "</ul>"
    )


def _commands(words: str) -> str:
    """What stands between backticks is something to type."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", text(words))


def _groups(groups: Sequence[Group]) -> str:
    rows = [[text(cell) for cell in group.row()] for group in groups]
    return table(_HEAD, rows, numeric=range(1, len(_HEAD)))


def _corrected(separation: Separation) -> Iterator[str]:
    if separation.corrected:
        yield "<h2>The same without the semantic part</h2>"
        yield _groups(separation.corrected)


def _notes(separation: Separation) -> Iterator[str]:
    if separation.notes:
        yield "<h2>What limits this</h2><ul>"
        yield "".join(f"<li>{text(note)}</li>" for note in separation.notes)
        yield "</ul>"


# -- pictures ------------------------------------------------------------------------------


def _pictures(separation: Separation) -> Iterator[str]:
    if not separation.mismatches:
        return
    yield "<h2>Pictures</h2><div class=pictures>"
    yield _histogram(separation)
    yield _shape(separation)
    by_lag = [g for g in separation.groups if g.lag is not None]
    if len(by_lag) > 1:
        clean = [g for g in separation.corrected if g.lag is not None] or by_lag
        yield _line(
            [("k3", [g.k3 for g in by_lag]), ("without semantics", [g.k3 for g in clean])][
                : 2 if separation.corrected else 1
            ],
            [g.name for g in by_lag],
            "k3, an estimate of KL(rollout || trainer), by age of the policy that drew the token.",
        )
        yield _line(
            [("clipped", [g.clipped for g in by_lag])],
            [g.name for g in by_lag],
            f"Share of ratios outside 1 ± {separation.clip:g}.",
            percent=True,
        )
    yield "</div>"


class _Axes:
    """Data to picture coordinates, and the frame around them."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float]) -> None:
        self._x, self._y = _wide(x), _wide(y)

    def at(self, x: float, y: float) -> tuple[float, float]:
        (x0, x1), (y0, y1) = self._x, self._y
        return (
            _LEFT + (x - x0) / (x1 - x0) * (_WIDTH - _LEFT - 10),
            _HEIGHT - _BOTTOM - (y - y0) / (y1 - y0) * (_HEIGHT - _BOTTOM - _TOP),
        )

    def path(self, points: Sequence[tuple[float, float]], cls: str) -> str:
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in (self.at(*p) for p in points))
        return f'<polyline class="{cls}" points="{joined}"/>'

    def frame(
        self,
        x_ticks: Sequence[tuple[float, str]],
        y_ticks: Sequence[tuple[float, str]],
        x_name: str = "",
    ) -> Iterator[str]:
        y = _HEIGHT - _BOTTOM
        yield f'<line class=axis x1="{_LEFT}" y1="{y}" x2="{_WIDTH - 10}" y2="{y}"/>'
        for value, words in x_ticks:
            x = self.at(value, 0)[0]
            yield f'<text x="{x:.1f}" y="{y + 15}" text-anchor="middle">{text(words)}</text>'
        for value, words in y_ticks:
            at = self.at(self._x[0], value)[1]
            yield f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{text(words)}</text>'
            yield (
                f'<line class=axis x1="{_LEFT}" y1="{at:.1f}" x2="{_WIDTH - 10}" y2="{at:.1f}" '
                'opacity=".45"/>'
            )
        if x_name:
            middle = (_LEFT + _WIDTH) / 2
            yield f'<text x="{middle}" y="{_HEIGHT - 3}" text-anchor="middle">{text(x_name)}</text>'


def _wide(bounds: tuple[float, float]) -> tuple[float, float]:
    low, high = bounds
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float, count: int = 4) -> list[tuple[float, str]]:
    """Round values in a range."""
    if not high > low:
        return [(low, f"{low:.3g}")]
    step = 10 ** math.floor(math.log10((high - low) / count))
    step *= min((1, 2, 5, 10), key=lambda m: abs((high - low) / (m * step) - count))
    first = math.ceil(low / step - 1e-9)
    return [(i * step, f"{i * step:.3g}") for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _histogram(separation: Separation) -> str:
    d = separation.difference
    lag = separation.lag
    span = float(np.quantile(np.abs(d), 0.995)) or float(np.abs(d).max()) or 1.0
    edges = np.linspace(-span, span, 61)
    parts = [("a", d if lag is None else d[lag == 0], "no lag" if lag is not None else "all")]
    if lag is not None and (lag > 0).any():
        parts.append(("b", d[lag > 0], "older policies"))
    counts = [(cls, np.histogram(v, edges)[0] / max(len(v), 1), name) for cls, v, name in parts]
    top = max(float(c.max()) for _, c, _ in counts)
    axes = _Axes((-span, span), (0.0, top))
    drawn = [*axes.frame(_ticks(-span, span), [(top, f"{top:.0%}"), (0.0, "0 %")], "d")]
    zero = axes.at(0, 0)[0]
    drawn.append(
        f'<line class=zero x1="{zero:.1f}" y1="{_TOP}" x2="{zero:.1f}" y2="{_HEIGHT - _BOTTOM}"/>'
    )
    for i, (cls, share, name) in enumerate(counts):
        points = [(x, float(s)) for j, s in enumerate(share) for x in (edges[j], edges[j + 1])]
        drawn.append(axes.path(points, cls))
        drawn.append(
            f'<text class="{cls}" x="{_WIDTH - 12}" y="{_TOP + 12 + 15 * i}" '
            f'text-anchor="end">{name}</text>'
        )
    return figure(
        _WIDTH,
        _HEIGHT,
        drawn,
        "How d is distributed: an offset or a skew is semantics, width around zero numerics, "
        "and what older policies add staleness.",
    )


def _shape(separation: Separation) -> str:
    """Mean of d over tokens of like log-probability: a slope is a temperature."""
    where = slice(None) if separation.lag is None else separation.lag == 0
    d, logprob = separation.difference[where], separation.logprob[where]
    order = np.argsort(logprob)
    bins = np.array_split(order, min(24, max(1, len(order) // 20)))
    x = [float(logprob[b].mean()) for b in bins]
    mean = [float(d[b].mean()) for b in bins]
    low = [float(np.quantile(d[b], 0.1)) for b in bins]
    high = [float(np.quantile(d[b], 0.9)) for b in bins]
    bounds = min(0.0, *low), max(0.0, *high)
    axes = _Axes((min(x), max(x)), bounds)
    band = [
        axes.at(*p) for p in (*zip(x, high, strict=True), *reversed([*zip(x, low, strict=True)]))
    ]
    outline = " ".join(f"{px:.1f},{py:.1f}" for px, py in band)
    drawn = [
        *axes.frame(_ticks(min(x), max(x)), _ticks(*bounds), "trainer's log-probability"),
        f'<polygon class=band points="{outline}"/>',
        axes.path(list(zip(x, mean, strict=True)), "a"),
    ]
    zero = axes.at(x[0], 0)[1]
    drawn.append(
        f'<line class=zero x1="{_LEFT}" y1="{zero:.1f}" x2="{_WIDTH - 10}" y2="{zero:.1f}"/>'
    )
    return figure(
        _WIDTH,
        _HEIGHT,
        drawn,
        "Mean of d (band: four fifths of the tokens) over the log-probability, tokens without "
        "lag: flat at zero is right, flat elsewhere a constant, a slope a temperature.",
    )


def _line(
    series: Sequence[tuple[str, Sequence[float]]],
    names: Sequence[str],
    caption: str,
    *,
    percent: bool = False,
) -> str:
    top = max(max(values) for _, values in series) or 1.0
    axes = _Axes((0, len(names) - 1), (0.0, top))
    every = max(1, len(names) // 8)
    ticks = [(float(i), name) for i, name in enumerate(names) if i % every == 0]
    marks = _ticks(0.0, top, 3)
    if percent:
        marks = [(value, f"{100 * value:.3g} %") for value, _ in marks]
    drawn = [*axes.frame(ticks, marks)]
    for cls, (name, values), i in zip("ab", series, range(2), strict=False):
        points = [(float(j), value) for j, value in enumerate(values)]
        drawn.append(axes.path(points, cls))
        if len(series) > 1:
            drawn.append(
                f'<text class="{cls}" x="{_LEFT + 8}" y="{_TOP + 12 + 15 * i}">{text(name)}</text>'
            )
    return figure(_WIDTH, _HEIGHT, drawn, caption)
