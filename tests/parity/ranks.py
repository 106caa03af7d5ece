"""Run a function in real gloo processes and collect how each of them ended."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _entry(rank: int, world: int, folder: str, fn: Callable[..., Any], args: tuple) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    begun = time.monotonic()
    try:
        outcome = {"value": fn(rank, *args)}
    except BaseException as e:
        outcome = {"error": type(e).__name__, "text": str(e), "trace": traceback.format_exc()}
    outcome["seconds"] = time.monotonic() - begun
    target = Path(folder, f"rank{rank}.json")
    target.with_suffix(".tmp").write_text(json.dumps(outcome, default=str))
    target.with_suffix(".tmp").rename(target)
    # No destroy_process_group: after a lost rank it would wait for that rank.
    os._exit(0)


def run_ranks(
    world: int, folder: Path, fn: Callable[..., Any], *args: Any, within_s: float = 60.0
) -> list[dict[str, Any] | None]:
    """Per rank: its outcome, or None where it died. Fails if any outlives ``within_s``."""
    context = mp.get_context("spawn")
    processes = [
        context.Process(target=_entry, args=(r, world, str(folder), fn, args)) for r in range(world)
    ]
    for p in processes:
        p.start()
    deadline = time.monotonic() + within_s
    for p in processes:
        p.join(max(deadline - time.monotonic(), 0.01))
    hanging = [r for r, p in enumerate(processes) if p.is_alive()]
    for p in processes:
        if p.is_alive():
            p.kill()
            p.join()
    assert not hanging, f"ranks {hanging} were still running after {within_s} s"
    outcomes = []
    for r in range(world):
        path = Path(folder, f"rank{r}.json")
        outcomes.append(json.loads(path.read_text()) if path.exists() else None)
    return outcomes


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
