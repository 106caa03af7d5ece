"""One drift in several styles: JSON, Markdown, SARIF, GitHub annotations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from patchkit.symbols._compare import Kind
from patchkit.symbols._drift import Drift, Finding
from patchkit.symbols._verdict import State, Verdict

DIFF_SCHEMA = 1
_LEVELS = {
    Kind.REMOVED: "error",
    Kind.MOVED: "warning",
    Kind.RENAMED: "warning",
    Kind.SIGNATURE_BREAKING: "error",
    Kind.SIGNATURE_COMPATIBLE: "note",
    Kind.BODY_ONLY: "note",
}
_STATE_LEVELS = {State.BROKEN: "error", State.MOVED: "error", State.REVIEW: "warning"}


def one_line(finding: Finding) -> str:
    """What happened to a symbol, as one sentence without its name."""
    if finding.new_symbol is not None:
        also = f", {finding.also}" if finding.also else ""
        return f"→ {finding.new_symbol} ({finding.confidence:.2f}: {finding.evidence}{also})"
    if finding.kind is Kind.REMOVED:
        return finding.evidence
    texts = [c.text for c in finding.changes if c.kind is not Kind.UNCHANGED]
    for name, (before, now) in finding.selectors.items():
        texts.append(f"{name}: {before or '(not read)'} → {now or '(not read)'}")
    noise = len(finding.noise)
    if noise:
        texts.append(f"(and {noise} annotation{'s' * (noise > 1)})")
    return "; ".join(texts)


def as_json(
    drift: Drift,
    verdicts: Sequence[Verdict] = (),
    *,
    adapter: str | None = None,
    seconds: float | None = None,
) -> dict[str, Any]:
    """The object that ``--json`` prints; ``docs/diff.md`` describes it."""
    unreviewed = sorted({v.requirement.symbol for v in verdicts if v.unreviewed})
    return {
        "schema": DIFF_SCHEMA,
        "package": drift.package,
        "old": drift.old,
        "new": drift.new,
        "adapter": adapter,
        "summary": drift.count(),
        "unreviewed": unreviewed,
        "findings": [f.as_dict() for f in drift.findings],
        "verdicts": [v.as_dict() for v in verdicts],
        "only_new": list(drift.only_new),
        "unknown": dict(drift.unknown),
        "unreadable": dict(drift.unreadable),
        "seconds": seconds,
    }


def as_markdown(
    drift: Drift, verdicts: Sequence[Verdict] = (), *, adapter: str | None = None
) -> str:
    """A comment for a pull request."""
    title = f"## {drift.old} → {drift.new}" + (f" for adapter `{adapter}`" if adapter else "")
    counts = ", ".join(f"{n} {kind}" for kind, n in drift.count().items() if n)
    lines = [title, "", counts or "nothing compared", ""]
    lines += _unreviewed_lines(verdicts)
    changed = [f for f in drift.findings if f.kind is not Kind.UNCHANGED]
    if changed:
        lines += ["| symbol | kind | what |", "| --- | --- | --- |"]
        lines += [f"| `{f.symbol}` | {f.kind} | {_cell(one_line(f))} |" for f in changed]
        lines.append("")
    shown = [v for v in verdicts if v.state is not State.SKIPPED]
    if shown:
        lines += ["| needed by the adapter | verdict | reason |", "| --- | --- | --- |"]
        lines += [
            f"| `{v.requirement.symbol}` ({v.requirement.role}) | {_state(v)} | {_cell(v.reason)} |"
            for v in shown
        ]
        lines.append("")
    for title, entries in (("Not answered", drift.unknown), ("Not readable", drift.unreadable)):
        if entries:
            lines += [f"{title}:", "", *(f"- `{k}`: {v}" for k, v in entries.items()), ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _state(verdict: Verdict) -> str:
    return f"**{verdict.state}**" + (" *unreviewed*" if verdict.unreviewed else "")


def _unreviewed_lines(verdicts: Sequence[Verdict]) -> list[str]:
    names = sorted({v.requirement.symbol for v in verdicts if v.unreviewed})
    if not names:
        return []
    listing = ", ".join(f"`{n}`" for n in names)
    return [f"**unreviewed**: accepted for this run only, by digest: {listing}", ""]


def as_sarif(drift: Drift, verdicts: Sequence[Verdict] = ()) -> dict[str, Any]:
    """SARIF 2.1.0, for code scanning."""
    from importlib.metadata import version

    results = []
    by_symbol = {v.requirement.symbol: v for v in verdicts if v.state is not State.SKIPPED}
    for finding in drift.findings:
        if finding.kind is Kind.UNCHANGED:
            continue
        verdict = by_symbol.get(finding.symbol)
        level = _LEVELS[finding.kind]
        text = f"{finding.symbol}: {finding.kind}. {one_line(finding)}"
        properties: dict[str, Any] = {"old": drift.old, "new": drift.new}
        if verdict is not None:
            level = _STATE_LEVELS.get(verdict.state, "note")
            text += f" [{verdict.state}{', unreviewed' * verdict.unreviewed}: {verdict.reason}]"
            properties |= {"verdict": verdict.state.value, "unreviewed": verdict.unreviewed}
        facts = finding.new or finding.old
        results.append(
            {
                "ruleId": f"patchkit/{finding.kind}",
                "level": level,
                "message": {"text": text},
                "locations": [
                    {
                        "physicalLocation": {
                            "artifactLocation": {"uri": facts.file, "uriBaseId": "SITEPACKAGES"},
                            "region": {"startLine": max(facts.line, 1)},
                        },
                        "logicalLocations": [{"fullyQualifiedName": finding.symbol}],
                    }
                ],
                "partialFingerprints": {"symbol/v1": f"{finding.symbol}:{finding.kind}"},
                "properties": properties,
            }
        )
    rules = [
        {"id": f"patchkit/{kind}", "name": kind.name.title().replace("_", "")} for kind in _LEVELS
    ]
    driver = {"name": "patchkit diff", "version": version("patchkit"), "rules": rules}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }


def as_github(drift: Drift, verdicts: Sequence[Verdict] = (), *, file: str = "") -> list[str]:
    """Workflow commands, one line per finding, that annotate a run."""
    lines = []
    by_symbol = {v.requirement.symbol: v for v in verdicts if v.state is not State.SKIPPED}
    words = {"error": "error", "warning": "warning", "note": "notice"}
    for finding in drift.findings:
        if finding.kind is Kind.UNCHANGED:
            continue
        verdict = by_symbol.get(finding.symbol)
        word = words[_STATE_LEVELS.get(verdict.state, "note") if verdict else _LEVELS[finding.kind]]
        text = f"{finding.symbol}: {one_line(finding)}"
        if verdict is not None:
            text += f" [{verdict.state}{', unreviewed' * verdict.unreviewed}: {verdict.reason}]"
        place = f"file={_property(file)}," if file else ""
        title = _property(f"{finding.kind} in {drift.new}")
        lines.append(f"::{word} {place}title={title}::{_data(text)}")
    for symbol, reason in drift.unknown.items():
        lines.append(f"::warning title=not answered::{_data(f'{symbol}: {reason}')}")
    return lines


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
