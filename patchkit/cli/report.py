"""``patchkit report``: an artifact as a page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from patchkit.errors import ConfigurationError, PatchkitError

app = typer.Typer(add_completion=False, help=__doc__)


@app.command()
def report(
    file: Annotated[Path, typer.Argument(help="The artifact; it is verified first.")],
    output: Annotated[
        Optional[Path],  # noqa: UP045 - typer evaluates this at run time on 3.10, too
        typer.Option("--output", "-o", help="The page; beside the artifact if absent."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Verify an artifact and write it as one self-contained page."""
    from patchkit.runtime.report import write_report

    target = output or file.with_suffix(".html")
    try:
        found = write_report(file, target)
    except PatchkitError as error:
        if as_json:
            print(json.dumps({"page": None, "error": str(error)}))
        else:
            print(error, file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, ConfigurationError) else 1) from error
    if as_json:
        print(json.dumps({"page": str(target), "verdict": found.verdict, "exact": found.exact}))
    else:
        print(f"{target}: {found.verdict}")
    raise typer.Exit(0 if found.exact else 1)
