"""``patchkit check``: the whole plan of an adapter, against what is installed."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchkit.cli._refusal import refuse
from patchkit.errors import PatchkitError

if TYPE_CHECKING:
    from patchkit.engine import Adapter, Plan

app = typer.Typer(add_completion=False)


@app.command()
def check(
    adapter: Annotated[str, typer.Argument(help="The adapter's name.")],
    side: Annotated[
        str | None, typer.Option(help='"rollout" or "trainer"; every declared side otherwise.')
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="The adapter's profile; its default one otherwise.")
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(help="SYMBOL=DIGEST: let one drifted symbol pass, unreviewed; repeatable."),
    ] = None,
    static: Annotated[
        bool, typer.Option("--static", help="Import nothing: verify from the sources alone.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Preflight: what would be written, who holds what, what stands against it. Changes nothing.

    Exit 0: it can be installed. Exit 1: something stands against it. Exit 2: wrong usage.
    """
    try:
        plans, unimportable = _plans(adapter, side, profile, accept or [], static)
    except PatchkitError as error:
        refuse(error, as_json)
    clean = not any(plan.violations for plan in plans)
    if as_json:
        told = {
            "schema": 1,
            "clean": clean,
            "plans": [plan.as_dict() for plan in plans],
            "not_imported": unimportable,
        }
        print(json.dumps(told))
    else:
        for plan in plans:
            _show(plan.as_dict())
        for module, why in unimportable.items():
            print(f"not imported here, verified from its source: {module} ({why})")
    raise typer.Exit(0 if clean else 1)


def _plans(
    name: str, side: str | None, profile: str | None, accept: list[str], static: bool
) -> tuple[list[Plan], dict[str, str]]:
    from patchkit.cli._requirements import accepted
    from patchkit.engine import find_adapter, inspect_plan

    adapter = find_adapter(name)
    sides = [side] if side else [s for s in ("rollout", "trainer") if adapter.patches(s)]
    unimportable: dict[str, str] = {}
    if not static:
        for one in sides:
            awaited = [p for p in inspect_plan(adapter, one, profile=profile).patches if p.pending]
            unimportable |= _import_targets({p.module for p in awaited})
    digests = accepted(accept)
    named = {s: _concerned(adapter, s) for s in sides}
    plans = []
    for one in sides:
        # A digest that is accepted for the other side's symbol is not this side's business.
        elsewhere = set().union(*(n for s, n in named.items() if s != one)) - named[one]
        mine = {symbol: d for symbol, d in digests.items() if symbol not in elsewhere}
        plans.append(inspect_plan(adapter, one, accept=mine, profile=profile))
    return plans, unimportable


def _concerned(adapter: Adapter, side: str) -> set[str]:
    patches = adapter.patches(side)
    return {p.symbol for p in patches} | {s for p in patches for s in p.depends_on}


def _import_targets(modules: set[str]) -> dict[str, str]:
    """Import what the patches are for, so that live objects and references can be seen."""
    failed = {}
    with redirect_stdout(sys.stderr):  # libraries greet on stdout
        for module in sorted(modules):
            try:
                import_module(module)
            except Exception as error:  # whatever a library raises while it is imported
                failed[module] = f"{type(error).__name__}: {error}"
    return failed


def _show(plan: dict[str, Any]) -> None:
    from rich.text import Text

    from patchkit.cli._tables import console

    out = console()
    versions = ", ".join(f"{p} {v}" for p, v in plan["versions"].items())
    head = f"{plan['adapter']}, {plan['side']} side"
    head += f", profile {plan['profile']}" if plan["profile"] else ""
    out.print(Text(f"{head}  ({versions})" if versions else head, "bold"))
    for patch in plan["patches"]:
        out.print()
        state = "waits for its import" if patch["pending"] else patch["kind"]
        out.print(Text(f"  {patch['action']} {patch['symbol']}", "cyan"), Text(f"({state})"))
        out.print(Text(f"    by       {patch['replacement']}"))
        out.print(Text(f"    why      {patch['reason']}"))
        for label, key in (
            ("writes", "written"),
            ("keeps", "kept"),
            ("accepts", "accepted"),
            ("around", "layers"),
            ("note", "notes"),
        ):
            for text in patch[key]:
                out.print(Text(f"    {label:<8} {text}"))
    for skipped in plan["skipped"]:
        out.print(Text(f"  not for this version: {skipped['symbol']} {skipped['versions']}", "dim"))
    out.print()
    for symbol, digest in plan["unreviewed"].items():
        out.print(Text(f"  UNREVIEWED {symbol} {digest}", "bold yellow"))
    if plan["violations"]:
        count = len(plan["violations"])
        noun = "violation" if count == 1 else "violations"
        out.print(Text(f"  {count} {noun}; nothing would be done", "bold red"))
        for number, found in enumerate(plan["violations"], 1):
            out.print(Text(f"  {number}. {found['subject']}: {found['problem']}", "red"))
            for label, key in (("expected", "expected"), ("found", "found"), ("to do", "remedy")):
                if found[key]:
                    out.print(Text(f"       {label:<9} {found[key]}"))
    else:
        word = "can be installed" + ("" if plan["reviewed"] else ", UNREVIEWED")
        out.print(Text(f"  {word}", "green" if plan["reviewed"] else "bold yellow"))
