"""Where do two stacks part? Digests per operator and layer, and the first that differs.

Names are imported on first use: most of them need torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXPORTS = {
    "Cause": "causes",
    "Cell": "compare",
    "Comparison": "compare",
    "Diagnosis": "diagnosis",
    "DoctorError": "setup",
    "DoctorSession": "session",
    "DoctorSettings": "setup",
    "FunctionTap": "layout",
    "Layout": "layout",
    "OperatorKey": "recording",
    "Recording": "recording",
    "Workload": "setup",
    "compare": "compare",
    "read_run": "runs",
    "render_diagnosis": "page",
    "render_separation": "separation_page",
    "separate": "separation",
    "set_up": "setup",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
