"""A diagnosis as one self-contained page, with a picture of layers and operators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from patchkit.files import write_atomically, writing
from patchkit.parity.doctor.compare import Cell
from patchkit.parity.doctor.diagnosis import Diagnosis, place
from patchkit.parity.doctor.layout import label
from patchkit.parity.doctor.markup import document, facts, symbol, table, text
from patchkit.parity.doctor.recording import AFTER, BEFORE

__all__ = ["grid_columns", "render_diagnosis", "write_page"]

_STYLE = """
table.grid { border-collapse: separate; border-spacing: 3px; margin: .5rem 0; }
table.grid th { font-weight: 500; color: var(--soft); font-size: 12px; text-align: right;
  padding: 0 .4rem 0 0; white-space: nowrap; position: sticky; left: 0; background: var(--paper); }
table.grid thead th { height: 8.2rem; vertical-align: bottom; padding: 0; position: static; }
table.grid thead th span { writing-mode: sideways-lr; display: inline-block; text-align: left; }
@supports not (writing-mode: sideways-lr) {
  table.grid thead th span { writing-mode: vertical-rl; transform: rotate(180deg); } }
table.grid td { padding: 0; }
.box { display: block; width: 24px; height: 24px; border-radius: 4px; background: var(--none);
  text-decoration: none; text-align: center; font: 700 12px/24px system-ui; color: var(--ink); }
.box.absent { background: transparent; }
.box.none { background: repeating-linear-gradient(45deg, var(--none) 0 3px, transparent 3px 6px); }
.box.equal { background: var(--equal); }
.box.d0 { background: repeating-linear-gradient(45deg, var(--d2) 0 4px, var(--d3) 4px 8px); }
.box.d1 { background: var(--d1); } .box.d2 { background: var(--d2); }
.box.d3 { background: var(--d3); color: #fff; } .box.d4 { background: var(--d4); color: #fff; }
.box.first { outline: 3px solid var(--first); outline-offset: 1px; }
a.box:hover, a.box:focus-visible { filter: brightness(1.12); outline: 2px solid var(--link);
  outline-offset: 1px; }
a.box.shown { box-shadow: 0 0 0 2px var(--paper), 0 0 0 4px var(--link); }
.ends { display: flex; flex-wrap: wrap; gap: .35rem 1.4rem; margin: .5rem 0; align-items: center; }
.ends span.end { display: inline-flex; gap: .45rem; align-items: center; font-size: 13px;
  color: var(--soft); }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; font-size: 13px; color: var(--soft);
  margin: .8rem 0; }
.legend span { display: inline-flex; gap: .4rem; align-items: center; }
.legend .box { width: 16px; height: 16px; border-radius: 3px; line-height: 16px; font-size: 10px; }
.legend .box.first { outline-width: 2px; }
.card { display: none; border: 1px solid var(--line); border-radius: 6px; padding: .8rem 1rem;
  margin: .6rem 0; }
.card:target, .card.shown { display: block; }
.cards:not(:has(.card:target)):not(.scripted) .card.default { display: block; }
table.facts th { width: 13rem; }
ol.causes { padding-left: 1.2rem; } ol.causes li { margin: .5rem 0; }
.tag { font-size: 12px; border: 1px solid var(--line); border-radius: 4px; padding: 0 .35rem;
  color: var(--soft); margin-left: .4rem; white-space: nowrap; }
