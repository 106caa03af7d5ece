"""Where in a TOML file a key stands, for messages.

The standard library's parser throws line numbers away. This finds table headers
and the first line of ``key = value`` pairs, dotted and quoted keys included; what it
cannot place (keys inside inline tables) is reported at the line of what holds it.
"""

from __future__ import annotations

import re

__all__ = ["find_line", "key_lines"]

_PART = r"""(?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+)"""
_DOTTED = rf"{_PART}(?:\s*\.\s*{_PART})*"
_TABLE = re.compile(rf"^\s*\[\[?\s*({_DOTTED})\s*\]\]?")
_KEY = re.compile(rf"^\s*({_DOTTED})\s*=(.*)$")


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """Line numbers, from 1, of every table and key."""
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    closing = ""
    for number, line in enumerate(text.splitlines(), 1):
        if closing:  # inside a multi-line string nothing is a key
            if closing in line:
                closing = ""
            continue
        if match := _TABLE.match(line):
            table = _parts(match[1])
            found.setdefault(table, number)
        elif match := _KEY.match(line):
            found.setdefault((*table, *_parts(match[1])), number)
            for quotes in ('"""', "'''"):
                if match[2].count(quotes) == 1:
                    closing = quotes
    return found


def find_line(lines: dict[tuple[str, ...], int], path: tuple[str, ...]) -> int | None:
    """Line of a key, or of the nearest thing that holds it."""
    while path:
        if path in lines:
            return lines[path]
        path = path[:-1]
    return None


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(p.strip().strip("\"'") for p in re.findall(_PART, dotted))
