"""The change to an adapter's declaration that follows from moved symbols, as a patch.

Declarations are Python, and people write symbols as sums of constants
(``_LAYERS + "linear:f"``). Every string expression in the adapter's files is computed
from the constants beside it; one that yields the old symbol is replaced by the new one.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from difflib import unified_diff
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patchkit.engine import Adapter


def declaration_files(adapter: Adapter) -> list[Path]:
    """The Python files beside the adapter's reviewed digests or profiles."""
    for place in (adapter.reviewed, adapter.profiles):
        if isinstance(place, Path) and place.parent.is_dir():
            return sorted(place.parent.glob("*.py"))
    return []


def proposal(files: Sequence[Path], moves: Sequence[Mapping[str, Any]]) -> str:
    """A unified diff with a header that says what is proposed and how sure it is."""
    lines = [
        "Proposed by `patchkit adapt`; nothing was applied. Check each place, and whether the",
        "old symbol must stay for older versions (then split the patch by `versions`).",
        "",
    ]
    for move in moves:
        lines.append(
            f"  {move['symbol']} -> {move['new_symbol']} since {move['version']} "
            f"(confidence {move['confidence']:.2f}: {move['evidence']})"
        )
    lines.append("")
    missing = {m["symbol"] for m in moves}
    targets = {m["symbol"]: m["new_symbol"] for m in moves}
    body: list[str] = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        changed, found = _replaced(text, targets)
        missing -= found
        if changed != text:
            name = _from_here(file)
            body += unified_diff(
                text.splitlines(keepends=True),
                changed.splitlines(keepends=True),
                f"a/{name}",
                f"b/{name}",
            )
    for symbol in sorted(missing):
        lines.append(f"Not found in the declaration, enter it by hand: {symbol}")
    return "\n".join(lines) + "\n" + "".join(body)


def _from_here(file: Path) -> str:
    """The file as `git apply`, called where patchkit was, expects it."""
    try:
        return file.resolve().relative_to(Path.cwd()).as_posix()
    except ValueError:
        return f"{file.parent.name}/{file.name}"


def _replaced(text: str, targets: Mapping[str, str]) -> tuple[str, set[str]]:
    tree = ast.parse(text)
    constants: dict[str, str] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            value = _string(statement.value, constants)
            if isinstance(statement.targets[0], ast.Name) and value is not None:
                constants[statement.targets[0].id] = value
    places: list[tuple[ast.expr, str]] = []
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.BinOp, ast.Constant)):
            value = _string(node, constants)
            if value is not None and value in targets:
                places.append((node, targets[value]))
                found.add(value)
    lines = text.splitlines(keepends=True)
    for place, new in sorted(places, key=lambda p: (-p[0].lineno, -p[0].col_offset)):
        start, end = place.lineno - 1, (place.end_lineno or place.lineno) - 1
        first = lines[start].encode()[: place.col_offset].decode()
        last = lines[end].encode()[place.end_col_offset or 0 :].decode()
        lines[start : end + 1] = [f'{first}"{new}"{last}']
    return "".join(lines), found


def _string(node: ast.AST, constants: Mapping[str, str]) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _string(node.left, constants), _string(node.right, constants)
        return None if left is None or right is None else left + right
    return None
