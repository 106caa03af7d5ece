"""The benchmark's plans: every run is one that the command line takes, under its own name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent.parent))

from benchmarks import gpu
from benchmarks.gpu_runs import plans, rollout

pytestmark = pytest.mark.anywhere

RUNS = [(plan, run) for plan, waves in plans.PLANS.items() for wave in waves for run in wave]


@pytest.mark.parametrize(("plan", "run"), RUNS, ids=lambda x: getattr(x, "name", x))
def test_a_run_is_a_command(
    plan: str, run: plans.Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if run.arguments[0] == "tests":
        return  # the conformance tests' own script
    monkeypatch.setattr(
        sys, "argv", ["gpu.py", *run.arguments, "--name", run.name, "--out", str(tmp_path)]
    )
    options = gpu.parse()
    assert options.part in gpu.PARTS
    assert options.kind in rollout.KINDS
    assert options.name == run.name
    assert run.limit_s < 600


@pytest.mark.parametrize("plan", sorted(plans.PLANS))
def test_no_result_overwrites_another(plan: str) -> None:
    names = [run.name for wave in plans.PLANS[plan] for run in wave]
    assert len(names) == len(set(names))


def test_what_is_finished_is_told_from_what_is_not(tmp_path: Path) -> None:
    assert not gpu._finished(tmp_path, "run")
    (tmp_path / "run.json").write_text('{"phases": [], "finished": false}')
    assert not gpu._finished(tmp_path, "run")
    (tmp_path / "run.json").write_text('{"phases": [], "finished": true}')
    assert gpu._finished(tmp_path, "run")
    (tmp_path / "run.json").write_text("[]")
    assert gpu._finished(tmp_path, "run")


@pytest.mark.parametrize("kind", [kind for kind in rollout.KINDS if rollout.patched(kind)])
@pytest.mark.parametrize(
    ("ranks", "expert_parallel"), [(1, False), (2, False), (2, True), (4, True)]
)
def test_every_profile_has_every_topology(kind: str, ranks: int, expert_parallel: bool) -> None:
    from benchmarks.gpu_runs.claim import Claim, profile_of

    claim = Claim(
        model=Path("model"), kind=kind, tensor_parallel=ranks, expert_parallel=expert_parallel,
        prompts=(1,), tokens=1, cache_gib=1.0, optimizer="sgd", learning_rate=1.0, budget=1,
        fingerprint=False, anyway=False, canary=True, seed=0, out=Path("out"), name="name",
    )  # fmt: skip
    profile = profile_of(claim)
    assert profile.name == kind
    arguments = profile.engine_arguments("model")
    assert arguments["tensor_parallel_size"] == ranks
    assert arguments["enable_expert_parallel"] is expert_parallel
    assert arguments["weight_transfer_config"] == {"backend": "patchkit_ipc"}
    assert arguments["compilation_config"] == {"custom_ops": ["none", "+rms_norm"]}


@pytest.mark.parametrize(("work", "code"), [("print('done')", 0), ("raise SystemExit(0)", 1)])
def test_a_run_ends_its_process(work: str, code: int) -> None:
    # A thread that never ends stands for the engine's processes.
    script = f"""
import threading
from benchmarks.gpu_runs.ending import ends_process

@ends_process
def run():
    threading.Thread(target=threading.Event().wait).start()
    {work}

run()
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(gpu.__file__).parent.parent,
        timeout=60,
        check=False,
    )
    assert done.returncode == code
