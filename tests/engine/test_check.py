"""``patchkit check``: the plan, the exit codes, and how a drifted symbol is let through."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from patchkit.cli.check import app
from patchkit.engine import Adapter, _discover

from .conftest import Toys, patch, reviewed


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Adapters that are found by name, as if installed."""
    adapters: dict[str, Adapter] = {}

    class Point:
        def __init__(self, name: str) -> None:
            self.name = self.value = name

        def load(self) -> Adapter:
            return adapters[self.name]

    monkeypatch.setattr(_discover, "_entry_points", lambda: [Point(name) for name in adapters])
    return adapters


def test_a_clean_plan_is_shown_and_nothing_is_changed(mk: Toys, known: Any) -> None:
    name = mk.write("def f(x): return 'old'\nALIAS = f\nPAIR = (f,)\n")
    mk.write(f"from {name} import f\ndef g(x): return f(x)\n", name="check_ours")
    known["toy"] = Adapter(
        name="toy",
        rollout=(
            patch(f"{name}:f", "check_ours:g", accepts_unreachable=(f"{name}:PAIR[0]",)),
            patch("packaging.version:Version.major", lambda self: 0, versions="<1"),
        ),
        reviewed=reviewed(f"{name}:f"),
    )
    result = run("toy")
    assert result.exit_code == 0, result.output
    for expected in (
        f"replace {name}:f",
        f"writes   {name}:f",
        f"writes   {name}:ALIAS",
        f"accepts  {name}:PAIR[0]",
        "keeps    check_ours:f",
        "not for this version: packaging.version:Version.major <1",
        "can be installed",
    ):
        assert expected in result.output
    assert "UNREVIEWED" not in result.output
    assert sys.modules[name].f(1) == "old"


def test_static_imports_nothing(mk: Toys, known: Any) -> None:
    name = mk.write("raise RuntimeError\ndef f(x): return 'old'\n")
    known["toy"] = Adapter(name="toy", rollout=(patch(f"{name}:f", lambda x: 0),))
    result = run("toy", "--static")
    assert result.exit_code == 0, result.output
    assert "waits for its import" in result.output
    assert "UNREVIEWED" in result.output, "an adapter without reviews says so"
    result = run("toy")
    assert f"not imported here, verified from its source: {name} (RuntimeError" in result.output


def test_findings_are_exit_1_and_say_how_to_accept_one(mk: Toys, known: Any) -> None:
    name = mk.write("def f(x): return 'old'\n")
    symbol = f"{name}:f"
    old = {"schema": 1, "symbols": {symbol: {"0" * 32: ["0.9"]}}}
    known["toy"] = Adapter(name="toy", rollout=(patch(symbol, lambda x: 0),), reviewed=old)
    result = run("toy", "--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    (violation,) = told["plans"][0]["violations"]
    assert violation["subject"] == symbol and not told["clean"]
    accept = violation["remedy"].partition("--accept '")[2].rstrip("'")
    result = run("toy", "--accept", accept)
    assert result.exit_code == 0, result.output
    assert f"UNREVIEWED {symbol}" in result.output
    assert "can be installed, UNREVIEWED" in result.output
    told = json.loads(run("toy", "--json", "--accept", accept).stdout)
    assert told["plans"][0]["reviewed"] is False


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("nobody",), "no adapter is called 'nobody'"),
        (("toy", "--side", "both"), "side 'both'"),
        (("toy", "--accept", "x"), "write SYMBOL=DIGEST"),
        (("toy", "--profile", "fast"), "no profile 'fast'"),
    ],
)
def test_wrong_usage_is_exit_2(mk: Toys, known: Any, arguments: Any, match: str) -> None:
    name = mk.write("def f(x): return 'old'\n")
    known["toy"] = Adapter(name="toy", rollout=(patch(f"{name}:f", lambda x: 0),))
    result = run(*arguments)
    assert result.exit_code == 2
    assert match in result.output + result.stderr
