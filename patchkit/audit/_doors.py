"""Entry points that the project's packaging declares."""

from __future__ import annotations

import ast
import configparser
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from patchkit.audit._project import Project
from patchkit.audit._sightings import Door, Place

GROUPS = frozenset({
    "vllm.general_plugins", "vllm.platform_plugins", "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins", "sglang.plugins", "torch.backends",
})  # fmt: skip
_STARTUP = ("sitecustomize.py", "usercustomize.py")
_DEPTH = 4


def declared_doors(project: Project) -> list[Door]:
    """Entry points in pyproject.toml, setup.cfg and setup.py; modules run at start-up."""
    found: list[Door] = []
    for path in _packaging_files(project.base):
        relative = path.relative_to(project.base).as_posix()
        try:
            text = path.read_text("utf-8", "replace")
        except OSError:
            continue
        readers = {"pyproject.toml": _pyproject, "setup.cfg": _setup_cfg, "setup.py": _setup_py}
        for group, name, target in readers[path.name](text):
            if group in GROUPS:
                found.append(Door(group, name, target, Place(relative, _line_of(text, target))))
    for file in project.files:
        if file.path.name in _STARTUP:
            found.append(Door("python start-up", "", file.module, Place(file.relative, 1)))
    return found


def _packaging_files(base: Path) -> Iterator[Path]:
    for depth in range(_DEPTH):
        for name in ("pyproject.toml", "setup.cfg", "setup.py"):
            for path in sorted(base.glob("*/" * depth + name)):
                if not any(p.startswith(".") for p in path.relative_to(base).parts):
                    yield path


def _pyproject(text: str) -> Iterator[tuple[str, str, str]]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    tool = data.get("tool", {})
    for table in (
        data.get("project", {}).get("entry-points", {}),
        tool.get("poetry", {}).get("plugins", {}),
    ):
        for group, entries in table.items():
            if isinstance(entries, dict):
                for name, target in entries.items():
                    yield group, name, str(target)


def _setup_cfg(text: str) -> Iterator[tuple[str, str, str]]:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string(text)
    except configparser.Error:
        return
    if parser.has_section("options.entry_points"):
        for group, lines in parser.items("options.entry_points"):
            for line in lines.splitlines():
                yield from _entry(group, line)


def _setup_py(text: str) -> Iterator[tuple[str, str, str]]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Dict):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                continue
            if not re.fullmatch(r"[\w.]+", key.value):
                continue
            entries = value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]
            for entry in entries:
                if isinstance(entry, ast.Constant) and isinstance(entry.value, str):
                    for line in entry.value.splitlines():
                        yield from _entry(key.value, line)


def _entry(group: str, line: str) -> Iterator[tuple[str, str, str]]:
    name, equals, target = line.partition("=")
    if equals:
        yield group, name.strip(), target.strip()


def _line_of(text: str, target: str) -> int:
    at = text.find(target)
    return text.count("\n", 0, at) + 1 if at >= 0 else 1
