"""``patchkit adopt``: a skeleton adapter out of a project's patches."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchkit.cli._refusal import refuse
from patchkit.errors import PatchkitError

if TYPE_CHECKING:
    from patchkit.audit._adopt import Skeleton

app = typer.Typer(add_completion=False)


@app.command()
def adopt(
    path: Annotated[Path, typer.Argument(help="The project's folder, or one file.")],
    name: Annotated[str, typer.Option(help="The adapter's name.")] = "adopted",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The folder to write; nothing else is.")
    ] = None,
    package: Annotated[
        list[str] | None,
        typer.Option("--package", "-p", help="Only patches of this package; repeatable."),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(help="Versions whose verdicts stand beside the patches; repeatable."),
    ] = None,
    side: Annotated[
        str, typer.Option(help="rollout or trainer, for packages of neither side.")
    ] = "rollout",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Write a skeleton adapter that declares what the project patches.

    Exit 0: everything is declared. Exit 1: something could not be expressed, and is
    listed. Exit 2: the question was wrong.
    """
    from patchkit.audit import audit
    from patchkit.audit._adopt import adopt as make
    from patchkit.audit._adopt import write_skeleton

    gc.disable()  # this process ends with the answer
    try:
        report = audit(path, packages=package or (), against=against or ())
        skeleton = make(report, name, side=side)
        if output is not None:
            write_skeleton(skeleton, output)
    except PatchkitError as error:
        refuse(error, as_json)
    if as_json:
        print(json.dumps(_as_dict(skeleton, output), indent=1))
    else:
        _print(skeleton, output)
    raise typer.Exit(1 if skeleton.unexpressed else 0)


def _as_dict(skeleton: Skeleton, output: Path | None) -> dict[str, object]:
    return {
        "name": skeleton.name,
        "written": [str(output / f) for f in skeleton.files] if output is not None else [],
        "files": skeleton.files,
        "declared": [f.identity for f in skeleton.declared],
        "unexpressed": [
            {
                "target": u.finding.identity,
                "file": u.finding.place.file,
                "line": u.finding.place.line,
                "reason": u.reason,
                "remedy": u.remedy,
                "declared": u.declared,
            }
            for u in skeleton.unexpressed
        ],
    }


def _print(skeleton: Skeleton, output: Path | None) -> None:
    if output is None:
        print(skeleton.files["__init__.py"])
    else:
        for file in skeleton.files:
            print(f"wrote {output / file}")
        print(f"next: pip install -e {output}, then patchkit check {skeleton.name} --static")
    print(f"{len(skeleton.declared)} patches declared", file=sys.stderr)
    for entry in skeleton.unexpressed:
        state = "declared, but" if entry.declared else "not declared:"
        print(
            f"  {entry.finding.place} {entry.finding.identity}: {state} {entry.reason}; "
            f"{entry.remedy}",
            file=sys.stderr,
        )
