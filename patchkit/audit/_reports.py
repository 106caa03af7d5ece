"""One report, in several styles: JSON, Markdown, SARIF, GitHub annotations."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from patchkit.audit._findings import NOTHING_AT_HAND, Finding, Report, Verdict, VerdictKind

_GITHUB = {"error": "error", "warning": "warning", "note": "notice"}


def target_file(finding: Finding) -> str:
    """What findings are grouped by: the module, or the file, that is patched."""
    return finding.target.partition(":")[0]


def grouped(report: Report) -> Iterator[tuple[str, list[Finding]]]:
    """The findings by target file."""
    for name, findings in groupby(report.findings, key=target_file):
        yield name, list(findings)


def summary_line(report: Report) -> str:
    """How many of how many survive, and how many were not judged, in one line."""
    parts = []
    elsewhere = 0
    for version, counts in report.summary().items():
        fine, judged = report.survivors(version)
        unjudged = report.unjudged(version)
        if version.endswith(NOTHING_AT_HAND):
            elsewhere += unjudged
            continue
        if not judged:
            parts.append(f"none of {unjudged} judged at {version}")
            continue
        rest = [
            f"{n} {VerdictKind(kind).sentence}"
            for kind, n in sorted(counts.items(), key=lambda item: -item[1])
            if kind not in (VerdictKind.FINE.value, VerdictKind.UNKNOWN.value)
        ]
        text = f"{fine} of {judged} survive {version}"
        text += f" ({', '.join(rest)})" if rest else ""
        text += f", {unjudged} more not judged" if unjudged else ""
        parts.append(text)
    if elsewhere:
        parts.append(f"{elsewhere} of other packages not judged")
    if not parts:
        parts.append("no patches")
    if report.blind_spots:
        count = len(report.blind_spots)
        parts.append(f"{count} place{'s' * (count > 1)} could not be followed")
    return "; ".join(parts)


def sentence(finding: Finding, verdict: Verdict) -> str:
    """One verdict in one sentence."""
    text = f"{finding.identity}: {verdict.kind.sentence} at {verdict.version}"
    if verdict.text:
        text += f": {verdict.text}"
    if verdict.new_symbol and verdict.new_symbol not in verdict.text:
        text += f" (now {verdict.new_symbol})"
    if verdict.confidence < 1.0:
        text += f" (confidence {verdict.confidence:.2f})"
    return text


def as_markdown(report: Report) -> str:
    """The report for a pull request."""
    labels = _labels(report)
    lines = [f"## Patches in `{report.root}`", "", summary_line(report), ""]
    lines += [line for hint in report.hints for line in (f"- {hint}", "")]
    for name, findings in grouped(report):
        lines += [f"### `{name}`", ""]
        lines.append("| patch | where | " + " | ".join(labels) + " |")
        lines.append("| --- | --- |" + " --- |" * len(labels))
        for finding in findings:
            by_version = {v.version: v for v in finding.verdicts}
            cells = [_cell_of(by_version.get(label)) for label in labels]
            what = finding.identity.partition(":")[2] or finding.identity
            extra = "".join(f"<br>{text}" for text in _remarks(finding))
            lines.append(
                f"| `{_cell(what)}` ({finding.action}){_cell(extra)} | {finding.place} | "
                + " | ".join(cells)
                + " |"
            )
        lines.append("")
    for finding in report.findings:
        for verdict in finding.verdicts:
            if verdict.diff:
                lines += [
                    f"<details><summary><code>{finding.identity}</code>, {verdict.version}: "
                    "the original's changes</summary>",
                    "", "```diff", *verdict.diff, "```", "", "</details>", "",
                ]  # fmt: skip
    if report.doors:
        lines += ["### Entry points of workers", ""]
        lines += [f"- {d.group} `{d.target}` ({d.place})" for d in report.doors]
        lines.append("")
    if report.blind_spots:
        lines += ["### Not seen", ""]
        lines += [f"- {b.place}: {b.reason} (`{_cell(b.text)}`)" for b in report.blind_spots]
        lines.append("")
    if report.unreadable:
        lines += ["### Not readable", ""]
        lines += [f"- `{file}`: {why}" for file, why in report.unreadable.items()]
        lines.append("")
    return "\n".join(lines)


def _remarks(finding: Finding) -> Iterator[str]:
    if finding.conditions:
        yield "when " + " and ".join(finding.conditions)
    if finding.also_patched:
        yield "also patched at " + ", ".join(finding.also_patched)
    if finding.workers:
        yield "runs in workers through " + ", ".join(finding.workers)


def remarks(finding: Finding) -> list[str]:
    """What else there is to know about a patch."""
    return list(_remarks(finding))


def _labels(report: Report) -> list[str]:
    labels: dict[str, None] = {}
    for finding in report.findings:
        for verdict in finding.verdicts:
            labels.setdefault(verdict.version)
    return list(labels)


def _cell_of(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    if verdict.kind is VerdictKind.FINE:
        return "fine" + (f": {_cell(verdict.text)}" if verdict.text else "")
    return f"**{verdict.kind.sentence}**: {_cell(verdict.text)}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def as_github(report: Report) -> str:
    """Annotations that GitHub shows beside the lines of a pull request."""
    lines = []
    for finding in report.findings:
        if not report.is_new(finding):
            continue
        for verdict in finding.verdicts:
            level = verdict.level or verdict.kind.level
            if level == "note":
                continue
            title = f"patchkit audit: {verdict.kind.sentence}"
            lines.append(
                f"::{_GITHUB[level]} file={_property(finding.place.file)},"
                f"line={finding.place.line},title={_property(title)}"
                f"::{_message(sentence(finding, verdict))}"
            )
    for spot in report.blind_spots:
        lines.append(
            f"::notice file={_property(spot.place.file)},line={spot.place.line},"
            f"title=patchkit audit%3A not seen::{_message(spot.reason)}"
        )
    return "\n".join(lines)


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")


def as_sarif(report: Report) -> dict[str, Any]:
    """SARIF 2.1.0, for code scanning."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        own = version("patchkit")
    except PackageNotFoundError:
        own = "0"
    results = []
    for finding in report.findings:
        for verdict in finding.verdicts:
            level = verdict.level or verdict.kind.level
            if verdict.kind is VerdictKind.FINE:
                continue
            results.append(
                {
                    "ruleId": f"patchkit-audit/{verdict.kind}",
                    "level": level,
                    "message": {"text": sentence(finding, verdict)},
                    "locations": [
                        {
                            "physicalLocation": {
                                "artifactLocation": {
                                    "uri": finding.place.file,
                                    "uriBaseId": "PROJECT",
                                },
                                "region": {"startLine": max(finding.place.line, 1)},
                            },
                            "logicalLocations": [{"fullyQualifiedName": finding.target}],
                        }
                    ],
                    "partialFingerprints": {"patch/v1": f"{finding.fingerprint}:{verdict.kind}"},
                    "baselineState": "new" if report.is_new(finding) else "unchanged",
                    "properties": {
                        "version": verdict.version,
                        "confidence": verdict.confidence,
                        "new_symbol": verdict.new_symbol,
                    },
                }
            )
    rules = [
        {
            "id": f"patchkit-audit/{kind}",
            "name": kind.name.title().replace("_", ""),
            "shortDescription": {"text": kind.sentence},
            "defaultConfiguration": {"level": kind.level},
        }
        for kind in VerdictKind
        if kind is not VerdictKind.FINE
    ]
    driver = {"name": "patchkit audit", "version": own, "rules": rules}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }
