"""Writing files so that a reader sees all of one or nothing of it."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["sync_folder", "write_atomically"]


def write_atomically(path: str | Path, data: bytes) -> Path:
    """Write ``data`` to ``path``: temporary file, fsync, rename, fsync of the folder.

    Whoever dies in between leaves the old file, or none, and at most a temporary
    file beside it whose name starts with a dot.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return path


def sync_folder(folder: Path) -> None:
    """Make a rename durable; what cannot be opened for this (Windows) has no need of it."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
