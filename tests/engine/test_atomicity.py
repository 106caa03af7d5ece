"""All or nothing: faults injected at every lookup, write and rollback step."""

from __future__ import annotations

import importlib
import itertools
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from patchkit.engine import _journal as journal
from patchkit.engine import _pending as pending
from patchkit.engine import _process, install, installations
from patchkit.engine._slots import AttributeSlot, CellSlot, DefaultSlot, IndexSlot, ItemSlot
from patchkit.engine.errors import RollbackError, SlotChangedError

from .conftest import Toys, patch, rollout

UP = """
def f(x=1): return 'old'
class C:
    def m(self): return 'old'
    @staticmethod
    def s(x): return 'old'
    @classmethod
    def c(cls): return 'old'
    @property
    def p(self): return 'old'
class Sub(C): ...
TABLE = {'f': f}
LIST = [f]
def default(act=f): return act()
def make(g):
    def run(): return g()
    return run
run = make(f)
LIMIT = 3
"""


class Injected(Exception):
    """The fault."""


class Faults:
    """Counts every read and write of every slot, and fails at chosen ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.fail_at: set[int] = set()
        self.always_on: str = ""
        self.after = False
        self.slots: set[str] = set()
        for kind in (AttributeSlot, CellSlot, DefaultSlot, IndexSlot, ItemSlot):
            for name in ("read", "write"):
                monkeypatch.setattr(kind, name, self._wrapped(getattr(kind, name), name))

    def _wrapped(self, original: Any, name: str) -> Any:
        faults = self

        def operation(slot: Any, *args: Any) -> Any:
            faults.count += 1
            faults.slots.add(slot.name)
            fails = faults.count in faults.fail_at
            if name == "write" and slot.name == faults.always_on and faults.after:
                fails = True
            if fails and not (name == "write" and faults.late):
                raise Injected(faults.count)
            result = original(slot, *args)
            if fails:
                raise Injected(faults.count)
            return result

        return operation

    late = False


def adapter_of(up: Any) -> Any:
    n = up.__name__
    return rollout(
        patch(f"{n}:f", lambda x=1: "new"),
        patch(f"{n}:C.m", lambda self: "new"),
        patch(f"{n}:C.s", lambda x: "new"),
        patch(f"{n}:C.c", lambda cls: "new"),
        patch(f"{n}:C.p", lambda self: "new"),
        patch(f"{n}:Sub.m", lambda self: "sub", on_subclass=True, stacks_on=(f"{n}:C.m",)),
        patch(f"{n}:LIMIT", 4, "value"),
    )


def snapshot(up: Any) -> dict[str, Any]:
    """Every object that the installation could touch, by identity."""
    found: dict[str, Any] = {}
    for label, space in (("up", vars(up)), ("C", vars(up.C)), ("Sub", vars(up.Sub))):
        found |= {f"{label}.{key}": id(value) for key, value in space.items()}
    found["TABLE"] = [(k, id(v)) for k, v in up.TABLE.items()]
    found["LIST"] = list(map(id, up.LIST))
    found["default"] = list(map(id, up.default.__defaults__))
    found["cell"] = id(up.run.__closure__[0].cell_contents)
    found["code"] = [id(f.__code__) for f in (up.f, up.C.m, up.default)]
    found["meta_path"] = list(map(id, sys.meta_path))
    found["installed"] = [*installations(), *_process._owners, *pending.watch._listeners]
    return found


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    made = Faults(monkeypatch)
    yield made
    made.fail_at, made.always_on = set(), ""


@pytest.mark.parametrize("late", [False, True], ids=["before the write", "after the write"])
def test_a_fault_at_any_step_of_an_installation_leaves_everything_as_it_was(
    mk: Toys, faults: Faults, late: bool
) -> None:
    up = mk(UP)
    adapter = adapter_of(up)
    before = snapshot(up)
    faults.late = late
    for step in itertools.count(1):
        faults.count, faults.fail_at = 0, {step}
        try:
            inst = install(adapter, "rollout")
        except Injected:
            faults.fail_at = set()
            assert snapshot(up) == before, f"after a fault at step {step}"
            continue
        break
    faults.fail_at = set()
    assert step > 3 * 11, "eleven slots, each read, written and read again"
    assert len([n for n in faults.slots if n.startswith(up.__name__)]) >= 11
    inst.verify()
    inst.uninstall()
    assert snapshot(up) == before


def test_a_second_fault_during_rollback_still_leaves_everything_as_it_was(
    mk: Toys, faults: Faults
) -> None:
    up = mk(UP)
    adapter = adapter_of(up)
    before = snapshot(up)
    faults.fail_at = set()
    install(adapter, "rollout").uninstall()
    faults.count = 0
    inst = install(adapter, "rollout")
    total = faults.count
    inst.uninstall()
    for first in range(total, total - 9, -2):
        for second in range(first + 1, first + 3 * 11, 3):
            faults.count, faults.fail_at = 0, {first, second}
            with pytest.raises(Injected):
                install(adapter, "rollout")
            faults.fail_at = set()
            assert snapshot(up) == before, f"faults at steps {first} and {second}"


def test_a_slot_that_cannot_be_restored_at_all_is_named(mk: Toys, faults: Faults) -> None:
    up = mk(UP)
    adapter = adapter_of(up)
    n = up.__name__
    install(adapter, "rollout").uninstall()
    faults.count = 0
    install(adapter, "rollout").uninstall()
    faults.always_on = f"{n}:C.s"

    original = journal.restore

    def restore(written: Any, **more: Any) -> None:
        faults.after = True
        original(written, **more)

    faults.count, faults.fail_at = 0, set()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(journal, "restore", restore)
        inst = install(adapter, "rollout")
        with pytest.raises(RollbackError, match=f"{n}:C.s: Injected.*end this|{n}:C.s"):
            inst.uninstall()
    faults.after = False
    assert up.C.m(up.C()) == "old", "all others were restored"
    inst.uninstall()


@pytest.mark.parametrize("step", range(1, 30, 4))
def test_a_fault_at_undo_can_be_followed_by_another_undo(
    mk: Toys, faults: Faults, step: int
) -> None:
    up = mk(UP)
    before = snapshot(up)
    inst = install(adapter_of(up), "rollout")
    faults.count, faults.fail_at = 0, {step}
    try:
        inst.uninstall()
    except Injected:
        faults.fail_at = set()
        inst.uninstall()
    assert snapshot(up) == before


def test_a_keyboard_interrupt_is_rolled_back_too(mk: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    up = mk(UP)
    before = snapshot(up)
    write = AttributeSlot.write
    calls = itertools.count()

    def interrupted(slot: Any, value: Any) -> None:
        write(slot, value)
        if next(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(AttributeSlot, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        install(adapter_of(up), "rollout")
    assert snapshot(up) == before


@pytest.mark.parametrize("waits", [False, True])
def test_a_cache_that_raises_when_it_is_cleared(mk: Toys, waits: bool) -> None:
    store = mk(
        "class Cache:\n    def cache_clear(self): raise RuntimeError('not now')\nstore = Cache()\n"
    )
    name = mk.write("def f(x=1): return 'old'\n")
    adapter = rollout(patch(f"{name}:f", lambda x=1: "new", caches=(f"{store.__name__}:store",)))
    if not waits:
        importlib.import_module(name)
    with pytest.raises(RuntimeError, match="not now"):
        install(adapter, "rollout")
        importlib.import_module(name)
    assert not installations()
    assert importlib.import_module(name).f() == "old"


def test_a_foreign_write_between_check_and_commit_is_seen(
    mk: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    up = mk(UP)
    commit = journal.commit

    def raced(entries: Any) -> Any:
        up.C.m = len
        return commit(entries)

    monkeypatch.setattr(journal, "commit", raced)
    with pytest.raises(SlotChangedError, match=f"{up.__name__}:C.m changed between.*builtin"):
        install(adapter_of(up), "rollout")
    assert up.f() == "old"
    assert up.C.m is len


def test_calls_race_with_installs_and_see_old_or_new(mk: Toys) -> None:
    up = mk(UP)
    adapter = rollout(
        patch(f"{up.__name__}:f", lambda x=1: "new"),
        patch(f"{up.__name__}:C.m", lambda self: "new"),
    )
    stop = threading.Event()
    seen: set[Any] = set()
    errors: list[BaseException] = []

    def call() -> None:
        try:
            while not stop.is_set():
                for _ in range(200):
                    seen.add((up.f(), up.run(), up.TABLE["f"](), up.C().m()))
                time.sleep(0.001)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    refused = 0
    try:
        for _ in range(10):
            try:
                inst = install(adapter, "rollout")
            except Exception as error:  # a call was under way: refused, by design
                assert "too late" in str(error)
                refused += 1
                continue
            inst.verify()
            inst.uninstall()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors
    assert {word for words in seen for word in words} <= {"old", "new"}
    assert up.f() == "old"


def test_threads_that_install_the_same_get_the_same(mk: Toys) -> None:
    up = mk(UP)
    adapter = adapter_of(up)
    start = threading.Barrier(6)
    got: list[Any] = []

    def work() -> None:
        start.wait()
        got.append(install(adapter, "rollout"))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 6 and len(set(map(id, got))) == 1
    got[0].verify()
    got[0].uninstall()
