"""Every test that the table of cases names is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs/parity-cases.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/\S+\.py)::(\w+)`", DOC)))


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}


def test_every_case_names_a_test():
    rows = [line for line in DOC.splitlines() if line.startswith("| P")]
    assert [row[2:5] for row in rows] == [f"P{n:02}" for n in range(1, 11)]
    assert all("`tests/" in row for row in rows)


@pytest.mark.parametrize(("file", "name"), NAMED, ids=lambda x: str(x).rpartition("/")[2])
def test_it_is_there(file: str, name: str):
    assert (ROOT / file).is_file(), file
    assert name in functions(file)
