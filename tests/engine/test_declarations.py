"""A declaration that cannot be meant is refused where it is written, with all of it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from patchkit.engine import Adapter, _discover, find_adapter, inspect_plan, install
from patchkit.engine.errors import DeclarationError
from patchkit.errors import ConfigurationError

from .conftest import Toys, patch, rollout


def new(x=1):
    return "new"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"reason": None}, "reason is no string"),
        ({"until": 5, "evidence": 5}, "until is no string; evidence is no string"),
        ({"symbol": None}, "symbol is no string"),
        ({"caches": "m:f"}, "caches is a str; write a tuple"),
        ({"depends_on": ["m:f"]}, "depends_on is a list; write a tuple"),
        ({"versions": "latest"}, "versions: Invalid specifier: 'latest'"),
        ({"versions": 5}, "versions: "),
        ({"versions": ">=" + "9" * 5000}, "versions: "),
    ],
)
def test_a_patch(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(DeclarationError, match=words):
        patch(**{"symbol": "m:f", "replacement": new, **wrong})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"name": None}, "the name None is no identifier"),
        ({"rollout": patch("m:f", new)}, "rollout is no tuple"),
        ({"rollout": ("m:f",), "after": (1,)}, "rollout holds .* no Patch; after holds .* no str"),
        ({"manifests": ("manifests",)}, "manifests holds something that is no Path"),
    ],
)
def test_an_adapter(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(DeclarationError, match=words):
        Adapter(**{"name": "toy", **wrong})


@pytest.mark.parametrize("symbols", [{"m:f": 5}, {"m:f": {"digest": 5}}])
def test_reviews_of_another_form(mk: Toys, symbols: Any) -> None:
    up = mk("def f(x=1): return 'old'\n")
    adapter = rollout(patch(f"{up.__name__}:f", new), reviewed={"schema": 1, "symbols": symbols})
    with pytest.raises(DeclarationError, match="reviewed digests of m:f: expected a table"):
        install(adapter, "rollout")


@pytest.mark.parametrize("use", [install, inspect_plan])
def test_what_is_no_adapter_and_accepts_nothing(mk: Toys, use: Callable[..., Any]) -> None:
    with pytest.raises(ConfigurationError, match="an Adapter, found list"):
        use(["toy"], "rollout")
    up = mk("def f(x=1): return 'old'\n")
    with pytest.raises(ConfigurationError, match="accept: expected symbol -> digest, found list"):
        use(rollout(patch(f"{up.__name__}:f", new)), "rollout", accept=["m:f"])


def test_slots_to_leave_are_no_string(mk: Toys) -> None:
    up = mk("def f(x=1): return 'old'\n")
    with install(rollout(patch(f"{up.__name__}:f", new)), "rollout") as installed:
        with pytest.raises(ConfigurationError, match=r"leave is the string .*; write a tuple"):
            installed.uninstall(leave=f"{up.__name__}:f")  # type: ignore[arg-type]
        installed.verify()


def test_a_side_without_patches_is_said_to_have_none(mk: Toys) -> None:
    up = mk("def f(x=1): return 'old'\n")
    (found,) = inspect_plan(rollout(patch(f"{up.__name__}:f", new)), "trainer").violations
    assert found.problem == "it has no patch on its trainer side"


def test_an_adapter_whose_package_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("broken", "no_such_package_here:adapter", _discover.GROUP)
    monkeypatch.setattr(_discover, "_entry_points", lambda: [point])
    with pytest.raises(DeclarationError, match="cannot be loaded: ModuleNotFoundError"):
        find_adapter("broken")
