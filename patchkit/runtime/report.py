"""An artifact as one self-contained page: no script, no network, no fonts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from patchkit.files import write_atomically, writing
from patchkit.runtime.artifact import (
    BASELINE,
    BASELINE_ROLLOUT,
    MERGED,
    PHASES,
    REQUIRED,
    Verified,
    complete,
    load_artifact,
    refuse_to_overwrite,
    verify_artifact,
)
from patchkit.runtime.curves import render_curves
from patchkit.runtime.sidecar import read_sidecar

__all__ = ["render_report", "write_report"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --paper: #fff; --soft: #60646c; --line: #d9dde2;
  --good: #18794e; --bad: #c62a2f; --warn: #ad5700; --mark: #f1f3f5; }
@media (prefers-color-scheme: dark) { :root { --ink: #edeef0; --paper: #111315; --soft: #a0a6ad;
  --line: #33383d; --good: #3dd68c; --bad: #ff9592; --warn: #ffb454; --mark: #1c2024; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 62rem; color: var(--ink);
  background: var(--paper); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2.25rem 0 .5rem; }
p.lead { margin: 0; color: var(--soft); }
.verdict { margin: 1.25rem 0; padding: .8rem 1rem; border-left: .35rem solid var(--warn);
  background: var(--mark); font-weight: 600; }
.verdict.good { border-color: var(--good); } .verdict.bad { border-color: var(--bad); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; min-width: 44rem;
  font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { font-weight: 600; color: var(--soft); white-space: nowrap; }
td.n, th.n { text-align: right; } td.good { color: var(--good); } td.bad { color: var(--bad); }
code, pre { font: 13px/1.45 ui-monospace, monospace; overflow-wrap: anywhere; }
pre { background: var(--mark); padding: .8rem 1rem; overflow-x: auto; white-space: pre-wrap; }
figure { margin: 1rem 0; } figcaption { color: var(--soft); font-size: .9rem; }
svg { width: 100%; min-width: 36rem; height: auto; display: block; }
svg text { fill: var(--soft); font-size: 11px; }
svg .exact { fill: var(--good); } svg .stock { fill: var(--bad); }
svg .axis { stroke: var(--line); }
.curves { display: grid; gap: 0 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(21rem, 1fr)); }
.curves svg { min-width: 0; }
svg polyline { stroke-width: 2; }
svg polyline.exact { fill: none; stroke: var(--good); }
svg polyline.stock { fill: none; stroke: var(--bad); }
details { margin: .5rem 0; } summary { cursor: pointer; }
"""


def write_report(artifact: str | Path, target: str | Path) -> Verified:
    """Verify an artifact and render it; what does not verify has no report."""
    path = Path(artifact)
    found = verify_artifact(path)
    refuse_to_overwrite(target, [path])
    with complete(path):
        page = render_report(path, found).encode()
    with writing(target):
        write_atomically(target, page)
    return found


def render_report(path: Path, found: Verified) -> str:
    """The page's text."""
    document = load_artifact(path)
    merged = document["kind"] == MERGED
    title = "Verification of rollout and replay"
    body = [
        f"<h1>{title}</h1>",
        f"<p class=lead>{_claim(document)} · contract <code>{_cut(document['contract']['digest'])}"
        f"</code> · artifact <code>{_cut(document['digest'])}</code> · "
        f"{_text(document['provenance']['created'])}</p>",
        _verdict(found),
        "<h2>Log-probabilities of the sampled tokens</h2>",
        _totals(found),
    ]
    if not merged:
        body += [
            _training(document.get("notes", {})),
            _mismatch_chart(document),
            _spread_chart(path, document),
            _first_mismatches(document),
            "<h2>Rounds</h2>",
            _rounds(document),
            "<h2>Weight updates</h2>",
            _refits(document),
            "<h2>Processes</h2>",
            _attestations(document),
        ]
    else:
        body += ["<h2>Runs</h2>", _runs(document)]
    body += [
        _unreviewed(found),
        "<h2>Contract</h2>",
        _details("content", json.dumps(document["contract"]["content"], indent=1)),
        "<h2>Run it again</h2>",
        f"<pre>{_text(' '.join(document['provenance']['command']))}</pre>",
        _provenance(document["provenance"]),
    ]
    if document.get("notes"):
        body.append(_details("notes", json.dumps(document["notes"], indent=1)))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style><body>{''.join(body)}</body></html>\n"
    )


