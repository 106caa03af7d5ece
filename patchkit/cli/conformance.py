"""``patchkit conformance``: everything that stands behind an adapter's certificate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchkit.cli._refusal import refuse
from patchkit.errors import PatchkitError

if TYPE_CHECKING:
    from rich.console import Console

    from patchkit.kit import StageResult

app = typer.Typer(add_completion=False)


@app.command()
def conformance(
    adapter: Annotated[str, typer.Argument(help="The adapter's name.")],
    profile: Annotated[str, typer.Option(help="Its profile; the default one if empty.")] = "",
    stage: Annotated[
        list[str] | None, typer.Option(help="Only this stage; repeatable. No certificate then.")
    ] = None,
    sequences: Annotated[int, typer.Option(min=2, help="Sampled per phase, end to end.")] = 16,
    tensor_parallel_size: Annotated[
        list[int] | None,
        typer.Option(
            "--tensor-parallel-size", "--tp", min=1, help="vLLM workers, end to end; repeatable."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights, prompts and sampling.")] = 0,
    certificate: Annotated[
        Path | None, typer.Option(help="Write what was shown to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Manifests, undo, plugin, rows, end to end, ablation: one after the other.

    Exit 0: green. Exit 1: a stage failed, with everything that it found. Exit 2: wrong usage.
    """
    try:
        from patchkit.files import check_writable
        from patchkit.kit import SuiteSettings, run_suite
        from patchkit.kit._certificate import certificate as certify
        from patchkit.kit._certificate import write_certificate

        if certificate is not None:
            check_writable(certificate)
        settings = SuiteSettings(
            adapter=adapter,
            profile=profile,
            sequences=sequences,
            tensor_parallel=tuple(tensor_parallel_size or (1,)),
            seed=seed,
        )
        console = None if as_json else _console()
        results = []
        for result in run_suite(settings, stage or ()):
            results.append(result)
            if console is not None:
                _show(console, result)
        content = certify(settings, results)
        if certificate is not None:
            write_certificate(certificate, content)
    except PatchkitError as error:
        refuse(error, as_json)
    if as_json:
        print(json.dumps(content))
    else:
        _summary(content, certificate)
    raise typer.Exit(int(any(r.status == "failed" for r in results)))


def _console() -> Console:
    from patchkit.cli._tables import console

    return console()


_COLOURS = {"passed": "green", "failed": "bold red", "not applicable": "dim"}


def _show(console: Console, result: StageResult) -> None:
    from rich.text import Text

    from patchkit.kit import STAGES

    line = Text(f"{result.status:<15}", _COLOURS[result.status])
    line.append(f"{result.stage:<10} ", "bold")
    line.append(f"{result.seconds:6.1f} s  ", "dim")
    line.append(result.why or STAGES[result.stage].title)
    console.print(line)
    for number, violation in enumerate(result.violations, 1):
        console.print(Text(f"  {number}. {violation}".replace("\n", "\n     "), "red"))


def _summary(content: dict[str, Any], file: Path | None) -> None:
    failed = [s["stage"] for s in content["stages"] if s["status"] == "failed"]
    if failed:
        print(f"not green: {', '.join(failed)} failed")
    elif content["not_run"]:
        print(f"no certificate: {', '.join(content['not_run'])} was not run")
    else:
        print(f"green: adapter {content['adapter']}, certificate digest {content['digest'][:16]}")
    if file is not None:
        print(f"written to {file}")
