"""Curves: every value is drawn, inside the plot, and nothing is drawn that is none."""

from __future__ import annotations

import re

import pytest

from patchkit.runtime.curves import render_curves
from patchkit.runtime.report import _training


def points(svg: str, name: str) -> list[tuple[float, float]]:
    (found,) = re.findall(rf'<polyline class="{name}" points="([^"]*)"', svg)
    return [tuple(map(float, p.split(","))) for p in found.split()]


def test_both_series_are_drawn_and_a_missing_value_is_left_out() -> None:
    svg = render_curves(
        [{"title": "a < b", "series": {"exact": [0.0, 0.0, 0.0], "stock": [1.0, None, 3.0]}}]
    )
    exact, stock = points(svg, "exact"), points(svg, "stock")
    assert len(exact) == 3
    assert len(stock) == 2
    assert [x for x, _ in stock] == [exact[0][0], exact[2][0]]
    assert "a &lt; b" in svg
    # Of two equal lines, the exact one is on top.
    assert svg.index('class="stock"') < svg.index('class="exact"')


@pytest.mark.parametrize("values", [[0.0], [5.0, 5.0], [-2.0, 1e-9], [1e12, 2e12], [0.5, 0.9, 0.7]])
def test_whatever_the_values_are_they_lie_inside_the_plot(values: list[float]) -> None:
    svg = render_curves([{"title": "t", "series": {"exact": values}}])
    drawn = points(svg, "exact")
    assert len(drawn) == len(values)
    assert all(0 <= x <= 440 and 0 <= y <= 190 for x, y in drawn)
    order = sorted(range(len(values)), key=values.__getitem__)
    heights = [-drawn[i][1] for i in order]
    assert heights == sorted(heights)


COST = {
    "with_s": 2.5,
    "without_s": 2.0,
    "ratio": 1.25,
    "ratio_by_stages": 1.2,
    "pairs": 5,
    "stages_s": {"sample": 1.0, "step": 1.5},
}
CURVES = [{"title": "mean reward", "series": {"exact": [0.5, 0.6]}}]


def test_the_page_tells_what_the_proof_costs() -> None:
    page = _training({"curves": CURVES, "gate_cost": COST})
    assert "2.50 s with recompute" in page
    assert "× 1.25" in page
    assert "mean reward" in page


@pytest.mark.parametrize(
    "notes",
    [
        {"gate_cost": {"ratio": 1.0}},
        {"gate_cost": {**COST, "with_s": "long"}},
        {"curves": ["no curve"]},
        {"curves": [{"title": "t", "series": {"exact": ["high"]}}]},
    ],
)
def test_notes_of_another_form_are_said_to_be_so(notes: dict) -> None:
    assert "another form" in _training(notes)


def test_without_notes_on_training_there_is_no_such_section() -> None:
    assert _training({}) == ""
