#!/usr/bin/env python3
"""Exactness and speed on real GPUs; docs/gpu.md says how to bring vLLM there.

    python benchmarks/gpu.py plan ranks --out RESULTS      # two GPUs; plans.py has the others
    python benchmarks/gpu.py exact --tensor-parallel 2 --expert-parallel --out RESULTS

Each run has processes of its own and writes a log and a JSON file into the folder; one
that fails does not stop the others. A plan skips what its folder has finished already.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# Last, so that an installed patchkit is not shadowed by this checkout's.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_runs import plans, rollout

MODEL = Path("/dev/shm/patchkit-model")
SCRATCH = Path("/tmp/patchkit-bench")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=sorted(PARTS))
    parser.add_argument("plan", nargs="?", choices=sorted(plans.PLANS))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-results")))
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--no-weights", action="store_true", help="the trainer draws them")
    parser.add_argument("--kind", default="vllm_bi", choices=rollout.KINDS)
    parser.add_argument("--kinds", default=",".join(rollout.KINDS), help="for throughput")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--expert-parallel", action="store_true")
    parser.add_argument(
        "--prompts", default="256,96,96,96", help="of each policy version; each is asked twice"
    )
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--cache-gib", type=float, default=0.75)
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "sgd"])
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a trainer's batch")
    parser.add_argument("--fingerprint", action="store_true")
    parser.add_argument("--anyway", action="store_true", help="note refusals, and go on")
    parser.add_argument("--no-canary", action="store_true")
    parser.add_argument("--seed", type=int, default=0, help="of a claim's prompts")
    parser.add_argument("--name", default="", help="of the results")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=15.0, help="per throughput sample")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--concurrent", default="64,256")
    parser.add_argument("--until", type=float, default=0.0, help="end a plan's waves at this time")
    return parser.parse_args()


def child(
    out: Path, name: str, arguments: list[str], extra: dict[str, str], limit: float
) -> dict[str, Any]:
    """Run this script again; its output goes to ``out/NAME.log``."""
    begin = time.perf_counter()
    command = [sys.executable, __file__, *arguments, "--out", str(out)]
    if arguments[0] == "tests":
        command = ["bash", str(Path(__file__).parent.parent / "tests/gpu/run.sh")]
    with open(out / f"{name}.log", "w") as log:
        process = subprocess.Popen(
            command,
            stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **extra},
            start_new_session=True,
        )  # fmt: skip
        try:
            code: Any = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            code = "timeout"
        _end(process)
    return {"code": code, "seconds": round(time.perf_counter() - begin, 1)}


def _end(process: subprocess.Popen[Any]) -> None:
    """End the process and what it started: engines outlive a driver that was killed."""
    import signal

    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def model(options: argparse.Namespace) -> None:
    from benchmarks.gpu_runs.model import make

    if not (options.model / "config.json").is_file():
        # Under another name until it is whole: somebody else may be waiting for it.
        partial = options.model.with_name(options.model.name + ".partial")
        make(partial, options.layers, weights=not options.no_weights)
        partial.rename(options.model)


def exact(options: argparse.Namespace) -> None:
    """A run under contract, in as many ranks as the rollout has workers."""
    from benchmarks.gpu_runs.claim import Claim, run, set_up

    name = options.name or "-".join(
        ["exact", options.kind, f"tp{options.tensor_parallel}"] + ["ep"] * options.expert_parallel
    )
    folder = tempfile.mkdtemp(prefix="rendezvous")
    claim = Claim(
        model=options.model,
        kind=options.kind,
        tensor_parallel=options.tensor_parallel,
        expert_parallel=options.expert_parallel,
        prompts=tuple(int(n) for n in options.prompts.split(",")),
        tokens=options.tokens,
        cache_gib=options.cache_gib,
        optimizer=options.optimizer,
        learning_rate=options.learning_rate,
        budget=options.budget,
        fingerprint=options.fingerprint,
        anyway=options.anyway,
        canary=not options.no_canary,
        seed=options.seed,
        out=options.out.absolute(),
        name=name,
        rendezvous=f"file://{folder}/store",
    )
    claim = set_up(claim, SCRATCH)
    # Only now: torch must not be imported before the environment stands.
    import torch.multiprocessing as multiprocessing

    multiprocessing.spawn(run, args=(claim,), nprocs=claim.tensor_parallel)


def start(options: argparse.Namespace) -> None:
    """One cold start of an engine: empty caches, fixed requests, their bits."""
    name = options.name or f"start-{options.kind}"
    environment = rollout.environment(options.kind, SCRATCH, tag=f"-{name}-{os.getpid()}")
    os.environ.update(environment)
    rollout.start_once(
        options.model,
        options.kind,
        options.out / f"{name}.json",
        tensor_parallel=options.tensor_parallel,
        expert_parallel=options.expert_parallel,
    )


def bits(options: argparse.Namespace) -> None:
    """Compare all fingerprints in the folder, kind by kind."""
    found = {}
    for kind in filter(rollout.patched, rollout.KINDS):
        paths = [
            path
            for same in rollout.SAME_BITS.get(kind, (kind,))
            for path in sorted(options.out.glob(f"*-{same}[-.]*bits"))
        ]
        if len(paths) > 1:
            found[kind] = rollout.compare_bits(paths)
    (options.out / "bits.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found))


def grpo(options: argparse.Namespace) -> None:
    from benchmarks.gpu_runs.grpo import run

    name = options.name or f"grpo-{options.kind}"
    os.environ.update(rollout.environment(options.kind, SCRATCH, tag=f"-{name}"))
    folder = tempfile.mkdtemp(prefix="rendezvous")
    run(
        options.model, options.kind, options.steps, options.out / f"{name}.json",
        f"file://{folder}/store",
    )  # fmt: skip


def trainer(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from benchmarks.gpu_runs.trainer import measure

    model(options)
    torch.cuda.set_device(0)
    folder = tempfile.mkdtemp(prefix="rendezvous")
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=0, world_size=1,
        device_id=torch.device("cuda", 0),
    )  # fmt: skip
    result = measure(options.model, options.out)
    (options.out / "trainer.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


def operators(options: argparse.Namespace) -> None:
    """Every operator alone, against the card's limits."""
    from benchmarks.gpu_runs.operators import measure

    measure(options.out / "operators.json")


