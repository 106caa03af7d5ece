#!/usr/bin/env python3
"""Exactness and speed on real GPUs; docs/gpu.md says how to bring vLLM there.

    python benchmarks/gpu.py all --out RESULTS            # everything that fits the GPUs present
    python benchmarks/gpu.py exact --tensor-parallel 2 --expert-parallel --out RESULTS

Each part runs in processes of its own, writes a log and a JSON file into the
folder, and one that fails does not stop the others.
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

from benchmarks.gpu_runs import rollout

MODEL = Path("/dev/shm/patchkit-model")
SCRATCH = Path("/tmp/patchkit-bench")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "part", choices=["all", "model", "exact", "trainer", "throughput", "serve", "table"]
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-results")))
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--kind", default="vllm_bi", choices=rollout.KINDS)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--expert-parallel", action="store_true")
    parser.add_argument("--prompts", type=int, default=256, help="each is asked twice")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--cache-gib", type=float, default=1.5)
    parser.add_argument("--seconds", type=float, default=8.0, help="per throughput sample")
    parser.add_argument("--turn", type=Path, help="lock file shared by runs on the same GPUs")
    parser.add_argument("--turns", type=int, default=2)
    return parser.parse_args()


def child(
    out: Path, name: str, arguments: list[str], extra: dict[str, str], limit: float
) -> dict[str, Any]:
    """Run this script again; its output goes to ``out/NAME.log``."""
    begin = time.perf_counter()
    with open(out / f"{name}.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, *arguments, "--out", str(out)],
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
        make(options.model, options.layers)


def name_of(options: argparse.Namespace) -> str:
    name = f"exact-{options.kind}-tp{options.tensor_parallel}"
    return name + ("-ep" if options.expert_parallel else "")


def exact(options: argparse.Namespace) -> None:
    import torch.multiprocessing as multiprocessing

    from benchmarks.gpu_runs.exactness import run

    model(options)
    os.environ.update(rollout.environment(options.kind, SCRATCH, tag=name_of(options)[5:]))
    folder = tempfile.mkdtemp(prefix="rendezvous")
    world = options.tensor_parallel
    multiprocessing.spawn(
        run,
        args=(
            world, options.model, options.kind, options.expert_parallel, options.prompts,
            options.tokens, options.updates, options.cache_gib,
            options.out / f"{name_of(options)}.json", f"file://{folder}/store",
            options.turn,
        ),
        nprocs=world,
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


def throughput(options: argparse.Namespace) -> None:
    """All engines side by side on one GPU, measured in turn."""
    model(options)
    engines, logs = {}, []
    for kind in rollout.KINDS:
        log = open(options.out / f"serve-{kind}.log", "w")  # noqa: SIM115 - closed at the end
        logs.append(log)
        engines[kind] = subprocess.Popen(
            [sys.executable, __file__, "serve", "--kind", kind, "--model", str(options.model)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env={**os.environ, **rollout.environment(kind, SCRATCH, tag="-serve")},
            start_new_session=True,
        )  # fmt: skip
    results: list[dict[str, Any]] = []
    try:
        for kind, process in list(engines.items()):
            if (ready := _answer(process, "READY")) is None:
                print(f"{kind}: did not start, see serve-{kind}.log", flush=True)
                engines.pop(kind)
            else:
                results.append(ready)
                print(ready, flush=True)
        for _ in range(options.turns):
            for concurrent in (64, 256):
                for process in engines.values():
                    assert process.stdin is not None
                    process.stdin.write(f"{concurrent} {options.seconds}\n")
                    process.stdin.flush()
                    results.append(_answer(process, "MEASURED") or {})
                    print(results[-1], flush=True)
                    (options.out / "throughput.json").write_text(json.dumps(results, indent=1))
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
    for path in sorted(options.out.glob("exact-*.json")):
        data = json.loads(path.read_text())
        for phase in data["phases"]:
            for pair in ("rollout_replay", "rollout_training"):
                if pair in phase:
                    print(
                        f"{path.stem:28} version {phase['version']} {pair:17} "
                        f"{phase[pair]['mismatches']:>8,} of {phase[pair]['tokens']:,} differ"
                    )
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
    if (path := options.out / "throughput.json").is_file():
        found: dict[tuple[str, int], list[float]] = {}
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


def everything(options: argparse.Namespace) -> None:
    import torch

    options.out.mkdir(parents=True, exist_ok=True)
    done = {"model": child(options.out, "model", ["model"], {}, 120)}
    gpus = torch.cuda.device_count()
    if gpus == 1:
        done["exact-tp1"] = child(options.out, "exact-tp1", ["exact"], {}, 420)
        done["trainer"] = child(options.out, "trainer", ["trainer"], {}, 240)
        done["throughput"] = child(options.out, "throughput", ["throughput"], {}, 500)
    else:
        # Both load at once and take turns: loading is most of a run.
        turn = ["--turn", str(options.out / ".turn")]
        with ThreadPoolExecutor() as both:
            runs = {
                name: both.submit(
                    child,
                    options.out,
                    name,
                    ["exact", "--tensor-parallel", "2", *more, *turn],
                    {},
                    420,
                )
                for name, more in (("exact-tp2", []), ("exact-tp2-ep", ["--expert-parallel"]))
            }
        done |= {name: run.result() for name, run in runs.items()}
    (options.out / "parts.json").write_text(json.dumps(done, indent=1))
    print(json.dumps(done))
    table(options)


def main() -> None:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.part == "serve":
        rollout.serve(options.model, options.kind, seed=1000)
    else:
        {
            "all": everything,
            "model": model,
            "exact": exact,
            "trainer": trainer,
            "throughput": throughput,
            "table": table,
        }[options.part](options)


if __name__ == "__main__":
    main()
