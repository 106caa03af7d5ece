"""The code in docs/providers.md runs and prints what the page says it prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.stack

PAGE = Path(__file__).parents[2] / "docs" / "providers.md"


def test_the_example_prints_what_it_shows(capsys):
    text = PAGE.read_text(encoding="utf-8")
    code, shown = re.search(r"```python\n(.*?)```\s+```text\n(.*?)```", text, re.S).groups()
    torch.manual_seed(0)
    exec(code, {"__name__": "example"})
    printed = capsys.readouterr().out.splitlines()
    # Values and bits are the machine's; what is claimed about them is not.
    assert printed[0] == shown.splitlines()[0] == "reference: passed"
    assert printed[1].startswith("stock float32, ")
    assert re.search(r"differs at element .* \(0x[0-9a-f]{8}\) against .*", printed[1])


def test_the_limits_are_the_providers_own():
    from patchkit.providers.attention import _VALUE_BITS, _WEIGHT_BITS
    from patchkit.providers.linear import OPERAND_BITS

    text = PAGE.read_text(encoding="utf-8")
    for bits, row in (
        (2 * OPERAND_BITS, "matrix products"),
        (_WEIGHT_BITS + _VALUE_BITS, "weighted sum of values"),
        (32, "sums of exponentials"),
    ):
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {row}")]
        assert f"{1 << (53 - bits):,}" in line
