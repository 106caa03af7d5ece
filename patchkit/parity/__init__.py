"""Proving that rollout and replay agree, bit for bit.

Names are imported on first use: most of them need torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXPORTS = {
    "GateClosedError": "gate",
    "GateReport": "gate",
    "GateStep": "gate",
    "Mismatch": "metrics",
    "OracleResult": "oracle",
    "ParityError": "gate",
    "ParityGate": "gate",
    "ParityMetrics": "metrics",
    "RankLostError": "gate",
    "SelectedLogprobs": "oracle",
    "compare_logprobs": "metrics",
    "compare_rows": "metrics",
    "merge_metrics": "metrics",
    "three_way": "oracle",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
