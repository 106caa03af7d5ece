"""What recording costs: sampling without the doctor, with digests, and with values held.

    python benchmarks/doctor.py [exact|stock] [hidden size]

Prints one JSON line; medians of the given repetitions, by turns, on one engine.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPETITIONS = 5


def main() -> None:
    from patchkit.parity.doctor.setup import DoctorSettings, Workload, set_up

    pair = sys.argv[1] if len(sys.argv) > 1 else "exact"
    hidden = int(sys.argv[2]) if len(sys.argv) > 2 else 128
    with tempfile.TemporaryDirectory(prefix="patchkit-doctor-") as folder:
        setup = set_up(
            DoctorSettings(
                folder=Path(folder),
                pair=pair,
                workload=Workload(sequences=32, new_tokens=48, longest=200),
                model_changes={
                    "hidden_size": hidden,
                    "head_dim": hidden // 4,
                    "moe_intermediate_size": hidden // 2,
                },
            )
        )
        from patchkit.parity.doctor.session import DoctorSession

        with DoctorSession(setup) as session:
            print(json.dumps(measure(session)))


def measure(session: Any) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"plain": [], "digests": [], "values": []}
    inside: dict[str, list[float]] = {"digests": [], "values": []}
    rows = operators = 0
    for turn in range(REPETITIONS + 1):
        for kind, budget in (("plain", None), ("digests", 0), ("values", 1 << 30)):
            taken, recording = run(session, budget)
            if turn:  # the first one warms up
                seconds[kind].append(taken)
            if recording is not None:
                rows = sum(len(o.rows) for o in recording.operators.values())
                operators = len(recording.operators)
                if turn:
                    inside[kind].append(recording.seconds)
    middle = {kind: statistics.median(values) for kind, values in seconds.items()}
    return {
        "seconds": middle,
        "in_digests": {kind: statistics.median(values) for kind, values in inside.items()},
        "ratio": {kind: middle[kind] / middle["plain"] for kind in ("digests", "values")},
        "operators": operators,
        "rows": rows,
    }


def run(session: Any, budget: int | None) -> tuple[float, Any]:
    """One sampling of the workload; without a budget nothing is recorded."""
    from dataclasses import replace

    if budget is None:
        start = time.perf_counter()
        session.sample()
        return time.perf_counter() - start, None
    session.settings = replace(session.settings, tensor_bytes=budget)
    start = time.perf_counter()
    recording, _ = session.record_rollout()
    return time.perf_counter() - start, recording


if __name__ == "__main__":
    main()
