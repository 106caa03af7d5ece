"""Writing files so that a reader sees all of one or nothing of it."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from patchkit.errors import ConfigurationError

__all__ = ["check_writable", "sync_folder", "write_atomically", "writing"]


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Write to a place that somebody named.

    Raises:
        ConfigurationError: Nothing can be written there.
    """
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"{path}: cannot be written ({error.strerror or error}); name another place"
        ) from error


def check_writable(path: str | Path) -> None:
    """Refuse a place before the long work is done whose result is to go there.

    Raises:
        ConfigurationError: Nothing can be written there.
    """
    path = Path(path)
    with writing(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.is_file() or not path.exists():
            folder = path.parent
            while not folder.exists():  # made when there is something to put into it
                folder = folder.parent
            descriptor, trial = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=folder)
            os.close(descriptor)
            os.unlink(trial)


def write_atomically(path: str | Path, data: bytes) -> Path:
    """Write ``data`` to ``path``: temporary file, fsync, rename, fsync of the folder.

    Whoever dies in between leaves the old file, or none, and at most a temporary
    file beside it whose name starts with a dot. A link stays a link, to the new content.
    """
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):
        path.write_bytes(data)  # a pipe or a device, which a file must not replace
        return path
    place = Path(os.path.realpath(path))
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.parent / f".{place.name}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, place)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(place.parent)
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
