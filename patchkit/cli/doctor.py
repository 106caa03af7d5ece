"""``patchkit doctor``: where two stacks part, and what kind of difference it is."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from patchkit.cli._refusal import refuse
from patchkit.errors import PatchkitError

if TYPE_CHECKING:
    from rich.console import Console

    from patchkit.parity.doctor.compare import Cell
    from patchkit.parity.doctor.diagnosis import Diagnosis
    from patchkit.parity.doctor.separation import Separation

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

# More layers than this are shown around the first difference; the page has them all.
_WIDTH = 40


@app.command()
def doctor(
    adapter: Annotated[str, typer.Option(help="Adapter to examine; may be empty with --stock.")] = (
        "qwen3_moe"
    ),
    profile: Annotated[str, typer.Option(help="Its profile; the adapter's default if empty.")] = "",
    stock: Annotated[
        bool, typer.Option("--stock", help="Install nothing: the pair as it comes.")
    ] = False,
    model: Annotated[
        Optional[Path],  # noqa: UP045 - typer evaluates this at run time on 3.10, too
        typer.Option(help="Folder of a checkpoint; the adapter's tiny random model if absent."),
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences to sample.")] = 6,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to sample per sequence.")] = 12,
    longest: Annotated[int, typer.Option(min=2, help="Longest prompt.")] = 72,
    ranks: Annotated[int, typer.Option(min=1, help="FSDP2 ranks of the trainer.")] = 1,
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", "--tp", min=1, help="vLLM workers.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="Of weights, prompts and sampling.")] = 0,
    tensors: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Also write the values of OPERATOR@LAYER; can be given again."),
    ] = None,
    tensor_mb: Annotated[
        int, typer.Option(min=0, help="Values held beside the digests, per side, in MB.")
    ] = 256,
    compare: Annotated[
        Optional[tuple[str, str]],  # noqa: UP045
        typer.Option(
            help="Start nothing: separate what differs between the selected-token "
            "log-probabilities of two runs (FILE or FILE:COLUMN; rollout first, trainer second)."
        ),
    ] = None,
    clip: Annotated[
        float, typer.Option(min=0.0, help="With --compare: half-width of the trust region.")
    ] = 0.2,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--output", "-o", help="The page; in the run's folder if absent."),
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder for models, logs and pages.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run both sides on the same tokens and name the first operator that differs.

    Exit code 0: equal; 1: something differs; 2: it could not be examined.
    """
    try:
        if compare is not None:
            equal = _separate(compare, clip, output, as_json)
        else:
            equal = _examine(
                _settings(
                    adapter=adapter,
                    profile=profile,
                    pair="stock" if stock else "exact",
                    model=model,
                    workload=(sequences, new_tokens, longest),
                    ranks=ranks,
                    tensor_parallel_size=tensor_parallel_size,
                    seed=seed,
                    tensor_bytes=tensor_mb << 20,
                    runs=runs,
                ),
                tensors or [],
                output,
                as_json,
            )
    except PatchkitError as error:
        refuse(str(error).removeprefix("doctor: "), as_json, name="patchkit doctor")
    except ImportError as error:
        needed = "numpy" if compare is not None else "vLLM, torch and transformers"
        refuse(
            f"{error}; this needs {needed}: install patchkit's extras rollout-cpu "
            "(or rollout-cuda) and trainer",
            as_json,
            name="patchkit doctor",
        )
    except Exception as error:
        # An engine that does not start is no difference between two that do.
        traceback.print_exc()
        refuse(f"could not examine the pair: {error}", as_json, name="patchkit doctor")
    raise typer.Exit(0 if equal else 1)


def _settings(*, workload: tuple[int, int, int], runs: Path, **settings: Any) -> Any:
    from patchkit.parity.demo_setup import new_run_folder
    from patchkit.parity.doctor.setup import DoctorSettings, Workload

    sequences, new_tokens, longest = workload
    return DoctorSettings(
        folder=new_run_folder(runs),
        workload=Workload(sequences=sequences, new_tokens=new_tokens, longest=longest),
        **settings,
    )


