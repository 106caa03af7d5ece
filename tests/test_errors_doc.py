"""docs/errors.md explains every class that patchkit raises."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "errors.md"
ROW = re.compile(r"^\| `(\w+)` \| (\S.*\S) \| (\S.*\S) \|$", re.M)
EXAMPLE = re.compile(r"^\| \[.+\]\(#.+\) \| `(\w+)` \|$", re.M)


def classes() -> set[str]:
    """Exceptions that are defined anywhere in patchkit, its adapters and its plugin."""
    bases: dict[str, set[str]] = {}
    for folder in ("patchkit", "adapters", "plugin"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    bases[node.name] = {ast.unparse(b).rpartition(".")[2] for b in node.bases}
    found = {"Exception", "ValueError"}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return {name for name in found - {"Exception", "ValueError"} if not name.startswith("_")}


def test_every_error_is_explained_and_none_is_that_does_not_exist():
    text = PAGE.read_text(encoding="utf-8")
    explained = {row[0] for row in ROW.findall(text)}
    assert explained | set(EXAMPLE.findall(text)) == classes()


def test_each_has_one_explanation_with_something_to_do():
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    assert len({name for name, _, _ in rows}) == len(rows)
    assert all(len(happened) > 15 and len(to_do) > 15 for _, happened, to_do in rows)
