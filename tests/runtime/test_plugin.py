"""The vLLM plugin: nothing at all, or everything, or the end of the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A stand-in for the engine: what is tested here is who calls it, where, and what
# happens afterwards, not how it patches.
FAKE_ENGINE = """
import patchkit.engine
class Manifest:
    digest = "d1"
    def as_dict(self): return {"adapter": "toy", "unreviewed": []}
class Installed:
    state = "active"; manifest = Manifest()
    def verify(self): pass
    def uninstall(self): print("UNDONE", flush=True)
def install(*, adapter, side, accept, profile):
    print("INSTALL", adapter, side, dict(accept), profile, flush=True)
    return Installed()
patchkit.engine.install = install
import patchkit.runtime.sync
patchkit.runtime.sync.register_backend = lambda: None
"""


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PATCHKIT_")}
    path = os.pathsep.join([str(ROOT), str(ROOT / "plugin")])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "PYTHONPATH": path, **env},
        cwd="/",  # `-c` would put this tree first on the path
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"PATCHKIT_ENABLE": "0"},
        {"PATCHKIT_ENABLE": ""},
        {"PATCHKIT_ADAPTER": "nonsense", "PATCHKIT_RUN_DIR": "/nowhere", "PATCHKIT_ACCEPT": "{"},
    ],
    ids=str,
)
def test_not_enabled_is_nothing(env):
    done = run(
        "import sys; before = set(sys.modules)\n"
        "import patchkit_vllm_plugin as p; p.register()\n"
        "print(sorted(set(sys.modules) - before))",
        **env,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['patchkit_vllm_plugin']"
    assert done.stderr == ""


SURROUNDED = (
    "try:\n    import patchkit_vllm_plugin as p; p.register()\n"
    "except Exception: print('SWALLOWED')\nprint('WENT ON')"
)
IN_A_THREAD = (
    "import threading, patchkit_vllm_plugin as p\n"
    "t = threading.Thread(target=p.register); t.start(); t.join(); print('WENT ON')"
)


@pytest.mark.parametrize("code", [SURROUNDED, IN_A_THREAD], ids=["surrounded", "thread"])
def test_a_switch_that_is_neither_on_nor_off_ends_the_process(code):
    done = run(code, PATCHKIT_ENABLE="true")
    assert done.returncode == 78
    assert "WENT ON" not in done.stdout
    assert done.stderr == (
        "patchkit: PATCHKIT_ENABLE: expected 1, or 0 or nothing to run unpatched; found 'true'\n"
    )


@pytest.mark.parametrize("code", [SURROUNDED, IN_A_THREAD], ids=["surrounded", "thread"])
def test_enabled_and_wrong_ends_the_process_with_the_list(code):
    wrong = {"PATCHKIT_ACCEPT": "[1]", "PATCHKIT_SAMPLING": "gredy", "PATCHKIT_CANARY": "yes"}
    done = run(code, PATCHKIT_ENABLE="1", **wrong)
    assert done.returncode == 78
    assert "WENT ON" not in done.stdout
    assert "SWALLOWED" not in done.stdout
    assert "5 violations" in done.stderr
    for name in ("PATCHKIT_ADAPTER", "PATCHKIT_RUN_DIR", *wrong):
        assert name in done.stderr
    assert "Traceback" not in done.stderr, "a refusal is a list, no traceback"


def test_a_broken_patchkit_ends_the_process_too(tmp_path):
    (tmp_path / "patchkit").mkdir()
    (tmp_path / "patchkit/__init__.py").write_text("raise RuntimeError('half an upgrade')")
    done = run(SURROUNDED, PATCHKIT_ENABLE="1", PYTHONPATH=f"{tmp_path}:{ROOT / 'plugin'}")
    assert done.returncode == 78
    assert "half an upgrade" in done.stderr
    assert "WENT ON" not in done.stdout


def test_enabled_installs_once_and_attests(tmp_path):
    done = run(
        FAKE_ENGINE + "import patchkit_vllm_plugin as p; p.register(); p.register()",
        PATCHKIT_ENABLE="1",
        PATCHKIT_ADAPTER="toy",
        PATCHKIT_RUN_DIR=str(tmp_path),
        PATCHKIT_CONTRACT_DIGEST="c1",
        PATCHKIT_PROFILE="fast",
        PATCHKIT_ACCEPT='{"m:f": "abc"}',
        VLLM_CACHE_ROOT="/c/vllm",
        TORCHINDUCTOR_CACHE_DIR="/c/inductor",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "INSTALL toy rollout {'m:f': 'abc'} fast"
    assert done.stdout.count("INSTALL") == 1
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("driver-0-")
    made = json.loads(path.read_text())
    assert (made["contract_digest"], made["manifest_digest"], made["state"]) == (
        "c1",
        "d1",
        "active",
    )
    assert made["environment"]["PATCHKIT_ADAPTER"] == "toy"
    assert made["environment"]["VLLM_CACHE_ROOT"] == "/c/vllm/patchkit-d1"
    assert made["environment"]["TORCHINDUCTOR_CACHE_DIR"] == "/c/inductor/patchkit-d1"


def test_what_cannot_attest_is_undone(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way of a folder")
    done = run(
        FAKE_ENGINE
        + "import os, patchkit_vllm_plugin as p\n"
        + "try: p.register()\n"
        + "finally: print('ROOT', os.environ['VLLM_CACHE_ROOT'])",
        PATCHKIT_ENABLE="1",
        PATCHKIT_ADAPTER="toy",
        PATCHKIT_RUN_DIR=str(blocked / "run"),
        VLLM_CACHE_ROOT="/c/vllm",
    )
    assert done.returncode == 78
    assert "UNDONE" in done.stdout
    assert "ROOT /c/vllm\n" in done.stdout, "the folders are the user's again"


ROLES = """
if __name__ == "__main__":
    import multiprocessing as mp
    from patchkit.runtime.worker import process_role
    ctx = mp.get_context("fork")
    q = ctx.Queue()
    for name in ("VllmWorker-3", "EngineCore", "EngineCore_DP2", "Whatever-1"):
        p = ctx.Process(target=lambda: q.put(process_role()), name=name); p.start(); p.join()
        print(name, *q.get())
    print("main", *process_role())
    import types
    __spec__ = types.SimpleNamespace(name="vllm.model_executor.models.registry")
    print("inspecting", *process_role())
