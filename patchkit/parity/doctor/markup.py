"""What the doctor's pages share: a self-contained frame, tables, colours for day and night."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

__all__ = ["document", "facts", "figure", "symbol", "table", "text"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --paper: #fff; --soft: #60646c; --line: #d9dde2;
  --good: #18794e; --bad: #c62a2f; --mark: #f1f3f5; --none: #e8ebee; --equal: #b4dfc4;
  --d1: #fde3a7; --d2: #f9b571; --d3: #e5734f; --d4: #a8213a; --link: #0b68cb; --first: #111;
  --a: #0b68cb; --b: #c4601d; --c: #6e56cf; }
@media (prefers-color-scheme: dark) { :root { --ink: #edeef0; --paper: #111315; --soft: #a0a6ad;
  --line: #33383d; --good: #3dd68c; --bad: #ff9592; --mark: #1c2024; --none: #24282c;
  --equal: #1f5136; --d1: #6a5114; --d2: #97561a; --d3: #c6492f; --d4: #f0506e; --link: #70b8ff;
  --first: #fff; --a: #70b8ff; --b: #ff9f57; --c: #b1a9ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 68rem; color: var(--ink);
  background: var(--paper); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2.25rem 0 .5rem; }
h3 { font-size: 1rem; margin: 0 0 .4rem; }
a { color: var(--link); }
p { margin: .4rem 0; } p.lead, .soft { color: var(--soft); }
.verdict { margin: 1.25rem 0; padding: .8rem 1rem; border-left: .35rem solid var(--bad);
  background: var(--mark); font-weight: 600; }
.verdict.good { border-color: var(--good); }
.scroll { overflow-x: auto; }
table.data { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
table.data th, table.data td { text-align: left; padding: .3rem .9rem .3rem 0;
  border-bottom: 1px solid var(--line); vertical-align: top; }
table.data th { font-weight: 600; color: var(--soft); white-space: nowrap; }
table.data td.n, table.data th.n { text-align: right; }
td.good { color: var(--good); } td.bad { color: var(--bad); }
code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre { background: var(--mark); padding: .8rem 1rem; overflow-x: auto; white-space: pre-wrap; }
figure { margin: 1rem 0; } figcaption { color: var(--soft); font-size: .9rem; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font-size: 11px; }
svg .axis { stroke: var(--line); stroke-width: 1; }
details { margin: .5rem 0; } summary { cursor: pointer; }
"""


def text(value: Any) -> str:
    """Escaped for HTML."""
    return escape(str(value))


def document(title: str, body: Iterable[str], *, style: str = "", script: str = "") -> str:
    """The whole page; fetches nothing."""
    code = f"<script>{script}</script>" if script else ""
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{text(title)}</title>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}{style}</style><body>{''.join(body)}{code}</body></html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numeric: Iterable[int] = ()) -> str:
    """A table of finished HTML cells."""
    numbers = set(numeric)

    def cell(tag: str, i: int, html: str) -> str:
        return f"<{tag}{' class=n' if i in numbers else ''}>{html}</{tag}>"

    top = "".join(cell("th", i, text(h)) for i, h in enumerate(head))
    lines = "".join(
        f"<tr>{''.join(cell('td', i, html) for i, html in enumerate(row))}</tr>" for row in rows
    )
    return f"<div class=scroll><table class=data><tr>{top}</tr>{lines}</table></div>"


def symbol(name: str) -> str:
    """A dotted name that breaks at its dots only."""
    breakable = re.sub("([.:_])", "\\1<wbr>", text(name))
    return f"<code>{breakable}</code>"


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Two columns: a name, and finished HTML."""
    lines = "".join(f"<tr><th>{text(name)}</th><td>{html}</td></tr>" for name, html in rows)
    return f'<div class=scroll><table class="data facts">{lines}</table></div>'


def figure(width: int, height: int, parts: Iterable[str], caption: str) -> str:
    """An SVG picture with a caption, which is also what a screen reader is told."""
    label = escape(caption, quote=True)
    return (
        f'<figure><svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg><figcaption>{text(caption)}</figcaption></figure>"
    )