"""

# The page works without it: then a click jumps to the card instead of showing it in place.
_SCRIPT = """
const cards = document.querySelector('.cards');
const show = id => {
  document.querySelectorAll('.card.shown, a.box.shown').forEach(e => e.classList.remove('shown'));
  const card = document.getElementById(id);
  if (!card) return;
  card.classList.add('shown');
  document.querySelectorAll('a.box').forEach(a =>
    a.classList.toggle('shown', a.getAttribute('href') === '#' + id));
};
if (cards) {
  cards.classList.add('scripted');
  const first = cards.querySelector('.card.default');
  show(location.hash.slice(1) || (first && first.id));
  document.querySelectorAll('a.box').forEach(a => a.addEventListener('click', e => {
    e.preventDefault();
    history.replaceState(null, '', a.getAttribute('href'));
    show(a.getAttribute('href').slice(1));
  }));
}
"""

# Buckets of the largest difference, in units of the last place at the row's size.
_BUCKETS = ((1.0, "d1", "up to 1 ulp"), (8.0, "d2", "up to 8"), (64.0, "d3", "up to 64"))


def write_page(diagnosis: Diagnosis, target: str | Path) -> Path:
    """Write the page atomically."""
    page = render_diagnosis(diagnosis).encode()
    with writing(target):
        return write_atomically(target, page)


def render_diagnosis(diagnosis: Diagnosis) -> str:
    """The page's text."""
    pair = "exact pair" if diagnosis.pair == "exact" else "stock pair"
    title = f"Doctor: {pair}"
    adapter = f"adapter {diagnosis.adapter[0]}, profile {diagnosis.adapter[1]} · " * bool(
        diagnosis.adapter[0]
    )
    versions = ", ".join(f"{name} {version}" for name, version in diagnosis.packages.items())
    installed = "installed on both sides" if diagnosis.pair == "exact" else "nothing installed"
    body = [
        f"<h1>{text(title)}</h1>",
        f"<p class=lead>{text(adapter)}{text(installed)} · {text(versions)} · "
        f"{diagnosis.sequences} sequences, {diagnosis.tokens[0]:,} tokens through vLLM (TP "
        f"{diagnosis.workers[0]}), {diagnosis.tokens[1]:,} through the Hugging Face model (FSDP2, "
        f"{diagnosis.workers[1]} {'rank' if diagnosis.workers[1] == 1 else 'ranks'})</p>",
        f'<p class="verdict {"good" if diagnosis.equal else ""}">{text(diagnosis.verdict)}</p>',
        *_first(diagnosis),
        "<h2>Layers and operators</h2>",
        "<p class=soft>Forward order is from left to right and from top to bottom. Hover over a "
        "square for its figures, click it for everything that is known.</p>",
        *_picture(diagnosis),
        *_cards(diagnosis),
        *_origins(diagnosis),
        *_notes(diagnosis),
    ]
    return document(title, body, style=_STYLE, script=_SCRIPT)


# -- the first difference -------------------------------------------------------------------


def _first(diagnosis: Diagnosis) -> Iterator[str]:
    first = diagnosis.first
    if first is None:
        return
    yield f"<h2>Why the {text(place(first))} differs</h2><ol class=causes>"
    for cause in diagnosis.causes:
        sure = "computed" if cause.certain else "told by the size of the difference"
        yield (
            f"<li><strong>{text(cause.kind)}</strong><span class=tag>{sure}</span><br>"
            f"{text(cause.as_dict()['means'])}: {text(cause.evidence)}."
            f"<br><span class=soft>To do: {text(cause.remedy)}.</span></li>"
        )
    yield "</ol>"
    rollout, trainer = diagnosis.covering
    if rollout or trainer:
        name = text(diagnosis.adapter[0])
        yield (
            f"<h2>What adapter {name} would patch here</h2>"
            if diagnosis.pair == "stock"
            else f"<h2>The patches of adapter {name} that stand here</h2>"
        )
        rows = [
            [side, symbol(p["symbol"]), text(p["reason"])]
            for side, patches in (("rollout", rollout), ("trainer", trainer))
            for p in patches
        ]
        yield table(["side", "patch", "why"], rows)


