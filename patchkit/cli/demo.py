"""``patchkit demo``: the main job on this machine, with progress and a table."""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchkit.cli._refusal import refuse
from patchkit.errors import ConfigurationError, PatchkitError

if TYPE_CHECKING:
    from patchkit.parity.demo import DemoResult

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def demo(
    adapter: Annotated[str, typer.Option(help="Adapter to run.")] = "qwen3_moe",
    profile: Annotated[str, typer.Option(help="Its profile; the adapter's default if empty.")] = "",
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", "--tp", min=1, help="vLLM workers.")
    ] = 1,
    ranks: Annotated[int, typer.Option(min=1, help="FSDP2 ranks of the trainer.")] = 2,
    sequences: Annotated[int, typer.Option(min=2, help="Sequences sampled per phase.")] = 64,
    seed: Annotated[int, typer.Option(help="Of weights, prompts and sampling.")] = 0,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            help="A setting of the tiny model, as in its config.json: NAME=JSON; repeatable.",
            metavar="NAME=JSON",
        ),
    ] = None,
    stock: Annotated[bool, typer.Option(help="Score the tokens with the stock pair, too.")] = True,
    provider: Annotated[
        list[str] | None,
        typer.Option(help="OPERATOR=PACKAGE: run an admitted implementation; repeatable."),
    ] = None,
    accept_provider: Annotated[
        list[str] | None,
        typer.Option(help="PACKAGE=DIGEST: use it unadmitted; every output says so."),
    ] = None,
    accept_all2all: Annotated[
        list[str] | None,
        typer.Option(
            "--accept-all2all",
            help="BACKEND=DIGEST: use the profile's all-to-all backend although no run with it "
            "was compared; every output says so.",
        ),
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder for models, logs and artifacts.")] = Path(
        "runs"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Sample with real vLLM, replay with real FSDP2, and compare every bit.

    Exit code 0: equal; 1: something differs; 2: it could not be run.
    """
    # Not the demo itself yet: it imports torch, which reads the environment that
    # `set_up` decides.
    from patchkit.parity.demo_setup import DemoSettings, new_run_folder, set_up

    started = time.monotonic()
    observe = _observer(started, quiet=as_json)
    try:
        setup = set_up(
            DemoSettings(
                adapter=adapter,
                profile=profile,
                folder=new_run_folder(runs),
                tensor_parallel_size=tensor_parallel_size,
                ranks=ranks,
                sequences=sequences,
                seed=seed,
                stock=stock,
                model_changes=_settings(setting or []),
                providers=_pairs("--provider", provider),
                accept_providers=_pairs("--accept-provider", accept_provider),
                accept_all2all=_pairs("--accept-all2all", accept_all2all),
            ),
            observe,
        )
        from patchkit.parity.demo import run_demo

        result = run_demo(setup, observe)
    except PatchkitError as error:
        code = 2 if isinstance(error, ConfigurationError) else 1
        refuse(error, as_json, code=code, name="patchkit demo")
    except Exception as error:
        # An engine that does not start is no bit that differs.
        traceback.print_exc()
        refuse(f"could not be run: {error}", as_json, name="patchkit demo")
    total = time.monotonic() - started
    if as_json:
        import orjson

        sys.stdout.buffer.write(orjson.dumps(summary(result, total), option=orjson.OPT_INDENT_2))
        sys.stdout.buffer.write(b"\n")
    else:
        _print(result, total)
    if not exact(result):
        raise typer.Exit(1)


def _settings(options: list[str]) -> dict[str, object]:
    """``["tie_word_embeddings=true"]`` to ``{"tie_word_embeddings": True}``."""
    found: dict[str, object] = {}
    for option in options:
        name, separator, value = option.partition("=")
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(
                f"--setting {option!r}: expected NAME=JSON, as in tie_word_embeddings=true"
            ) from error
        if not separator or not name.isidentifier():
            raise ConfigurationError(f"--setting {option!r}: {name!r} is no setting's name")
    return found


def _pairs(option: str, entries: list[str] | None) -> dict[str, str]:
    pairs = {}
    for entry in entries or ():
        key, equals, value = entry.partition("=")
        if not (key and equals and value):
            raise ConfigurationError(f"{option} {entry!r}: write two names with = between them")
        pairs[key] = value
    return pairs


def exact(result: DemoResult) -> bool:
    """Whether every token of every phase agreed."""
    return all(
        m.token_count > 0 and m.mismatch_count == 0
        for phase in result.phases
        for m in (phase.recompute, phase.first_forward)
    )


def summary(result: DemoResult, total: float) -> dict[str, object]:
    """The result as plain data."""
    return {
        "exact": exact(result),
        "phases": [
            {
                "name": p.name,
                "version": p.version,
                "recompute": p.recompute.as_dict(),
                "first_forward": p.first_forward.as_dict(),
                "stock": p.stock.as_dict() if p.stock else None,
                "evidence": p.evidence.as_dict(),
                "step": p.step,
            }
            for p in result.phases
        ],
        "unadmitted": dict(result.settings.accept_providers),
        "uncompared": dict(result.settings.accept_all2all),
        "seconds": {**result.seconds, "total": total},
        "artifact": str(result.artifact) if result.artifact else None,
    }


def _observer(started: float, *, quiet: bool):  # type: ignore[no-untyped-def]
    """Report stages as they begin; on standard error, so that the table can be piped."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)

    def observe(stage: str) -> None:
        if not quiet:
            console.print(f"[dim]{time.monotonic() - started:5.1f} s[/dim]  {escape(stage)}")

    return observe


def _print(result: DemoResult, total: float) -> None:
    from rich.table import Table

    from patchkit.cli._tables import console as terminal

    console = terminal()
    tp = result.settings.tensor_parallel_size
    table = Table(
        title=f"vLLM (TP {tp}) against FSDP2 ({result.settings.ranks} ranks), "
        "float32 selected-token log-probabilities; stock: vLLM (TP 1), same tokens",
        title_justify="left",
    )
    table.add_column("phase", overflow="fold")
    for header in (
        "tokens",
        "patchkit:\nrecompute",
        "mismatches\n1st forward",
        "stock:\nmismatches",
        "stock:\nmax |Δ|",
    ):
        table.add_column(header, justify="right", overflow="fold")
    for p in result.phases:
        bad = p.recompute.mismatch_count or p.first_forward.mismatch_count
        colour = "red" if bad else "green"
        table.add_row(
            p.name,
            f"{p.recompute.token_count:,}",
            f"[{colour}]{p.recompute.mismatch_count:,}[/{colour}]",
            f"[{colour}]{p.first_forward.mismatch_count:,}[/{colour}]",
            f"{p.stock.mismatch_count:,}" if p.stock else "not run",
            f"{p.stock.max_absdiff:.3g}" if p.stock else "",
        )
    console.print(table)
    for p in result.phases:
        e = p.evidence
        console.print(
            f"{p.name}: {e.chunked_prefills} chunked prefills, {e.cached_tokens} cached prompt "
            f"tokens, {e.preemptions} preemptions; gradient norm {p.step['grad_norm']:.3g}"
        )
    for module in sorted(result.settings.accept_providers):
        console.print(f"[bold yellow]UNADMITTED: {module}, accepted for this run[/bold yellow]")
    for backend in sorted(result.settings.accept_all2all):
        console.print(
            f"[bold yellow]UNCOMPARED: all-to-all backend {backend}, accepted for this "
            "run[/bold yellow]"
        )
    stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in result.seconds.items())
    console.print(f"seconds: {stages}; [bold]total {total:.1f}[/bold]")
    if result.artifact:
        console.print(f"artifact: {result.artifact}", soft_wrap=True, markup=False)
