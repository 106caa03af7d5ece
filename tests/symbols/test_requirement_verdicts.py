"""What a verdict tells people to do."""

from __future__ import annotations

import pytest

from patchkit.symbols import read_module
from patchkit.symbols._compare import compare, gravest
from patchkit.symbols._drift import Finding
from patchkit.symbols._verdict import Requirement, State, judge_requirement


@pytest.mark.parametrize(
    ("role", "remedy"),
    [
        ("patch", "write a replacement of the new signature"),
        ("relies_on", "change what calls it by the old signature"),
        ("depends_on", "change what calls it by the old signature"),
    ],
)
def test_a_new_signature_asks_of_each_role_what_it_can_do(role: str, remedy: str) -> None:
    old, new = (
        read_module(source, "up", "up.py").symbols["f"]
        for source in ("def f(x, past): return x", "def f(x, cache): return x")
    )
    changes = compare(old, new)
    finding = Finding(symbol="up:f", kind=gravest(changes), changes=changes, old=old, new=new)
    verdict = judge_requirement(
        Requirement(symbol="up:f", role=role), "2.0", new, finding, {}, {}, "mine"
    )
    assert verdict.state is State.BROKEN
    assert "past" in verdict.reason
    assert remedy in verdict.reason