def _cell_facts(cell: Cell) -> Iterator[tuple[str, str]]:
    if cell.why:
        yield "not compared", text(cell.why)
    yield (
        "rows",
        f"{cell.differing:,} of {cell.rows:,} differ"
        + (
            f"; {cell.unmatched:,} on one side only (an engine computes neither what it has "
            "cached nor the last token)"
            if cell.unmatched
            else ""
        ),
    )
    if cell.first_row:
        yield (
            "first differing row",
            f"sequence {cell.first_row[0]}, position {cell.first_row[1]}",
        )
    if cell.max_absdiff is not None and not cell.is_integer:
        ulp = "" if cell.max_ulp is None else f" ({cell.max_ulp:.3g} ulp at the row's size)"
        yield "largest difference", f"{cell.max_absdiff:.4g}{ulp}"
    if cell.elements is not None:
        yield "elements of these rows", f"{cell.elements:.2%} differ"
    if cell.steps:
        low, high = cell.steps
        yield (
            "engine's forwards",
            f"of {low:,} to {high:,} tokens" if low != high else f"of {low:,}",
        )
    if cell.dtypes != ("", ""):
        yield "dtype", _both(*cell.dtypes)
        yield "shape of a row", _both(*(str(list(s)) for s in cell.shapes))
    for name, how in cell.weights.items():
        yield f"weight {name}", text(how)
    names = sorted({*cell.facts[0], *cell.facts[1]})
    for name in names:
        yield name, _both(*(str(f.get(name, "–")) for f in cell.facts))
    if any(cell.unrepeatable):
        yield "computed twice, differently", _both(*(f"{n:,} rows" for n in cell.unrepeatable))
    for side, owners in zip(("vLLM", "trainer"), cell.owners, strict=True):
        if owners:
            yield f"computed by ({side})", symbol(owners[0])


def _both(rollout: str, trainer: str) -> str:
    if rollout == trainer:
        return text(rollout)
    return (
        f"{text(rollout)} <span class=soft>(vLLM)</span>, {text(trainer)} "
        "<span class=soft>(trainer)</span>"
    )


# -- the picture -----------------------------------------------------------------------------


def _picture(diagnosis: Diagnosis) -> Iterator[str]:
    cells = diagnosis.comparison.cells
    inside = [c for c in cells if c.key.layer not in (BEFORE, AFTER)]
    columns = _columns(inside)
    layers = sorted({c.key.layer for c in inside})
    at = {(c.key.layer, c.key.op): c for c in inside}
    yield _ends([c for c in cells if c.key.layer == BEFORE], diagnosis)
    if layers:
        head = "".join(f"<th><span>{text(label(op))}</span></th>" for op in columns)
        yield f"<div class=scroll><table class=grid><thead><tr><th></th>{head}</tr></thead><tbody>"
        for layer in layers:
            boxes = "".join(f"<td>{_box(at.get((layer, op)), diagnosis)}</td>" for op in columns)
            yield f"<tr><th>layer {layer}</th>{boxes}</tr>"
        yield "</tbody></table></div>"
    yield _ends([c for c in cells if c.key.layer == AFTER], diagnosis)
    yield _legend()


def grid_columns(cells: list[Cell]) -> list[tuple[str, str]]:
    """Operators inside layers and their names, in forward order."""
    return [(op, label(op)) for op in _columns(cells)]


def _columns(cells: list[Cell]) -> list[str]:
    """All operators in forward order, also where layers are of different kinds.

    Each layer's order is kept: an operator that one layer alone has stands behind what
    precedes it there.
    """
    order: list[str] = []
    layers: dict[int, list[str]] = {}
    for cell in cells:
        layers.setdefault(cell.key.layer, []).append(cell.key.op)
    for ops in layers.values():
        place = 0
        for op in ops:
            if op in order:
                place = order.index(op) + 1
            else:
                order.insert(place, op)
                place += 1
    return order


def _ends(cells: list[Cell], diagnosis: Diagnosis) -> str:
    return (
        "<div class=ends>"
        + "".join(f"<span class=end>{_box(c, diagnosis)}{text(c.label)}</span>" for c in cells)
        + "</div>"
    )


def _mood(cell: Cell) -> str:
    if cell.status == "equal":
        return "equal"
    if cell.status == "not compared":
        return "none"
    if cell.max_absdiff is None:
        return "d0"
    if cell.max_ulp is None:
        return "d3"
    return next((mood for limit, mood, _ in _BUCKETS if cell.max_ulp <= limit), "d4")