def _examine(settings: Any, tensors: list[str], output: Path | None, as_json: bool) -> bool:
    # Not the session yet: it imports torch, which reads the environment that `set_up` decides.
    from patchkit.files import check_writable
    from patchkit.parity.doctor.setup import set_up

    if output is not None:
        check_writable(output)
    observe = _observer(quiet=as_json)
    setup = set_up(settings, observe)
    from patchkit.parity.doctor.page import write_page
    from patchkit.parity.doctor.session import DoctorSession, parse_operator

    wanted = [parse_operator(name) for name in tensors]
    with DoctorSession(setup, observe) as session:
        pair = session.record(hold=wanted)
        diagnosis = session.diagnose(pair)
        written = [session.save_tensors(pair, key, setup.folder) for key in wanted]
    page = write_page(diagnosis, output or setup.folder / "doctor.html")
    if as_json:
        _print_json(
            {**diagnosis.as_dict(), "page": str(page), "tensors": [str(p) for p in written]}
        )
    else:
        _print_diagnosis(diagnosis)
        for path in written:
            print(f"values: {path}")
        print(f"page: {page}")
    return diagnosis.equal


def _separate(compare: tuple[str, str], clip: float, output: Path | None, as_json: bool) -> bool:
    from patchkit.parity.doctor.runs import read_run, refuse_to_overwrite
    from patchkit.parity.doctor.separation import separate
    from patchkit.parity.doctor.separation_page import write_page

    separation = separate(read_run(compare[0]), read_run(compare[1]), clip=clip)
    target = output or Path("separation.html")
    refuse_to_overwrite(target, compare)
    page = write_page(separation, target)
    if as_json:
        _print_json({**separation.as_dict(), "page": str(page)})
    else:
        _print_separation(separation)
        print(f"page: {page}")
    return separation.equal


def _print_json(data: dict[str, Any]) -> None:
    import orjson

    sys.stdout.buffer.write(orjson.dumps(data, option=orjson.OPT_INDENT_2))
    sys.stdout.buffer.write(b"\n")


def _observer(*, quiet: bool):  # type: ignore[no-untyped-def]
    """Report stages as they begin; on standard error, so that the table can be piped."""
    from rich.console import Console
    from rich.markup import escape

    console, started = Console(stderr=True), time.monotonic()

    def observe(stage: str) -> None:
        if not quiet:
            console.print(f"[dim]{time.monotonic() - started:5.1f} s[/dim]  {escape(stage)}")

    return observe


# -- the diagnosis on a terminal --------------------------------------------------------------


def _print_diagnosis(diagnosis: Diagnosis) -> None:
    from rich.markup import escape

    from patchkit.cli._tables import console as terminal

    console = terminal()
    _print_grid(console, diagnosis)
    colour = "green" if diagnosis.equal else "red"
    console.print(f"[bold {colour}]{escape(diagnosis.verdict)}[/]")
    if diagnosis.first is not None:
        _print_first(console, diagnosis, diagnosis.first)
        _print_origins(console, diagnosis)
    for note in diagnosis.notes:
        console.print(f"[dim]not recorded: {escape(note)}[/dim]")


def _print_grid(console: Console, diagnosis: Diagnosis) -> None:
    """Operators down, layers across, one character each."""
    from rich.table import Table
    from rich.text import Text

    from patchkit.parity.doctor.page import grid_columns
    from patchkit.parity.doctor.recording import AFTER, BEFORE

    cells = diagnosis.comparison.cells
    inside = [c for c in cells if c.key.layer not in (BEFORE, AFTER)]
    layers = _shown_layers(sorted({c.key.layer for c in inside}), diagnosis)
    pair = "adapter installed" if diagnosis.pair == "exact" else "nothing installed"
    tp = diagnosis.workers[0]
    table = Table(
        title=f"vLLM (TP {tp}) against the Hugging Face model under FSDP2, {pair}",
        title_justify="left",
        caption="· equal   ■ differs   ▶ first   ◆ differs on equal inputs   – one side only",
        caption_justify="left",
    )
    table.add_column("operator", overflow="fold")
    span = f"layers {layers[0]}–{layers[-1]}" if len(layers) > 1 else "layer"
    table.add_column(span, no_wrap=True)
    for header in ("rows", "differ", "max |Δ|"):
        table.add_column(header, justify="right", overflow="fold")
    at = {(c.key.layer, c.key.op): c for c in cells}
    groups: list[tuple[str, Sequence[Cell | None]]] = [
        *((c.label, [c]) for c in cells if c.key.layer == BEFORE),
        *((label, [at.get((layer, op)) for layer in layers]) for op, label in grid_columns(inside)),
        *((c.label, [c]) for c in cells if c.key.layer == AFTER),
    ]
    origins = {o.key for o in diagnosis.comparison.origins}
    for label, row in groups:
        present = [c for c in row if c is not None]
        differing = sum(c.differing for c in present)
        # A difference between two experts' numbers is no magnitude.
        largest = [c.max_absdiff for c in present if c.max_absdiff is not None and not c.is_integer]
        marks = Text()
        for cell in row:
            marks.append(*_mark(cell, cell is diagnosis.first, cell and cell.key in origins))
        table.add_row(
            label,
            marks,
            f"{sum(c.rows for c in present):,}",
            f"[red]{differing:,}[/red]" if differing else "0",
            f"{max(largest):.3g}" if largest else "",
        )
    console.print(table)


