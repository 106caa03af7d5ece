"""What the pages say about the adapters is so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/adapters.md").read_text(encoding="utf-8")
ADAPTERS = ("qwen3", "glm4_moe", "qwen3_moe")
COLUMNS = ("__init__.py", "coverage.py", "tiny.py", "operators.py")


def lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_lines_are_counted(adapter: str) -> None:
    folder = ROOT / "adapters" / adapter
    # qwen3_moe is counted without what its CUDA profiles need.
    others = ("weights.py",) if adapter == "qwen3_moe" else ()
    files = [folder / name for name in (*COLUMNS, *others)]
    if not others:
        assert sorted(files) == sorted(folder.glob("*.py"))
    counts = [lines(folder / name) for name in COLUMNS] + [sum(map(lines, files))]
    assert f"| `{adapter}` | {' | '.join(map(str, counts))} |" in PAGE


def test_the_declaration_shown_is_the_adapters() -> None:
    source = (ROOT / "adapters/qwen3/__init__.py").read_text(encoding="utf-8")
    assert source[source.index("_HERE") :].rstrip() in PAGE


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_coverage_table_is_current(adapter: str) -> None:
    readme = ROOT / "adapters" / adapter / "README.md"
    run = subprocess.run(
        [sys.executable, "-m", "patchkit", "coverage", adapter, "--check", str(readme), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_a_table_that_is_not_current_is_noticed(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    text = (ROOT / "adapters/qwen3/README.md").read_text(encoding="utf-8")
    readme.write_text(text.replace("| rollout | `RMSNorm` | exact |", "| rollout | `RMSNorm` | |"))
    run = subprocess.run(
        [sys.executable, "-m", "patchkit", "coverage", "qwen3", "--check", str(readme)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "not current" in run.stderr


def test_no_adapter_carries_an_operator_of_its_own() -> None:
    """A replacement that an adapter writes itself belongs into the bindings."""
    from patchkit.engine import find_adapter

    for name in ("qwen3", "glm4_moe"):
        adapter = find_adapter(name)
        for patch in (*adapter.rollout, *adapter.trainer):
            assert str(patch.replacement).startswith("patchkit."), patch.symbol