"""


def test_roles_are_told_apart():
    done = run(ROLES)
    assert done.stdout.splitlines() == [
        "VllmWorker-3 worker 3",
        "EngineCore engine-core 0",
        "EngineCore_DP2 engine-core 2",
        "Whatever-1 driver 0",
        "main driver 0",
        "inspecting inspector 0",
    ], done.stderr


def test_the_inspector_installs_nothing(tmp_path):
    done = run(
        "import types; __spec__ = types.SimpleNamespace("
        "name='vllm.model_executor.models.registry')\n"
        + FAKE_ENGINE
        + "import patchkit_vllm_plugin as p; p.register(); print('done')",
        PATCHKIT_ENABLE="1",
        PATCHKIT_ADAPTER="toy",
        PATCHKIT_RUN_DIR=str(tmp_path),
    )
    assert done.stdout.strip() == "done", done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.stack
def test_real_vllm_cannot_go_on_without_it():
    pytest.importorskip("vllm")
    done = run(
        "from vllm.plugins import load_general_plugins\n"
        "try: load_general_plugins()\nexcept Exception: pass\nprint('WENT ON')",
        PATCHKIT_ENABLE="1",
        VLLM_LOGGING_LEVEL="ERROR",
    )
    assert done.returncode == 78, done.stderr[-2000:]
    assert "WENT ON" not in done.stdout
    assert "PATCHKIT_ADAPTER" in done.stderr
