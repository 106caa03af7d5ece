"""``patchkit audit``: what a project patches, and what the next upgrade does to it."""

from __future__ import annotations

import gc
import json
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchkit.cli._refusal import refuse
from patchkit.errors import PatchkitError

if TYPE_CHECKING:
    from rich.console import Console

    from patchkit.audit import Finding, Report

app = typer.Typer(add_completion=False)

_COLOURS = {"error": "bold red", "warning": "yellow", "note": "dim"}


class Format(str, Enum):
    """How the answer is written."""

    table = "table"
    json = "json"
    markdown = "markdown"
    sarif = "sarif"
    github = "github"


@app.command()
def audit(
    path: Annotated[Path, typer.Argument(help="The project's folder, or one file.")],
    package: Annotated[
        list[str] | None,
        typer.Option("--package", "-p", help="Only patches of this package; repeatable."),
    ] = None,
    installed: Annotated[
        bool,
        typer.Option(
            "--installed", help="Judge against what is installed, too (alone: the default)."
        ),
    ] = False,
    against: Annotated[
        list[str] | None,
        typer.Option(help="vllm@0.33.0, a wheel, a folder or a manifest; repeatable."),
    ] = None,
    old: Annotated[
        str | None, typer.Option("--from", help="The version the patches were written for.")
    ] = None,
    new: Annotated[str | None, typer.Option("--to", help="The version asked about.")] = None,
    output: Annotated[Format, typer.Option("--format", "-f", help="How it is written.")] = (
        Format.table
    ),
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    include_tests: Annotated[
        bool, typer.Option("--include-tests", help="Look at test files, too.")
    ] = False,
    baseline: Annotated[
        Path | None, typer.Option(help="Fail only on what this file does not list.")
    ] = None,
    write_baseline: Annotated[
        Path | None, typer.Option(help="Write what was found to this file, and exit 0.")
    ] = None,
    diffs: Annotated[
        bool, typer.Option("--diff", help="Show what changed in the originals.")
    ] = False,
    manifests: Annotated[
        list[Path] | None, typer.Option(help="Further folders of manifests; repeatable.")
    ] = None,
) -> None:
    """Find what a project patches and judge each patch at the versions asked about.

    Exit 0: every patch is fine, or known from the baseline. Exit 1: one is not.
    Exit 2: the question was wrong.
    """
    output = Format.json if as_json else output
    gc.disable()  # this process ends with the answer
    try:
        report = _report(
            path, package, installed, against, old, new, include_tests, baseline, manifests
        )
        if write_baseline is not None:
            from patchkit.audit._baseline import write_baseline as write

            count = write(report, write_baseline)
            print(f"{write_baseline}: {count} known findings", file=sys.stderr)
    except PatchkitError as error:
        refuse(error, output is Format.json)
    _print(report, output, diffs)
    raise typer.Exit(1 if report.new and write_baseline is None else 0)


def _report(
    path: Path,
    packages: list[str] | None,
    installed: bool,
    against: list[str] | None,
    old: str | None,
    new: str | None,
    include_tests: bool,
    baseline: Path | None,
    manifests: list[Path] | None,
) -> Report:
    from patchkit.audit import audit as run
    from patchkit.audit._baseline import read_baseline

    return run(
        path,
        packages=packages or (),
        installed=installed,
        against=against or (),
        old=old,
        new=new,
        include_tests=include_tests,
        manifests=manifests or (),
        baseline=read_baseline(baseline) if baseline is not None else (),
    )


def _print(report: Report, output: Format, diffs: bool) -> None:
    from patchkit.audit import _reports

    if output is Format.json:
        print(json.dumps(report.as_dict(), indent=1, default=str))
    elif output is Format.markdown:
        print(_reports.as_markdown(report))
    elif output is Format.sarif:
        print(json.dumps(_reports.as_sarif(report), indent=1))
    elif output is Format.github:
        text = _reports.as_github(report)
        if text:
            print(text)
    else:
        _table(report, diffs)


def _table(report: Report, diffs: bool) -> None:
    from rich.text import Text

    from patchkit.audit._reports import grouped, summary_line
    from patchkit.cli._tables import console

    out = console()
    for name, findings in grouped(report):
        out.print(Text(name, style="bold"))
        for finding in findings:
            _show(out, finding, diffs, known=bool(report.baseline) and not report.is_new(finding))
    if report.doors:
        out.print(Text("entry points of workers", style="bold"))
        for door in report.doors:
            out.print(Text(f"  {door.group}: {door.target}  {door.place}"))
    if report.blind_spots:
        out.print(Text("not seen", style="bold"))
        for spot in report.blind_spots:
            out.print(Text(f"  {spot.place}: {spot.reason}"))
            out.print(Text(f"    {spot.text}", style="dim"))
    for file, why in report.unreadable.items():
        out.print(Text(f"not readable: {file}: {why}", style="yellow"))
    tests = f", {report.skipped_tests} test files left out" if report.skipped_tests else ""
    out.print(Text(summary_line(report), style="bold"))
    for hint in report.hints:
        out.print(Text(hint, style="dim"))
    out.print(Text(f"{report.files} files in {report.seconds:.1f} s{tests}", style="dim"))


def _show(out: Console, finding: Finding, diffs: bool, *, known: bool) -> None:
    from rich.text import Text

    from patchkit.audit._reports import remarks

    what = finding.identity.partition(":")[2] or finding.identity
    head = Text("  ")
    head.append(what, style="cyan")
    arrow = f" <- {finding.replacement}" if finding.replacement else ""
    head.append(f"  {finding.action} ({finding.form}){arrow}  ")
    head.append(str(finding.place), style="dim")
    out.print(head)
    for verdict in finding.verdicts:
        level = verdict.level or verdict.kind.level
        fine = verdict.kind.survives
        line = Text("    ")
        line.append(f"{verdict.version}: ")
        line.append(verdict.kind.sentence, style="green" if fine else _COLOURS[level])
        if verdict.text:
            line.append(f": {verdict.text}")
        if verdict.confidence < 1.0:
            line.append(f" (confidence {verdict.confidence:.2f})", style="dim")
        if known and level != "note":
            line.append(" [known]", style="dim")
        out.print(line)
        for text in verdict.also:
            out.print(Text(f"      {text}", style="dim"))
        if verdict.alias_sites:
            shown = ", ".join(verdict.alias_sites[:6])
            more = len(verdict.alias_sites) - 6
            tail = f" and {more} more" if more > 0 else ""
            out.print(Text(f"      does not reach: {shown}{tail}", style="yellow"))
        if diffs and verdict.diff:
            for row in verdict.diff:
                style = {"+": "green", "-": "red"}.get(row[:1], "dim")
                out.print(Text(f"      {row}", style=style))
    for text in remarks(finding):
        out.print(Text(f"    {text}", style="dim"))
