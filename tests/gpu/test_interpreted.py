"""Kernels that need nothing of vLLM's, in Triton's interpreter: the arithmetic without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = pytest.mark.anywhere

HERE = Path(__file__).parent


CASES = "test_admission_cases.py"


@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("test_sums.py", ""),
        ("test_grouped.py", ""),
        (CASES, "not experts and not slices"),
        pytest.param(CASES, "experts or slices", marks=pytest.mark.nightly),
    ],
)
def test_in_the_interpreter(file: str, chosen: str) -> None:
    # Triton decides at its import whether it interprets: hence a process of its own.
    variables = {
        "TRITON_INTERPRET": "1",
        "PATCHKIT_GPU_TEST_DEVICE": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", HERE / file]
    command += ["-k", chosen] if chosen else []
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > 10, done.stdout[-500:]
    assert "skipped" not in done.stdout, done.stdout[-500:]
