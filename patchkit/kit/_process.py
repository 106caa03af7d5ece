"""Stages that need torch or vLLM run in processes of their own.

The suite's process stays free of both: a contract's preflight refuses one in which they
have read their variables, ablation forks, and a test session must not be patched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchkit.errors import Violation
from patchkit.kit._result import Outcome

if TYPE_CHECKING:
    from patchkit.kit._stages import SuiteSettings

_SECONDS = 900.0


def clean_environment() -> dict[str, str]:
    """This environment without settings of vLLM's and ours, quiet and offline."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PATCHKIT_", "VLLM_"))}
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }


def in_child(task: str, settings: SuiteSettings, *, timeout: float = _SECONDS) -> Outcome:
    """Run one task of :mod:`patchkit.kit._child` and bring its outcome home."""
    with tempfile.TemporaryDirectory(prefix="patchkit-conformance-") as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "patchkit.kit._child", task]
        command += [json.dumps(settings.as_dict()), str(answer)]
        try:
            run = subprocess.run(
                command,
                cwd=folder,
                env=clean_environment(),
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return _ended(task, f"no answer within {timeout:g} s", "")
        if not answer.is_file():
            return _ended(task, f"it ended with status {run.returncode}", run.stderr)
        return _outcome(json.loads(answer.read_text()))


def _outcome(data: dict[str, Any]) -> Outcome:
    return Outcome(
        violations=tuple(Violation(**v) for v in data["violations"]),
        figures=data["figures"],
        not_applicable=data["not_applicable"],
    )


def _ended(task: str, found: str, stderr: str) -> Outcome:
    tail = "\n".join(stderr.strip().splitlines()[-15:])
    return Outcome(
        violations=(
            Violation(
                subject=f"the process of {task!r}",
                problem="gave no answer",
                expected="an outcome",
                found=f"{found}\n{tail}" if tail else found,
                remedy="see the end of its output above",
            ),
        )
    )
