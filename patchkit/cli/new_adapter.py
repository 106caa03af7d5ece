"""``patchkit new-adapter``: what a model is made of, and a package to start from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchkit.cli._refusal import refuse
from patchkit.errors import PatchkitError

if TYPE_CHECKING:
    from patchkit.kit import Look

app = typer.Typer(add_completion=False)


@app.command("new-adapter")
def new_adapter(
    name: Annotated[str, typer.Argument(help="Name of the adapter: an identifier.")],
    model: Annotated[
        Path, typer.Option(help="The model's folder, or its config.json; nothing is downloaded.")
    ],
    into: Annotated[Path, typer.Option(help="The folder in which the package is made.")] = Path(),
    look_only: Annotated[
        bool, typer.Option("--look-only", help="Write nothing, only say what was found.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Look at a model in vLLM and transformers, and write the skeleton of its adapter.

    Nothing of either library is imported. Exit 0: bindings cover every operator. Exit 1: the
    skeleton says what is missing, and refuses the model until it is there. Exit 2: wrong usage.
    """
    try:
        from patchkit.kit import check_place, look_at, write_skeleton

        if not look_only:
            check_place(name, into)
        look = look_at(model)
        if not as_json:
            _show(look)
        if not look_only and not as_json:
            print("writing; manifests read all of the libraries, which takes a while …", flush=True)
        folder = None if look_only else write_skeleton(name, look, into)
    except PatchkitError as error:
        refuse(error, as_json)
    if as_json:
        print(
            json.dumps(
                {
                    "schema": 1,
                    "architecture": look.classes.architecture,
                    "vllm": f"{look.classes.vllm_module}:{look.classes.vllm_class}",
                    "transformers": f"{look.classes.hf_module}:{look.classes.hf_class}",
                    "rows": [row.as_dict() for row in look.rows],
                    "covered": not look.missing,
                    "folder": str(folder) if folder else None,
                }
            )
        )
    elif folder is not None:
        from patchkit.kit import steps

        print(f"written to {folder}. Next:\n{steps(name, look)}")
    raise typer.Exit(int(bool(look.missing)))


def _show(look: Look) -> None:
    from rich.table import Table
    from rich.text import Text

    from patchkit.cli._tables import console

    out = console()
    classes = look.classes
    out.print(Text(classes.architecture, "bold"))
    out.print(f"  vLLM          {classes.vllm_module}:{classes.vllm_class}")
    out.print(f"  transformers  {classes.hf_module}:{classes.hf_class}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("side", "operator", "", "by, or what to do"):
        table.add_column(column, overflow="fold")
    colours = {"covered": "green", "as it is": "dim", "needs you": "bold red"}
    for row in look.rows:
        text = "; ".join(filter(None, (row.by, row.note)))
        table.add_row(
            row.side, Text(row.operator), Text(row.status, colours[row.status]), Text(text)
        )
    out.print(table)
    missing = len(look.missing)
    out.print(
        Text("every operator is covered", "green")
        if not missing
        else Text(f"{missing} of {len(look.rows)} need you", "bold red")
    )