def _text(value: Any) -> str:
    return escape(str(value))


def _cut(digest: str) -> str:
    return _text(digest[:16])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numeric: Iterable[int] = ()) -> str:
    """Cells are finished HTML; a cell may carry its class as ``class|html``."""
    numbers = set(numeric)
    made = "".join(
        f"<th{' class=n' if i in numbers else ''}>{_text(h)}</th>" for i, h in enumerate(head)
    )
    lines = []
    for row in rows:
        cells = []
        for i, cell in enumerate(row):
            mood, bar, html = cell.partition("|")
            if not bar or mood not in ("good", "bad", ""):
                mood, html = "", cell
            classes = " ".join(c for c in (mood, "n" if i in numbers else "") if c)
            cells.append(f'<td class="{classes}">{html}</td>' if classes else f"<td>{html}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<div class=scroll><table><tr>{made}</tr>{''.join(lines)}</table></div>"


def _claim(document: Mapping[str, Any]) -> str:
    content = document["contract"]["content"]
    profile = content.get("profile", {})
    head = profile.get("profile", profile) if isinstance(profile, dict) else {}
    name = head.get("name") if isinstance(head, dict) else profile
    backend = content.get("all2all_backend")
    exchange = f" · all-to-all backend <code>{_text(backend)}</code>" if backend else ""
    return (f"profile {_text(name)}" if name else "no profile named") + exchange


def _verdict(found: Verified) -> str:
    clean = found.exact and not found.unreviewed and ";" not in found.verdict
    mood = "good" if clean else "" if found.exact else "bad"
    return f'<p class="verdict {mood}">{_text(found.verdict)}</p>'


def _totals(found: Verified) -> str:
    rows = []
    for phase, comparisons in found.totals.items():
        for name in (*REQUIRED, BASELINE):
            if (m := comparisons.get(name)) is None:
                continue
            mood = "good" if m["mismatch_count"] == 0 else "bad"
            rows.append(
                [
                    _text(phase),
                    _text(f"rollout = {name}" + (" (unpatched)" if name == BASELINE else "")),
                    f"{m['token_count']:,}",
                    f"{mood}|{m['mismatch_count']:,}",
                    f"{m['max_absdiff']:.3e}",
                    f"{m['k3_mean']:.3e}",
                    f"{m['k3_max']:.3e}",
                ]
            )
    head = ["phase", "comparison", "tokens", "mismatches", "max |difference|", "k3 mean", "k3 max"]
    return _table(head, rows, numeric=range(2, 7))


def _all_rounds(document: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(p, r) for p in PHASES for r in document["phases"][p]["rounds"]]


def _training(notes: Mapping[str, Any]) -> str:
    """What a training loop noted about itself: its curves, and what the gate cost it."""
    try:
        return _curves_and_cost(notes)
    except (KeyError, TypeError, ValueError, AttributeError):
        # Notes are part of no claim, and anybody's: they never cost the reader the page.
        return (
            "<h2>Training</h2><p>The notes on training have another form than this version "
            "draws; they stand below, as they are.</p>"
        )


def _curves_and_cost(notes: Mapping[str, Any]) -> str:
    parts = []
    if curves := notes.get("curves"):
        parts.append(
            "<h2>Training, by policy version</h2><p class=lead>This run (green) and, where it "
            "was run, the same loop with the unpatched pair (red).</p>"
        )
        parts.append(render_curves(curves))
    if cost := notes.get("gate_cost"):
        stages = [[_text(k.replace("_", " ")), f"{v:.3f}"] for k, v in cost["stages_s"].items()]
        parts.append(
            "<h2>What the proof costs</h2>"
            f"<p>A round takes {cost['with_s']:.2f} s with recompute, gate and receipts and "
            f"{cost['without_s']:.2f} s without: × {cost['ratio']:.2f} (medians of "
            f"{cost['pairs']} each, by turns, after the run); by the clocks of the run's own "
            f"stages × {cost['ratio_by_stages']:.2f}. Both take the exact path. Median "
            "seconds per stage, what the trainer's ranks did being part of the step:</p>"
        )
        parts.append(_table(["stage", "s"], stages, numeric=(1,)))
    return "".join(parts)


def _mismatch_chart(document: Mapping[str, Any]) -> str:
    """Share of tokens that differ, per policy version, exact beside stock."""
    rounds = _all_rounds(document)
    if not rounds:
        return ""
    width, height, left, bottom = 900, 190, 42, 26
    step = (width - left) / len(rounds)
    bar = min(step * 0.35, 40)
    plot = height - bottom - 8
    parts = [_axis(left, width, height, bottom)]
    for label, y in (("100 %", 8), ("50 %", 8 + plot / 2), ("0 %", 8 + plot)):
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{label}</text>')
    for i, (_, r) in enumerate(rounds):
        x = left + (i + 0.5) * step
        exact = max(
            r["comparisons"][n]["mismatch_count"] / max(r["comparisons"][n]["token_count"], 1)
            for n in REQUIRED
        )
        shares = [("exact", x - bar, exact)]
        if BASELINE in r["comparisons"]:
            m = r["comparisons"][BASELINE]
            shares.append(("stock", x, m["mismatch_count"] / max(m["token_count"], 1)))
        for kind, at, share in shares:
            # A zero stays visible, as a line on the axis.
            tall = max(share * plot, 1.5)
            parts.append(
                f'<rect class="{kind}" x="{at:.1f}" y="{8 + plot - tall:.1f}" '
                f'width="{bar:.1f}" height="{tall:.1f}"><title>{kind}, version {r["version"]}: '
                f"{share:.2%}</title></rect>"
            )
        if len(rounds) <= 24 or i % (len(rounds) // 12) == 0:
            parts.append(
                f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle">{r["version"]}</text>'
            )
    return _figure(
        width,
        height,
        parts,
        "Tokens whose log-probability differs from the replay, by policy version: "
        "the exact path (green) and the unpatched pair on the same tokens (red).",
    )


def _spread_chart(path: Path, document: Mapping[str, Any]) -> str:
    """Histogram of the unpatched pair's absolute differences, by powers of ten."""
    arrays = read_sidecar(path.parent, document["sidecar"])
    counts: dict[int, int] = {}
    zero = total = 0
    for _, r in _all_rounds(document):
        stock = arrays.get(f"{r['arrays']}/{BASELINE}")
        if stock is None:
            continue
        reference = arrays.get(f"{r['arrays']}/{BASELINE_ROLLOUT}")
        if reference is None:
            reference = arrays[f"{r['arrays']}/rollout"]
        for a, b in zip(reference, stock, strict=True):
            d = abs(a - b)
            total += 1
            if d == 0:
                zero += 1
            elif math.isfinite(d):
                # Thirds of a decade.
                bucket = math.floor(3 * math.log10(d))
                counts[bucket] = counts.get(bucket, 0) + 1
    if not counts:
        return ""
    width, height, left, bottom = 900, 170, 42, 26
    low, high = min(counts), max(counts)
    step = (width - left) / (high - low + 1)
    most = max(counts.values())
    plot = height - bottom - 8
    parts = [_axis(left, width, height, bottom)]
    parts.append(f'<text x="{left - 6}" y="14" text-anchor="end">{most:,}</text>')
    for bucket in range(low, high + 1):
        n = counts.get(bucket, 0)
        x, tall = left + (bucket - low) * step, n / most * plot
        parts.append(
            f'<rect class="stock" x="{x + 0.5:.1f}" y="{8 + plot - tall:.1f}" '
            f'width="{max(step - 1, 1):.1f}" height="{tall:.1f}"><title>{n:,} tokens</title></rect>'
        )
        if bucket % 3 == 0:
            parts.append(f'<text x="{x:.1f}" y="{height - 8}">1e{bucket // 3}</text>')
    return _figure(
        width,
        height,
        parts,
        f"|rollout − replay| of the unpatched pair: {total - zero:,} of {total:,} tokens differ.",
    )


def _axis(left: int, width: int, height: int, bottom: int) -> str:
    y = height - bottom
    return f'<line class="axis" x1="{left}" y1="{y}" x2="{width}" y2="{y}"/>'


def _figure(width: int, height: int, parts: Sequence[str], caption: str) -> str:
    label = escape(caption, quote=True)
    return (
        f'<figure><div class=scroll><svg viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{label}">'
        f"{''.join(parts)}</svg></div><figcaption>{_text(caption)}</figcaption></figure>"
    )


def _first_mismatches(document: Mapping[str, Any]) -> str:
    rows = [
        [
            _text(f"{phase}, version {r['version']}"),
            _text(name),
            str(m["sequence"]),
            str(m["position"]),
            str(m["token_id"]),
            f"<code>{_text(m['rollout_bits'])}</code>",
            f"<code>{_text(m['replay_bits'])}</code>",
        ]
        for phase, r in _all_rounds(document)
        for name in REQUIRED
        for m in r["comparisons"][name]["first_mismatches"]
    ]
    if not rows:
        return ""
    head = ["where", "comparison", "sequence", "position", "token", "rollout", "replay"]
    return "<h2>First mismatches</h2>" + _table(head, rows[:40], numeric=(2, 3, 4))


def _rounds(document: Mapping[str, Any]) -> str:
    rows = []
    for phase, r in _all_rounds(document):
        # What is nested stays in the artifact; a cell has room for figures only.
        notes = ", ".join(
            f"{k} {_short(v)}" for k, v in r["notes"].items() if not isinstance(v, dict | list)
        )
        rows.append(
            [
                _text(phase),
                str(r["version"]),
                str(len(r["start_versions"])),
                f"{r['comparisons']['recompute']['token_count']:,}",
                _text(notes),
            ]
        )
    return _table(["phase", "version", "sequences", "tokens", "notes"], rows, numeric=(1, 2, 3))


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _refits(document: Mapping[str, Any]) -> str:
    rows = []
    for r in document["refits"]:
        mood = "bad" if r["violations"] else "good"
        state = f"{len(r['violations'])} differences" if r["violations"] else "agree"
        if r["mode"] == "off":
            mood, state = "", "not made"
        seconds = r["seconds"]
        rows.append(
            [
                str(r["version"]),
                "adopted" if r["previous"] is None else f"from {r['previous']}",
                _text(r["mode"]),
                f"{mood}|{state}",
                str(len(r["workers"])),
                str(len(r["trainer"]["parameters"]) if r["trainer"] else 0),
                _text(r["caches"]),
                f"{sum(seconds.values()):.3f}",
                _text(", ".join(f"{k} {v:.3f}" for k, v in seconds.items())),
            ]
        )
    head = ["version", "", "receipts", "result", "workers", "parameters", "caches", "s", "stages"]
    return _table(head, rows, numeric=(0, 4, 5, 7))


def _attestations(document: Mapping[str, Any]) -> str:
    if not document["attestations"]:
        return "<p>No process attested what was installed in it.</p>"
    rows = [
        [
            _text(f"{a['role']} {a['rank']}"),
            str(a["pid"]),
            _text(a["host"]),
            _text(a["adapter"]),
            ("good|" if a["state"] == "active" else "bad|") + _text(a["state"]),
            f"<code>{_cut(a['manifest_digest'])}</code>",
            str(len(a["manifest"].get("patches", ()))),
        ]
        for a in document["attestations"]
    ]
    head = ["process", "pid", "host", "adapter", "state", "manifest", "patches"]
    return _table(head, rows, numeric=(1, 6))


def _runs(document: Mapping[str, Any]) -> str:
    return _table(
        ["run", "created", "verdict", "digest"],
        [
            [
                _text(r["file"]),
                _text(r["created"]),
                _text(r["verdict"]),
                f"<code>{_cut(r['digest'])}</code>",
            ]
            for r in document["runs"]
        ],
    )


def _unreviewed(found: Verified) -> str:
    if not found.unreviewed:
        return ""
    items = "".join(f"<li><code>{_text(s)}</code></li>" for s in found.unreviewed)
    return f"<h2>UNREVIEWED: accepted for this run without review</h2><ul>{items}</ul>"


def _provenance(p: Mapping[str, Any]) -> str:
    facts = {"python": p["python"], **p["packages"], **p["hardware"]}
    rows = [[_text(k), _text(v)] for k, v in facts.items()]
    variables = "\n".join(f"{k}={v}" for k, v in p["environment"].items())
    return _table(["", ""], rows) + _details("environment", variables)


def _details(label: str, content: str) -> str:
    return f"<details><summary>{_text(label)}</summary><pre>{_text(content)}</pre></details>"
