"""A generated part of somebody's file: what stands between two markers."""

from __future__ import annotations

from pathlib import Path

from patchkit.errors import ConfigurationError
from patchkit.files import write_atomically, writing


def write_between(file: Path, begin: str, end: str, text: str) -> None:
    """Put ``text`` between the markers.

    Raises:
        ConfigurationError: The file has no such markers, or cannot be read or written.
    """
    content = _placed(_read(file), file, begin, end, text)
    with writing(file):
        write_atomically(file, content.encode())


def is_current(file: Path, begin: str, end: str, text: str) -> bool:
    """Whether ``text`` stands between the markers already.

    Raises:
        ConfigurationError: The file has no such markers, or cannot be read.
    """
    content = _read(file)
    return _placed(content, file, begin, end, text) == content


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no UTF-8 text"
        raise ConfigurationError(f"{file}: cannot be read ({why})") from error


def _placed(content: str, file: Path, begin: str, end: str, text: str) -> str:
    head, found, rest = content.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise ConfigurationError(f"{file}: put these two lines where the table goes: {begin} {end}")
    return f"{head}{begin}{text}{end}{tail}"