def _box(cell: Cell | None, diagnosis: Diagnosis) -> str:
    if cell is None:
        return '<span class="box absent"></span>'
    first = cell is diagnosis.first
    origin = any(o.key == cell.key for o in diagnosis.comparison.origins)
    mark = "1" if first else "•" if origin else ""
    told = f"{place(cell)}: {cell.status}"
    if cell.status == "differs":
        told += f", {cell.differing:,} of {cell.rows:,} rows"
        if cell.max_absdiff is not None and not cell.is_integer:
            told += f", at most {cell.max_absdiff:.3g}"
            told += "" if cell.max_ulp is None else f" ({cell.max_ulp:.3g} ulp)"
    elif cell.why:
        told += f" ({cell.why})"
    else:
        told += f", {cell.rows:,} rows"
    return (
        f'<a class="box {_mood(cell)}{" first" if first else ""}" href="#op-{cell.order}" '
        f'title="{text(told)}" aria-label="{text(told)}">{mark}</a>'
    )


def _legend() -> str:
    shown = [("equal", "", "equal, every bit")]
    shown += [(mood, "", words) for _, mood, words in _BUCKETS]
    shown += [
        ("d4", "", "more (ulp of the coarser dtype at the row's size)"),
        ("d0", "", "differs, not measured"),
        ("none", "", "seen on one side only"),
        ("d2 first", "1", "the first difference"),
        ("d2", "•", "differs on equal inputs"),
    ]
    return (
        "<div class=legend>"
        + "".join(
            f'<span><i class="box {mood}" style="font-style:normal">{mark}</i>{text(words)}</span>'
            for mood, mark, words in shown
        )
        + "</div>"
    )


def _cards(diagnosis: Diagnosis) -> Iterator[str]:
    yield "<div class=cards>"
    for cell in diagnosis.comparison.cells:
        default = " default" if cell is diagnosis.first else ""
        yield (
            f'<div class="card{default}" id="op-{cell.order}"><h3>{text(place(cell))} '
            f"<code class=soft>{text(cell.key.op)}</code></h3>{facts(_cell_facts(cell))}</div>"
        )
    yield "</div>"


# -- the rest -------------------------------------------------------------------------------


def _origins(diagnosis: Diagnosis) -> Iterator[str]:
    origins = diagnosis.comparison.origins
    if not origins:
        return
    yield "<h2>Where differences begin</h2>"
    yield (
        "<p class=soft>Rows in which an operator is the first to differ: everything that it read "
        "was equal there, so it differs by itself and does not only pass on what came before.</p>"
    )
    rows = []
    for origin in origins:
        cell = diagnosis.comparison.cell(origin.key)
        rows.append(
            [
                f'<a href="#op-{cell.order}">{text(place(cell))}</a>',
                f"{origin.rows:,}",
                f"{cell.differing:,}",
                _both(*cell.dtypes),
            ]
        )
    head = ["operator", "rows that begin here", "rows that differ", "dtype"]
    yield table(head, rows, numeric=(1, 2))


def _notes(diagnosis: Diagnosis) -> Iterator[str]:
    yield "<h2>About this run</h2>"
    seconds = diagnosis.comparison.seconds
    held = diagnosis.bytes_held
    rows: list[tuple[str, Any]] = [
        ("model", f"<code>{text(diagnosis.model)}</code>"),
        ("time in digests", f"{seconds[0]:.2f} s (vLLM), {seconds[1]:.2f} s (trainer)"),
        ("values held", f"{held[0] / 1e6:,.1f} MB (vLLM), {held[1] / 1e6:,.1f} MB (trainer)"),
    ]
    yield facts(rows)
    if diagnosis.notes:
        yield "<h2>Not recorded</h2><ul>"
        yield "".join(f"<li>{text(note)}</li>" for note in diagnosis.notes)
        yield "</ul>"