def _shown_layers(layers: list[int], diagnosis: Diagnosis) -> list[int]:
    """All layers, or those around the first difference where there are many."""
    if len(layers) <= _WIDTH:
        return layers
    first = diagnosis.first
    start = 0
    if first is not None and first.key.layer in layers:
        start = min(max(0, layers.index(first.key.layer) - 2), len(layers) - _WIDTH)
    return layers[start : start + _WIDTH]


def _mark(cell: Cell | None, first: bool, origin: object) -> tuple[str, str]:
    if cell is None:
        return " ", ""
    if cell.status == "equal":
        return "·", "green"
    if cell.status == "not compared":
        return "–", "dim"
    return ("▶", "bold red") if first else ("◆", "red") if origin else ("■", "yellow")


def _print_first(console: Console, diagnosis: Diagnosis, first: Cell) -> None:
    from rich.markup import escape

    def line(name: str, value: str) -> None:
        console.print(f"  [bold]{name:<9}[/bold] {escape(value)}", highlight=False)

    def both(pair: tuple[object, object]) -> str:
        a, b = (str(list(x)) if isinstance(x, tuple) else str(x) for x in pair)
        return a if a == b else f"{a} (vLLM), {b} (trainer)"

    line("operator", f"{first.key.op}, row shape {both(first.shapes)}, {both(first.dtypes)}")
    if first.max_absdiff is not None and not first.is_integer:
        ulp = "" if first.max_ulp is None else f", {first.max_ulp:.3g} ulp at the row's size"
        elements = "" if first.elements is None else f"; {first.elements:.2%} of the elements"
        line("largest", f"{first.max_absdiff:.4g}{ulp}{elements}")
    for name, how in first.weights.items():
        line("weights", f"{name}: {how}")
    for cause in diagnosis.causes:
        sure = "computed" if cause.certain else "by size"
        line("cause", f"{cause.kind} ({sure}): {cause.evidence}")
        line("to do", cause.remedy)
    for side, patches in zip(("rollout", "trainer"), diagnosis.covering, strict=True):
        for patch in patches:
            line("patch", f"{side}: {patch['symbol']} – {patch['reason']}")


def _print_origins(console: Console, diagnosis: Diagnosis) -> None:
    from patchkit.parity.doctor.diagnosis import place

    origins = diagnosis.comparison.origins
    if len(origins) < 2:
        return
    told = ", ".join(
        f"{place(diagnosis.comparison.cell(o.key))} ({o.rows:,} rows)" for o in origins[:8]
    )
    more = f" and {len(origins) - 8} more" if len(origins) > 8 else ""
    console.print(f"Differ on equal inputs: {told}{more}", highlight=False)


# -- the separation ------------------------------------------------------------------------


def _print_separation(separation: Separation) -> None:
    from rich.markup import escape
    from rich.table import Table

    from patchkit.cli._tables import console as terminal

    console = terminal()
    table = Table(
        title=escape(f"{' against '.join(separation.names)}, {separation.tokens:,} tokens"),
        title_justify="left",
    )
    for header in ("tokens", "mean", "std", "ratio", "std", "clipped", "k1", "k3", "entropy"):
        if header == "tokens":
            table.add_column("group", overflow="fold")
        table.add_column(header, justify="right", overflow="fold")
    for group in separation.groups:
        table.add_row(*map(escape, group.row()))
    console.print(table)
    colour = "green" if separation.equal else "red"
    console.print(f"[bold {colour}]{escape(separation.verdict)}[/]")
    for part in separation.parts:
        console.print(
            f"  [bold]{part.name:<10}[/bold] {part.share:6.1%}  {escape(part.told)}",
            highlight=False,
        )
    for advice in separation.advice:
        console.print(f"  [bold]{'to do':<10}[/bold] {escape(advice)}", highlight=False)
