"""The matrix in README.md is generated, and current."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from patchkit.cli import matrix

README = Path(__file__).parents[2] / "README.md"


def test_the_matrix_in_the_readme_is_current() -> None:
    result = CliRunner().invoke(matrix.app, ["qwen3_moe", "--check", str(README)])
    assert result.exit_code == 0, result.output


def test_at_least_four_versions_are_ready_and_the_others_have_reasons() -> None:
    from patchkit.cli._readiness import readiness

    rows = readiness("qwen3_moe", ["vllm"], None, {})
    ready = {r.version for r in rows if r.state.value == "ready"}
    assert len(ready) >= 4 and {"0.26.0", "0.32.0"} <= ready
    assert all(r.reason for r in rows)
    assert not any(r.unreviewed for r in rows)
