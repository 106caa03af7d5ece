"""An engine that starts warm under another patch set compiles again."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NORM = "vllm.model_executor.layers.layernorm:RMSNorm.forward_native"

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.nightly]

# Two replacements in one file: what vLLM compares when it loads, the sources of what
# was traced, is the same for both. Zeros in front of the head make every token equal.
TOY = """
import os
from patchkit.engine import Adapter, Patch

adapter = Adapter(name="warm_toy", rollout=(Patch(
    symbol="vllm.model_executor.layers.layernorm:RMSNorm.forward_native",
    action="replace", replacement="warm_toy:" + os.environ["WARM_TOY"],
    reason="a test", consequence="none", until="never",
),))

def halved(self, x, residual=None):
    if residual is not None:
        x = residual = x + residual
    y = x.float()
    y = y * (y.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
    y = (y * self.weight.float() * 0.5).to(x.dtype)
    return y if residual is None else (y, residual)

def silenced(self, x, residual=None):
    y = x * 0
    return y if residual is None else (y, residual)
"""
UNIFORM = pytest.approx([-math.log(512)] * 3, abs=1e-5)


def start(folder: Path, patches: str, run: str, how: str = "plugin", **env: str) -> dict:
    attestations = folder / run
    attestations.mkdir()
    clean = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("PATCHKIT_", "VLLM_", "TORCHINDUCTOR_", "TORCHDYNAMO_"))
    }
    settings = {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "PATCHKIT_ENABLE": "1" if how == "plugin" else "0",
        "PATCHKIT_CANARY": "1",
        "PATCHKIT_ADAPTER": "warm_toy",
        "PATCHKIT_RUN_DIR": str(attestations),
        "WARM_TOY": patches,
        "PYTHONPATH": str(folder / "site"),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "warm_script.py"), str(folder / "model"), how],
        env={**clean, **settings, **env},
        capture_output=True,
        text=True,
        timeout=240,
    )
    lines = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    result = json.loads(lines[0].removeprefix("RESULT "))
    for path in attestations.glob("*.json"):
        told = json.loads(path.read_text())
        result["root"] = told["environment"]["VLLM_CACHE_ROOT"]
        result["digest"] = told["manifest_digest"]
    return result


@pytest.mark.timeout(600)
def test_a_changed_patch_set_is_compiled_again(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from patchkit_adapters.qwen3_moe.tiny import make_tiny_model

    make_tiny_model(tmp_path / "model", num_hidden_layers=1)
    info = tmp_path / "site" / "warm_toy-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: warm-toy\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[patchkit.adapters]\nwarm_toy = warm_toy:adapter\n")
    (tmp_path / "site" / "warm_toy.py").write_text(TOY)

    cold = start(tmp_path, "halved", "cold")
    assert cold["compiled"] and not cold["loaded"]
    assert cold["hits"][NORM] and not cold["evident"]
    assert cold["root"] == str(tmp_path / "vllm" / f"patchkit-{cold['digest'][:16]}")
    assert cold["inductor"].startswith(cold["root"])
    assert cold["logprobs"] != UNIFORM

    warm = start(tmp_path, "halved", "warm")
    assert not warm["compiled"] and warm["loaded"] == 1
    assert warm["evident"] == [NORM], "nothing was traced here; what was, counts"
    assert warm["hits"] == cold["hits"]
    assert warm["logprobs"] == cold["logprobs"]

    # What would happen otherwise: the same folder, another patch set, no plugin.
    shared = start(tmp_path, "silenced", "shared", "without", VLLM_CACHE_ROOT=cold["root"])
    assert shared["loaded"] == 1
    assert shared["logprobs"] == cold["logprobs"], "vLLM by itself runs the old graph"

    changed = start(tmp_path, "silenced", "changed")
    assert changed["compiled"] and not changed["loaded"]
    assert changed["root"] != cold["root"]
    assert Path(changed["root"]).parent == Path(cold["root"]).parent
    assert changed["logprobs"] == UNIFORM