def profile(options: argparse.Namespace) -> None:
    """Where an engine's time goes, kernel by kernel."""
    name = options.name or f"profile-{options.kind}"
    os.environ.update(rollout.environment(options.kind, SCRATCH, tag=f"-{name}"))
    rollout.profile(options.model, options.kind, options.out / f"{name}.json")


def throughput(options: argparse.Namespace) -> None:
    """Engines of all kinds on the same GPUs, one at work at a time, in turn and repeated."""
    name = options.name or "throughput"
    engines, logs = {}, []
    for kind in options.kinds.split(","):
        log = open(options.out / f"{name}-{kind}.log", "w")  # noqa: SIM115 - closed at the end
        logs.append(log)
        engines[kind] = subprocess.Popen(
            [
                *(sys.executable, __file__, "serve", "--kind", kind),
                *("--model", str(options.model)),
                *("--tensor-parallel", str(options.tensor_parallel)),
                *["--expert-parallel"] * options.expert_parallel,
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env={**os.environ, **rollout.environment(kind, SCRATCH, tag=f"-{name}")},
            start_new_session=True,
        )  # fmt: skip
    results: list[dict[str, Any]] = []
    try:
        for kind, process in list(engines.items()):
            if (ready := _answer(process, "READY")) is None:
                print(f"{kind}: did not start, see {name}-{kind}.log", flush=True)
                engines.pop(kind)
            else:
                results.append(ready)
                print(ready, flush=True)
        for turn in range(options.turns):
            for concurrent in options.concurrent.split(","):
                # Whoever was first is last the next time.
                for process in list(engines.values())[:: 1 if turn % 2 == 0 else -1]:
                    if options.until and time.time() + options.seconds + 8 > options.until:
                        return
                    assert process.stdin is not None
                    process.stdin.write(f"{concurrent} {options.seconds}\n")
                    process.stdin.flush()
                    results.append(_answer(process, "MEASURED") or {})
                    print(results[-1], flush=True)
                    (options.out / f"{name}.json").write_text(json.dumps(results, indent=1))
    finally:
        for process in engines.values():
            _end(process)
        for log in logs:
            log.close()


def _answer(process: subprocess.Popen[str], word: str) -> dict[str, Any] | None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(word + " "):
            return json.loads(line[len(word) :])
    return None


def table(options: argparse.Namespace) -> None:
    """A short table of everything in the folder."""
    for path in sorted(options.out.glob("*.json")):
        data = json.loads(path.read_text())
        if isinstance(data, dict) and "phases" in data and "contract_digest" not in data:
            _show_claim(path.stem, data)
        elif path.stem.startswith("grpo-"):
            for step in data["steps"]:
                print(path.stem, step)
        elif path.stem.startswith("start-"):
            print(path.stem, data["load_s"], data["fingerprint"])
    if (path := options.out / "bits.json").is_file():
        print("bits", path.read_text().replace("\n", ""))
    if (path := options.out / "trainer.json").is_file():
        data = json.loads(path.read_text())
        for name in ("exact", "stock", "stock_masked"):
            way = data.get(name, {})
            if "replay" in way:
                print(
                    f"trainer {name:13} replay {way['replay']['median_s'] * 1e3:8.1f} ms  step "
                    f"{way['step']['median_s'] * 1e3:8.1f} ms for {data['tokens']:,} tokens"
                )
        print(f"gradient cosine {data['gradient']['cosine']:.6f}")
    found: dict[tuple[str, int], list[float]] = {}
    for path in sorted(options.out.glob("throughput*.json")):
        for one in json.loads(path.read_text()):
            if "concurrent" in one:
                found.setdefault((one["kind"], one["concurrent"]), []).append(
                    one["tokens"] / one["seconds"]
                )
    for (kind, concurrent), rates in sorted(found.items(), key=lambda x: x[0][1]):
        print(
            f"rollout {kind:16} {concurrent:>4} at once "
            + " ".join(f"{rate:9,.0f}" for rate in rates)
            + " tokens/s"
        )


def _show_claim(name: str, data: dict[str, Any]) -> None:
    for phase in data["phases"]:
        if not isinstance(phase, dict):
            continue
        for pair in ("rollout_replay", "rollout_training"):
            if pair in phase:
                print(
                    f"{name:34} version {phase['version']} {pair:17} "
                    f"{phase[pair]['mismatches']:>8,} of {phase[pair]['tokens']:,} differ"
                )
    print(f"{name:34} {data.get('artifact')} refused {len(data.get('refused', []))}")


def plan(options: argparse.Namespace) -> None:
    """Waves of runs, those of one wave side by side; what is finished is skipped."""
    done: dict[str, Any] = {}
    for number, wave in enumerate(plans.PLANS[options.plan]):
        open_runs = [run for run in wave if not _finished(options.out, run.name)]
        begin = time.perf_counter()
        with ThreadPoolExecutor(max_workers=max(1, len(open_runs))) as side_by_side:
            started = {
                run.name: side_by_side.submit(
                    child, options.out, run.name, [*run.arguments, "--name", run.name],
                    run.environment, run.limit_s,
                )
                for run in open_runs
            }  # fmt: skip
        done |= {name: result.result() for name, result in started.items()}
        print(f"wave {number}: {time.perf_counter() - begin:.0f} s {done}", flush=True)
    (options.out / f"plan-{options.plan}.json").write_text(json.dumps(done, indent=1))
    bits(options)
    table(options)


def _finished(out: Path, name: str) -> bool:
    path = out / f"{name}.json"
    if not path.is_file():
        return False
    data = json.loads(path.read_text())
    return not isinstance(data, dict) or bool(data.get("finished", True))


PARTS = {
    "plan": plan,
    "model": model,
    "exact": exact,
    "start": start,
    "bits": bits,
    "grpo": grpo,
    "trainer": trainer,
    "operators": operators,
    "profile": profile,
    "throughput": throughput,
    "serve": lambda options: rollout.serve(
        options.model,
        options.kind,
        seed=1000,
        tensor_parallel=options.tensor_parallel,
        expert_parallel=options.expert_parallel,
    ),
    "table": table,
}


def main() -> None:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    PARTS[options.part](options)


if __name__ == "__main__":
    main()
