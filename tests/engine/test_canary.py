"""Installed is not reached: the canary counts, names what ran instead, and leaves nothing."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from patchkit.engine import (
    Value,
    _canary,
    cache_environment,
    exact_context,
    install,
    load_evidence,
    patch_set_digest,
    store_evidence,
)
from patchkit.engine._report import identity_of_replacement
from patchkit.engine.errors import CanaryBusyError, NoInstallationError, NotReachedError

from .conftest import Toys, patch, rollout, trainer

UP = """
class V1:
    def run(self, x): return 'v1'
class V2:
    def run(self, x): return 'v2'
USE_V2 = True
def get(): return (V2 if USE_V2 else V1)()
def f(x=1): return 'old'
def gen(n):
    yield n
async def coro(): return 'old'
"""


def run(self, x):
    return "new"


def test_a_patch_on_a_class_nobody_selects_any_more_fails(mk: Toys) -> None:
    up = mk(UP)
    n = up.__name__
    with install(rollout(patch(f"{n}:V1.run", run)), "rollout") as inst:
        with pytest.raises(NotReachedError) as caught, inst.canary():
            assert up.get().run(1) == "v2"
        text = str(caught.value)
        assert f"{n}:V1.run: was not reached" in text
        assert f"what ran instead: {n}:" in text and "run" in text and "1 calls" in text
        if sys.version_info >= (3, 11):
            assert f"{n}:V2.run" in text
        up.USE_V2 = False
        with inst.canary() as canary:
            up.get().run(1)
            up.get().run(2)
        assert canary.hits == {f"{n}:V1.run": 2}
        assert inst.hits == {f"{n}:V1.run": 2}
        assert inst.manifest.as_dict()["hits"] == {f"{n}:V1.run": 2}


def test_optional_patches_may_be_missed(mk: Toys) -> None:
    up = mk(UP)
    with install(rollout(patch(f"{up.__name__}:f", lambda x=1: 1, required=False)), "rollout") as i:
        with i.canary() as canary:
            pass
        assert canary.hits == {f"{up.__name__}:f": 0}


def test_the_original_reached_through_an_accepted_reference_is_told(mk: Toys) -> None:
    up = mk(UP + "PAIR = (f,)\n")
    n = up.__name__
    accepting = patch(f"{n}:f", lambda x=1: 1, accepts_unreachable=(f"{n}:PAIR[0]",))
    with install(rollout(accepting), "rollout") as inst:
        with pytest.raises(NotReachedError, match="the original itself, through a reference"):
            with inst.canary():
                up.PAIR[0]()


def test_nothing_of_it_is_left(mk: Toys) -> None:
    up = mk(UP)
    n = up.__name__

    def gen(n):
        yield n + 1

    async def coro():
        return "new"

    adapter = rollout(
        patch(f"{n}:f", lambda x=1: x), patch(f"{n}:gen", gen), patch(f"{n}:coro", coro)
    )
    with install(adapter, "rollout") as inst:
        functions = [up.f, up.gen, up.coro]
        codes = [f.__code__ for f in functions]
        space = set(vars(_canary))
        with inst.canary():
            during = [up.f, up.gen, up.coro]
            assert [f.__code__ for f in functions] != codes
            assert inspect.isgeneratorfunction(up.gen)
            assert inspect.iscoroutinefunction(up.coro)
            assert str(inspect.signature(up.f)) == "(x=1)"
            assert up.f() == 1 and up.f(5) == 5
            assert list(up.gen(1)) == [2]
            with pytest.raises(StopIteration, match="new"):
                up.coro().send(None)
            with pytest.raises(CanaryBusyError), inst.canary():
                pass
        assert during == functions, "no slot was written"
        assert [f.__code__ for f in functions] == codes
        assert set(vars(_canary)) == space
        assert sys.getprofile() is None
        inst.verify()


def test_it_stops_counting_when_the_run_fails_or_is_undone(mk: Toys) -> None:
    up = mk(UP)
    inst = install(rollout(patch(f"{up.__name__}:f", lambda x=1: "new")), "rollout")
    code = up.f.__code__
    with pytest.raises(ZeroDivisionError), inst.canary():
        1 / 0  # noqa: B018
    assert up.f.__code__ is code
    with inst.canary():
        up.f()
        inst.uninstall()
    assert up.f() == "old"
    with pytest.raises(NoInstallationError), inst.canary():
        pass


def test_a_pending_patch_that_never_came_is_named_and_one_that_came_is_counted(mk: Toys) -> None:
    name = mk.write(UP)
    with install(rollout(patch(f"{name}:f", lambda x=1: "new")), "rollout") as inst:
        with pytest.raises(NotReachedError, match=f"its module {name} was never imported"):
            with inst.canary():
                pass
        with inst.canary() as canary:
            importlib.import_module(name).f()
        assert canary.hits == {f"{name}:f": 1}


def test_on_the_trainer_side_only_exact_calls_are_hits(mk: Toys) -> None:
    up = mk(UP)
    with install(trainer(patch(f"{up.__name__}:f", lambda x=1: "new")), "trainer") as inst:
        with pytest.raises(NotReachedError), inst.canary():
            assert up.f() == "old"
        with inst.canary() as canary, exact_context():
            assert up.f() == "new"
        assert canary.hits == {f"{up.__name__}:f": 1}


def test_methods_bound_during_the_canary_do_not_count_for_ever(mk: Toys) -> None:
    up = mk(UP)
    with install(rollout(patch(f"{up.__name__}:V1.run", run)), "rollout") as inst:
        with inst.canary():
            kept = up.V1().run
            kept(1)
        assert kept(1) == "new"
        assert kept.__func__.__code__ is run.__code__


# -- evidence and caches ---------------------------------------------------------


def test_evidence_of_the_same_patch_set_counts_on_a_warm_start(mk: Toys, tmp_path: Path) -> None:
    up = mk(UP)
    identity = f"{up.__name__}:f"
    adapter = rollout(patch(identity, lambda x=1: "new"))
    cache = tmp_path / "cache"
    with install(adapter, "rollout") as inst:
        with inst.canary():
            up.f()
        inst.store_evidence(cache)
    with install(adapter, "rollout") as inst:
        with inst.canary(evidence=cache) as canary:
            pass  # a warm start traces nothing
        assert canary.by_evidence == (identity,)
    other = rollout(patch(identity, lambda x=1: "other"))
    with install(other, "rollout") as inst, pytest.raises(NotReachedError):
        with inst.canary(evidence=cache):
            pass


def test_damaged_evidence_is_no_evidence(tmp_path: Path) -> None:
    path = store_evidence(tmp_path, "d" * 32, {"a": 1})
    assert load_evidence(tmp_path, "d" * 32) == {"a": 1}
    store_evidence(tmp_path, "d" * 32, {"b": 2})
    assert load_evidence(tmp_path, "d" * 32) == {"a": 1, "b": 2}
    path.write_text("{")
    assert load_evidence(tmp_path, "d" * 32) == {}
    assert [p.name for p in tmp_path.iterdir()] == [path.name], "no temporary file is left"


def test_the_patch_set_has_caches_of_its_own(mk: Toys) -> None:
    name = mk.write(UP)
    ours = mk.write("def f(x=1): return 'new'\n")
    adapter = rollout(patch(f"{name}:f", f"{ours}:f"))
    digest = patch_set_digest(adapter, "rollout")
    assert name not in sys.modules and ours not in sys.modules, "asked before any import"
    environment = cache_environment(digest, {"HOME": "/home/x"})
    assert environment["VLLM_CACHE_ROOT"] == f"/home/x/.cache/vllm/patchkit-{digest[:16]}"
    assert environment["TORCHINDUCTOR_CACHE_DIR"].endswith(f"patchkit-{digest[:16]}")
    assert cache_environment(digest, environment) == environment, "not nested"
    with install(adapter, "rollout") as inst:
        assert inst.manifest.digest == digest
        importlib.import_module(name)
        assert inst.manifest.digest == digest
    mk.write("def helper(): return 'newer'\ndef f(x=1): return helper()\n", name=ours)
    sys.modules.pop(ours, None)
    changed = patch_set_digest(adapter, "rollout")
    assert changed != digest
    mk.write("def helper(): return 'newest'\ndef f(x=1): return helper()\n", name=ours)
    assert patch_set_digest(adapter, "rollout") != changed, "helpers beside it count too"


def test_each_profile_has_caches_of_its_own(mk: Toys) -> None:
    name = mk.write(UP)
    ours = mk.write("def f(x=1): return 'new'\ndef fast(x=1): return 'new'\n")
    adapter = rollout(
        patch(f"{name}:f", f"{ours}:f", profiles=("exact",)),
        patch(f"{name}:f", f"{ours}:fast", profiles=("fast",)),
        default_profile="exact",
    )
    fast = patch_set_digest(adapter, "rollout", profile="fast")
    assert fast != patch_set_digest(adapter, "rollout")
    with install(adapter, "rollout", profile="fast") as inst:
        assert inst.manifest.digest == fast


def test_the_manifest_can_be_compared_between_machines(mk: Toys) -> None:
    up = mk(UP)
    with install(rollout(patch(f"{up.__name__}:f", lambda x=1: "new")), "rollout") as inst:
        told: dict[str, Any] = inst.manifest.as_dict()
        text = str(inst.manifest.compared)
        assert str(mk.root) not in text
        assert "pid" in told and "pid" not in inst.manifest.compared
        (only,) = told["patches"]
        assert only["before"]["file"] == f"{up.__name__}.py"
        assert only["before"]["line"] == 8
        assert only["after"]["line"] > 1
        digest = inst.manifest.digest
        up.f()
        assert inst.manifest.digest == digest


def made(factor: int) -> Any:
    def f(x=1):
        return x * factor

    return f


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": [1]}, {"a": [2]}),
        ([1.0], [1]),
        (Value({"a"}), Value({"b"})),
        ("x" * 80, "x" * 79 + "y"),
        (made(2), made(3)),
    ],
)
def test_replacements_that_differ_have_other_identities(one: Any, other: Any) -> None:
    one, other = (Value(v) if isinstance(v, str) else v for v in (one, other))
    assert identity_of_replacement(one) != identity_of_replacement(other)
    assert identity_of_replacement(one) == identity_of_replacement(copy.copy(one))


def test_state_of_a_function_is_no_part_of_its_identity() -> None:
    calls: list[Any] = []
    calls.append(calls)

    def counted() -> None:
        calls.append(1)

    before = identity_of_replacement(counted)
    counted()
    assert identity_of_replacement(counted) == before


def test_identities_are_those_of_every_process() -> None:
    """Strings are hashed anew in each, and sets of them have another order."""
    code = (
        "from patchkit.engine import Patch, Value\n"
        "from patchkit.engine._report import identity_of_replacement as told\n"
        "names = Value({'alpha', 'beta', 'gamma'})\n"
        "p = Patch(symbol='m:N', action='value', replacement=names, reason='r', consequence='c',"
        " until='u')\n"
        "print(told(lambda x: x in {'alpha', 'beta', 'gamma'}), told(names), p.replacement_name)"
    )
    found = {
        subprocess.check_output(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": str(seed)}
        )
        for seed in range(3)
    }
    assert len(found) == 1, found
