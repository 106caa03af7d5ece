"""``patchkit artifact``: verify and merge verification artifacts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from patchkit.errors import ConfigurationError, PatchkitError, ViolationsError

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(help="The artifact.")], as_json: Json = False
) -> None:
    """Recompute everything an artifact says. Exit 0: it holds, and is exact."""
    from patchkit.runtime.artifact import verify_artifact

    try:
        found = verify_artifact(file)
    except PatchkitError as error:
        _refuse(error, as_json)
    if as_json:
        print(
            json.dumps(
                {
                    "verified": True,
                    "exact": found.exact,
                    "verdict": found.verdict,
                    "unreviewed": list(found.unreviewed),
                    "runs": found.runs,
                    "phases": found.totals,
                }
            )
        )
    else:
        _show(file, found)
    raise typer.Exit(0 if found.exact else 1)


@app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(help="Artifacts of one contract.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The merged artifact.")],
    as_json: Json = False,
) -> None:
    """Add up runs of one contract; each is verified first."""
    from patchkit.runtime.artifact import merge_artifacts, verify_artifact

    try:
        found = verify_artifact(merge_artifacts(files, output))
    except PatchkitError as error:
        _refuse(error, as_json)
    if as_json:
        print(json.dumps({"merged": str(output), "runs": found.runs, "verdict": found.verdict}))
    else:
        _show(output, found)
    raise typer.Exit(0 if found.exact else 1)


def _show(file: Path, found: Any) -> None:
    from patchkit.cli._tables import console
    from patchkit.runtime.artifact import BASELINE, REQUIRED

    out = console()
    table = Table()
    for heading in ("phase", "comparison", "tokens", "mismatches", "max |difference|", "k3 mean"):
        table.add_column(heading, overflow="fold")
    for phase, comparisons in found.totals.items():
        for name in (*REQUIRED, BASELINE):
            if (m := comparisons.get(name)) is None:
                continue
            table.add_row(
                phase,
                f"rollout = {name}",
                f"{m['token_count']:,}",
                f"{m['mismatch_count']:,}",
                f"{m['max_absdiff']:.3e}",
                f"{m['k3_mean']:.3e}",
            )
    out.print(table)
    runs = f" ({found.runs} runs)" if found.runs > 1 else ""
    out.print(f"{file}{runs}: verified. {found.verdict}", soft_wrap=True, markup=False)
    for symbol in found.unreviewed:
        out.print(f"  unreviewed: {symbol}", soft_wrap=True, markup=False)


def _refuse(error: PatchkitError, as_json: bool) -> None:
    if as_json:
        violations = getattr(error, "violations", ())
        print(
            json.dumps(
                {
                    "verified": False,
                    "error": type(error).__name__,
                    "message": str(error),
                    "violations": [v.as_dict() for v in violations],
                }
            )
        )
    else:
        print(error, file=sys.stderr)
    raise typer.Exit(
        2 if isinstance(error, ConfigurationError) or not isinstance(error, ViolationsError) else 1
    )
