"""Structured logs: one JSON object a line in the run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import structlog


def open_log(folder: Path) -> Any:
    """A logger that writes ``loop.jsonl``; every event carries the time and its figures."""
    folder.mkdir(parents=True, exist_ok=True)
    return structlog.wrap_logger(
        structlog.WriteLogger((folder / "loop.jsonl").open("a", buffering=1)),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ],
    )
