"""``patchkit matrix``: which versions an adapter is ready for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchkit.cli._refusal import refuse
from patchkit.errors import PatchkitError

if TYPE_CHECKING:
    from patchkit.cli._readiness import Readiness

app = typer.Typer(add_completion=False)

_BEGIN = "<!-- patchkit matrix {name}: begin (generated) -->"
_END = "<!-- patchkit matrix {name}: end -->"


@app.command()
def matrix(
    adapter: Annotated[str, typer.Argument(help="The adapter.")],
    package: Annotated[
        list[str] | None, typer.Option("--package", "-p", help="Only this one; repeatable.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="The adapter's profile; its default one otherwise.")
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(help="SYMBOL=DIGEST: let one drifted symbol pass, unreviewed; repeatable."),
    ] = None,
    reasons: Annotated[bool, typer.Option("--reasons", help="Every verdict, not a summary.")] = (
        False
    ),
    markdown: Annotated[bool, typer.Option("--markdown", help="The summary for a README.")] = False,
    write: Annotated[
        Path | None, typer.Option(help="Write the summary into this file, between its markers.")
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="Exit 1 where this file's summary is not current.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """The verdict for every known version: ready, review or broken, and why.

    Exit 0: some version of every package is ready. Exit 1: of some package none is.
    """
    try:
        from patchkit.cli._marked import is_current, write_between
        from patchkit.cli._readiness import readiness
        from patchkit.cli._requirements import accepted

        rows = readiness(adapter, package or [], profile, accepted(accept or []))
        begin, end = _BEGIN.format(name=adapter), _END.format(name=adapter)
        text = summary(adapter, rows)
        if write is not None:
            write_between(write, begin, end, text)
        if check is not None and not is_current(check, begin, end, text):
            told = f"{check}: not current; run `patchkit matrix {adapter} --write {check}`"
            refuse(told, as_json, code=1)
    except PatchkitError as error:
        refuse(error, as_json)
    if as_json:
        print(
            json.dumps({"schema": 1, "adapter": adapter, "versions": [r.as_dict() for r in rows]})
        )
    elif markdown:
        print(f"{begin}{text}{end}")
    elif write is None and check is None:
        _show(rows, reasons)
    ready = {r.package for r in rows if r.state.value == "ready"}
    raise typer.Exit(int({r.package for r in rows} != ready))


def summary(adapter: str, rows: list[Readiness]) -> str:
    """The table that stands in a README, between its markers."""
    lines = ["", "", "| package | ready | review | broken |", "| --- | --- | --- | --- |"]
    for package in dict.fromkeys(r.package for r in rows):
        cells = []
        for state in ("ready", "review", "broken"):
            found = [
                r.version + (" *(unreviewed)*" if r.unreviewed else "")
                for r in rows
                if r.package == package and r.state.value == state
            ]
            cells.append(", ".join(found) or "–")
        lines.append(f"| {package} | {' | '.join(cells)} |")
    lines += [
        "",
        f"Static review of `{adapter}` against stored manifests; "
        f"`patchkit matrix {adapter} --reasons` says why.",
        "",
        "",
    ]
    return "\n".join(lines)


def _show(rows: list[Readiness], reasons: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    from patchkit.cli._tables import STATE_COLOURS, console, verdict_table
    from patchkit.symbols.drift import State

    out = console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("package", "version", "verdict", "why"):
        table.add_column(column, overflow="fold")
    for row in rows:
        state = Text(row.state.value, style=STATE_COLOURS[row.state])
        if row.unreviewed:
            state.append(" unreviewed", style="bold yellow")
        table.add_row(row.package, row.version, state, Text(row.reason))
    out.print(table)
    if reasons:
        for row in rows:
            shown = [v for v in row.verdicts if v.state is not State.SKIPPED]
            if shown and row.state is not State.READY:
                out.print()
                out.print(Text(f"{row.package} {row.version}", "bold"))
                out.print(verdict_table(shown))
