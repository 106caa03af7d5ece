"""Drift and verdicts as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from patchkit.symbols.drift import Drift, Kind, State, Verdict, one_line

if TYPE_CHECKING:
    from rich.console import RenderableType

_COLOURS = {
    Kind.REMOVED: "bold red",
    Kind.MOVED: "magenta",
    Kind.RENAMED: "magenta",
    Kind.SIGNATURE_BREAKING: "red",
    Kind.SIGNATURE_COMPATIBLE: "yellow",
    Kind.BODY_ONLY: "yellow",
    Kind.UNCHANGED: "green",
}
STATE_COLOURS = {
    State.READY: "green",
    State.REVIEW: "yellow",
    State.MOVED: "magenta",
    State.BROKEN: "bold red",
    State.SKIPPED: "dim",
}


def console() -> Console:
    """The terminal; where there is none, wide enough that symbols are not cut."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=200)


def show_drift(
    drift: Drift,
    verdicts: Sequence[Verdict],
    *,
    adapter: str | None,
    show_unchanged: bool,
    seconds: float,
) -> None:
    """The answer of ``patchkit diff`` as a table."""
    out = console()
    counts = ", ".join(f"{n} {kind}" for kind, n in drift.count().items() if n)
    shown = [f for f in drift.findings if show_unchanged or f.kind is not Kind.UNCHANGED]
    if shown:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("kind", "symbol", "what"):
            table.add_column(column, overflow="fold")
        for finding in shown:
            table.add_row(
                Text(finding.kind.value, style=_COLOURS[finding.kind]),
                Text(finding.symbol),
                Text(one_line(finding)),
            )
        out.print(table)
    needed = [v for v in verdicts if v.state is not State.SKIPPED]
    if needed:
        out.print()
        out.print(verdict_table(needed))
    for title, entries in (("not answered", drift.unknown), ("not readable", drift.unreadable)):
        for name, why in entries.items():
            out.print(Text(f"{title}: {name}: {why}", style="yellow"))
    if drift.only_new:
        out.print(Text(f"only in {drift.new}: {', '.join(drift.only_new)}", style="dim"))
    unreviewed = sorted({v.requirement.symbol for v in verdicts if v.unreviewed})
    if unreviewed:
        out.print(Text(f"UNREVIEWED, accepted for this run only: {', '.join(unreviewed)}", "bold"))
    scope = f" for adapter {adapter}" if adapter else ""
    out.print(
        Text(f"{drift.old} → {drift.new}{scope}: {counts or 'nothing'} ({seconds:.2f} s)", "bold")
    )


def verdict_table(verdicts: Sequence[Verdict]) -> RenderableType:
    """One row per requirement."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("verdict", "role", "symbol", "reason"):
        table.add_column(column, overflow="fold")
    for verdict in verdicts:
        state = Text(verdict.state.value, style=STATE_COLOURS[verdict.state])
        if verdict.unreviewed:
            state.append(" unreviewed", style="bold yellow")
        requirement = verdict.requirement
        table.add_row(state, requirement.role, Text(requirement.symbol), Text(verdict.reason))
    return table
