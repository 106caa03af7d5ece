"""``python -m grpo_qwen3_moe``: the reference loop, from preflight to report."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from grpo_qwen3_moe.logs import open_log
from grpo_qwen3_moe.settings import LoopSettings
from patchkit.errors import ConfigurationError, PatchkitError
from patchkit.parity.demo_setup import DemoSettings, DemoSetup, new_run_folder, set_up

if TYPE_CHECKING:
    from grpo_qwen3_moe.evidence import Outcome
    from grpo_qwen3_moe.loop import Round

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    refits: Annotated[int, typer.Option(min=1, help="Weight updates.")] = 10,
    seed: Annotated[int, typer.Option(help="Of weights, prompts and sampling.")] = 0,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts per step.")] = 8,
    group: Annotated[int, typer.Option(min=2, help="Answers per prompt.")] = 16,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 16,
    ranks: Annotated[int, typer.Option(min=1, help="FSDP2 ranks.")] = 2,
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", "--tp", min=1, help="vLLM workers.")
    ] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    gpus_per_actor: Annotated[float, typer.Option(help="With cuda; fractions share a GPU.")] = 1.0,
    adapter: Annotated[str, typer.Option(help="Adapter for both sides.")] = "qwen3_moe",
    profile: Annotated[str, typer.Option(help="Its profile; the default if empty.")] = "",
    address: Annotated[
        str, typer.Option(help="A running Ray cluster; a cluster of the run's own if local.")
    ] = "local",
    stock: Annotated[bool, typer.Option(help="Run the stock pair's loop, too.")] = True,
    cost_pairs: Annotated[int, typer.Option(min=0, help="Rounds timed for the gate's cost.")] = 5,
    runs: Annotated[Path, typer.Option(help="Folder for runs.")] = Path("runs/example"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """GRPO with every sampled token proven, and the stock pair's curves beside it."""
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"{device!r}: cpu or cuda", param_hint="--device")
    began = time.monotonic()
    folder = new_run_folder(runs).absolute()
    settings = LoopSettings(
        folder=folder,
        adapter=adapter,
        profile=profile,
        seed=seed,
        refits=refits,
        prompts=prompts,
        group=group,
        new_tokens=new_tokens,
        tensor_parallel_size=tensor_parallel_size,
        ranks=ranks,
        device=device,
        gpus_per_actor=gpus_per_actor,
        address=address,
        cost_pairs=cost_pairs,
    )
    log = open_log(folder)
    try:
        outcome, exact, other, cost = run(settings, log, stock=stock, quiet=as_json)
    except PatchkitError as error:
        log.error("refused", error=str(error))
        print(f"{error}\nlog: {folder / 'loop.jsonl'}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, ConfigurationError) else 1) from error
    seconds = time.monotonic() - began
    log.info("done", seconds=seconds, verdict=outcome.verdict, reward_rise=outcome.rise)
    if as_json:
        print(
            json.dumps(
                {
                    "exact": outcome.exact,
                    "learnt": outcome.learnt,
                    "reward_rise": outcome.rise,
                    "verdict": outcome.verdict,
                    "artifact": str(outcome.artifact),
                    "page": str(outcome.page),
                    "cost": cost,
                    "rounds": [r.as_dict() for r in exact],
                    "stock": [r.as_dict() for r in other],
                    "seconds": seconds,
                }
            )
        )
    else:
        show(outcome, exact, other, cost, seconds)
    raise typer.Exit(0 if outcome.good else 1)


def require_device(settings: LoopSettings, devices: int) -> None:
    """Refuse a device that is not there, or a profile that was not made for it.

    Raises:
        ConfigurationError: Before anything is made or started.
    """
    if settings.device != "cuda":
        return
    wanted = settings.gpus_per_actor * (settings.ranks + settings.tensor_parallel_size)
    if devices < wanted:
        raise ConfigurationError(
            f"--device cuda: {settings.ranks} rank(s) and {settings.tensor_parallel_size} vLLM "
            f"worker(s) at {settings.gpus_per_actor:g} GPU each need {wanted:g}, this machine has "
            f"{devices}. Use fewer, share them with --gpus-per-actor, or run with --device cpu"
        )
    if not settings.profile:
        raise ConfigurationError(
            "--device cuda: name a profile for it with --profile (vllm_bi and its kin, for "
            "qwen3_moe); the adapter's default profile is made for a CPU, and its operators are "
            "never reached on a GPU"
        )


def prepare(settings: LoopSettings) -> DemoSetup:
    """Model, contract, and this process's environment: before torch, before Ray."""
    require_device(settings, len(list(Path("/dev").glob("nvidia[0-9]*"))))
    return set_up(
        DemoSettings(
            adapter=settings.adapter,
            profile=settings.profile,
            folder=settings.folder,
            tensor_parallel_size=settings.tensor_parallel_size,
            ranks=settings.ranks,
            seed=settings.seed,
        )
    )


def run(
    settings: LoopSettings, log: Any, *, stock: bool, quiet: bool
) -> tuple[Outcome, list[Round], list[Round], dict[str, Any] | None]:
    """Everything, in this order: contract, Ray, exact loop, artifact, stock loop, report."""
    with _watch(settings, quiet=quiet) as watch:
        watch("contract")
        setup = prepare(settings)
        log.info("contract", digest=setup.contract.digest, profile=setup.contract.profile.name)
        # The actors find this package where the driver found it.
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        watch("ray")
        # Only now: both import what reads the environment.
        import ray

        from grpo_qwen3_moe.cluster import connect
        from grpo_qwen3_moe.evidence import conclude
        from grpo_qwen3_moe.loop import OnPolicyLoop, StockLoop

        connect(settings, setup.contract.environment)
        try:
            with OnPolicyLoop(settings, setup, log, watch) as loop:
                loop.run()
                # Whatever comes later: what was shown until here is on disk.
                loop.artifact.write(settings.folder / "artifact.json")
                cost = loop.cost() if settings.cost_pairs else None
            other = StockLoop(settings, setup, log, watch)
            if stock:
                other.run()
        finally:
            ray.shutdown()
        watch("report")
        outcome = conclude(settings, loop.artifact, loop.rounds, other.rounds, cost)
    return outcome, loop.rounds, other.rounds, cost


class _watch:
    """Progress on standard error: which stage, and how many stages are behind."""

    def __init__(self, settings: LoopSettings, *, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TextColumn("{task.completed} stages"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=quiet,
        )
        self._task = self._progress.add_task(str(settings.folder), total=None)

    def __call__(self, stage: str) -> None:
        self._progress.update(self._task, description=stage, advance=1)

    def __enter__(self) -> _watch:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def show(
    outcome: Outcome,
    exact: list[Round],
    stock: list[Round],
    cost: dict[str, Any] | None,
    seconds: float,
) -> None:
    """The run as a table."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title="Every sampled token, by policy version", title_justify="left")
    for header in ("\nversion", "\ntokens", "\nreward", "mis-\nmatches"):
        table.add_column(header, justify="right", no_wrap=True)
    if stock:
        for header in ("stock:\nreward", "mis-\nmatches", "\nk3", "\nclipped"):
            table.add_column(header, justify="right", no_wrap=True)
    for number, r in enumerate(exact):
        colour = "red" if r.mismatches else "green"
        row = [
            str(r.version),
            f"{r.tokens:,}",
            f"{r.reward:.3f}",
            f"[{colour}]{r.mismatches:,}[/{colour}]",
        ]
        if stock:
            s = stock[number]
            row += [f"{s.reward:.3f}", f"{s.mismatches:,}", f"{s.k3:.2g}", f"{s.clip_rate:.1%}"]
        table.add_row(*row)
    console.print(table)
    learnt = {True: "reached", False: "NOT reached", None: "not asked of so short a run"}
    console.print(f"reward rose by {outcome.rise:.3f}; margin {learnt[outcome.learnt]}")
    if cost:
        console.print(
            f"a round takes {cost['with_s']:.2f} s with recompute, gate and receipts, "
            f"{cost['without_s']:.2f} s without: x {cost['ratio']:.2f} (by the stages' own "
            f"clocks x {cost['ratio_by_stages']:.2f})"
        )
    console.print(f"artifact: {outcome.verdict}")
    console.print(f"{outcome.artifact}\n{outcome.page}", soft_wrap=True)
    console.print(f"total {seconds:.0f} s")


if __name__ == "__main__":
    app()
