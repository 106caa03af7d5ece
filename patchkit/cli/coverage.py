"""``patchkit coverage``: what becomes of every submodule of an adapter's model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchkit.cli._refusal import refuse
from patchkit.errors import PatchkitError

if TYPE_CHECKING:
    from patchkit.engine import Submodule

app = typer.Typer(add_completion=False)

_BEGIN = "<!-- patchkit coverage {name}: begin (generated) -->"
_END = "<!-- patchkit coverage {name}: end -->"
_WORDS = {"exact": "exact", "stock": "stock", "unused": "not applicable"}


@app.command()
def coverage(
    adapter: Annotated[str, typer.Argument(help="The adapter.")],
    profile: Annotated[
        str | None, typer.Option(help="The adapter's profile; its default one otherwise.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="The table for a README.")] = False,
    write: Annotated[
        Path | None, typer.Option(help="Write the table into this file, between its markers.")
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="Exit 1 where this file's table is not current.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Exact, stock or not applicable, for every class of submodule on both sides.

    Exit 0: the adapter declares its submodules. Exit 1: it declares none, or the file
    that was checked is not current.
    """
    try:
        from patchkit.cli._marked import is_current, write_between
        from patchkit.engine import find_adapter
        from patchkit.runtime.coverage import declared

        found = find_adapter(adapter)
        chosen = found.profile(profile)
        modules = [m for side in ("rollout", "trainer") for m in declared(found, side, chosen)]
        begin, end = _BEGIN.format(name=adapter), _END.format(name=adapter)
        text = table(modules)
        if write is not None:
            write_between(write, begin, end, f"\n{text}\n")
        if check is not None and not is_current(check, begin, end, f"\n{text}\n"):
            told = f"{check}: not current; run `patchkit coverage {adapter} --write {check}`"
            refuse(told, as_json, code=1)
    except PatchkitError as error:
        refuse(error, as_json)
    if as_json:
        print(json.dumps([_as_dict(module) for module in modules], indent=1))
    elif markdown:
        print(text)
    elif modules:
        _print(adapter, chosen, modules)
    if not modules:
        print(
            f"adapter {adapter} declares no submodules for profile {chosen!r}: a model with a "
            "layer that its patches do not reach would not be noticed; fill Adapter.modules",
            file=sys.stderr,
        )
        raise typer.Exit(1)


def table(modules: Iterable[Submodule]) -> str:
    """The table in Markdown."""
    lines = ["| side | submodule | on the exact path | by | |", "|---|---|---|---|---|"]
    for module in modules:
        inside = [_short(name) for name in module.inside]
        name = f"`{_short(module.name)}`" + (f" in {', '.join(inside)}" if inside else "")
        by = ", ".join(f"`{_short(symbol)}`" for symbol in module.by)
        words = _WORDS[module.treatment]
        lines.append(f"| {module.side} | {name} | {words} | {by} | {module.note} |")
    return "\n".join(lines)


def _short(symbol: str) -> str:
    return symbol.partition(":")[2]


def _as_dict(module: Submodule) -> dict[str, object]:
    return {
        "side": module.side,
        "name": module.name,
        "treatment": _WORDS[module.treatment],
        "by": list(module.by),
        "inside": list(module.inside),
        "note": module.note,
    }


def _print(adapter: str, profile: str, modules: Iterable[Submodule]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from patchkit.cli._tables import console

    colours = {"exact": "green", "stock": "yellow", "unused": "dim"}
    shown = Table(title=f"{adapter}, profile {profile}")
    for heading in ("side", "submodule", "on the exact path", "by", "note"):
        shown.add_column(heading, overflow="fold")
    for module in modules:
        inside = f" in {', '.join(map(_short, module.inside))}" if module.inside else ""
        shown.add_row(
            module.side,
            escape(_short(module.name) + inside),
            f"[{colours[module.treatment]}]{_WORDS[module.treatment]}[/]",
            escape(", ".join(map(_short, module.by))),
            escape(module.note),
        )
    console().print(shown)
