"""Counts of several processes, added up."""

from __future__ import annotations

import pytest

from patchkit.runtime.reach import PatchNotReachedError, require_reached


def patch(symbol: str, action: str = "replace", kind: str = "function", **changes):
    identity = {"symbol": symbol, "kind": kind}
    base = {"symbol": symbol, "key": None, "action": action, "required": True}
    return {**base, "before": identity, "after": identity, **changes}


def test_each_required_patch_has_to_be_called_somewhere():
    manifest = {
        "adapter": "toy",
        "patches": [patch("m:f"), patch("m:g"), patch("m:R", "register", key="x")],
    }
    assert require_reached(manifest, [{"m:f": 1}, {"m:g": 0, "m:R[x]": 2}, {"m:g": 3}]) == {
        "m:f": 1,
        "m:g": 3,
        "m:R[x]": 2,
    }
    with pytest.raises(PatchNotReachedError) as e:
        require_reached(manifest, [{"m:f": 1, "m:g": 0}, {}])
    assert [v.subject for v in e.value.violations] == ["m:g", "m:R[x]"]


def test_what_cannot_be_counted_is_not_missed():
    """As in one process's canary: the slots of values and classes are verified, not calls."""
    uncounted = [patch("m:EPS", "value", "value"), patch("m:Norm", kind="class")]
    assert require_reached({"adapter": "toy", "patches": uncounted}, [{}]) == {}
