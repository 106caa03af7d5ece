"""Installing and undoing, for targets of every kind."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from typing import Any

import pytest

from patchkit.engine import Adapter, Installation, Value, install, installations
from patchkit.engine._inert import MISSING
from patchkit.engine.errors import AlreadyInstalledError, PreflightError, ProcessBoundError

from .conftest import Toys, patch, reviewed, rollout


def raw(owner: Any, name: str) -> Any:
    return vars(owner).get(name, MISSING)


def test_a_function_is_replaced_and_put_back(mk: Toys) -> None:
    up = mk("def f(x, y=2):\n    'Docs.'\n    return 'old'\n")
    before = up.f

    def new(x, y=2):
        return ("new", x, y)

    inst = install(rollout(patch(f"{up.__name__}:f", new)), "rollout")
    assert up.f(1) == ("new", 1, 2)
    assert (up.f.__name__, up.f.__qualname__, up.f.__module__) == ("f", "f", up.__name__)
    assert up.f.__doc__ == "Docs."
    assert inspect.signature(up.f) == inspect.signature(before)
    assert up.f is not new, "the adapter's own function is not touched"
    inst.verify()
    assert inst.state == "active"
    inst.uninstall()
    assert up.f is before
    assert inst.state == "undone"


SOURCE = """
import functools
class Base:
    def method(self, x): return ('old', x)
    @staticmethod
    def static(x): return ('old', x)
    @classmethod
    def klass(cls, x): return ('old', cls.__name__, x)
    @property
    def prop(self): return 'old'
    @functools.cached_property
    def cached(self): return 'old'
    def gen(self):
        yield 'old'
    async def coro(self): return 'old'
    async def agen(self):
        yield 'old'
    class Inner:
        def deep(self): return 'old'
class Child(Base): pass
@functools.lru_cache(maxsize=7)
def answer(x): return ('old', x)
"""


def new_method(self, x):
    return ("new", x)


def new_static(x):
    return ("new", x)


def new_klass(cls, x):
    return ("new", cls.__name__, x)


def new_none(self):
    return "new"


def new_gen(self):
    yield "new"


async def new_coro(self):
    return "new"


async def new_agen(self):
    yield "new"


KINDS = [
    ("Base.method", new_method, lambda m: m.Child().method(1), ("new", 1)),
    ("Base.static", new_static, lambda m: m.Child.static(1), ("new", 1)),
    ("Base.klass", new_klass, lambda m: m.Child.klass(1), ("new", "Child", 1)),
    ("Base.prop", new_none, lambda m: m.Child().prop, "new"),
    ("Base.cached", new_none, lambda m: m.Child().cached, "new"),
    ("Base.gen", new_gen, lambda m: next(m.Base().gen()), "new"),
    ("Base.coro", new_coro, lambda m: run(m.Base().coro()), "new"),
    ("Base.agen", new_agen, lambda m: run(m.Base().agen().__anext__()), "new"),
    ("Base.Inner.deep", new_none, lambda m: m.Base.Inner().deep(), "new"),
    ("answer", new_static, lambda m: m.answer(1), ("new", 1)),
]


def run(awaitable: Any) -> Any:
    try:
        awaitable.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waited")


@pytest.mark.parametrize(("name", "new", "call", "value"), KINDS, ids=[k[0] for k in KINDS])
def test_every_kind_keeps_its_shape(mk: Toys, name: str, new: Any, call: Any, value: Any) -> None:
    up = mk(SOURCE)
    *path, last = name.split(".")
    owner = functools.reduce(getattr, path, up)
    before = raw(owner, last)
    with install(rollout(patch(f"{up.__name__}:{name}", new)), "rollout") as inst:
        after = raw(owner, last)
        assert call(up) == value
        assert type(after) is type(before)
        inst.verify()
    assert raw(owner, last) is before
    assert "new" not in str(call(up))


def test_an_inherited_member_is_patched_where_it_is_defined(mk: Toys) -> None:
    up = mk(SOURCE)
    with install(rollout(patch(f"{up.__name__}:Child.method", new_method)), "rollout"):
        assert up.Base().method(1) == ("new", 1)
        assert "method" not in vars(up.Child)


def test_or_on_the_subclass_when_the_declaration_says_so(mk: Toys) -> None:
    up = mk(SOURCE)
    symbol = f"{up.__name__}:Child.method"
    with install(rollout(patch(symbol, new_method, on_subclass=True)), "rollout"):
        assert up.Child().method(1) == ("new", 1)
        assert up.Base().method(1) == ("old", 1)
    assert "method" not in vars(up.Child), "no residue pins the old method"


def test_a_wrap_is_a_factory_and_calls_the_original(mk: Toys) -> None:
    up = mk("def f(n): return n")

    def louder(original):
        def f(n):
            return original(n) + 1

        return f

    with install(rollout(patch(f"{up.__name__}:f", louder, "wrap")), "rollout"):
        assert up.f(1) == 2
    assert up.f(1) == 1


def test_values_and_literals(mk: Toys) -> None:
    up = mk("EPS = 1e-6\nNAME = 'old'\nclass C:\n    LIMIT = 3\n")
    n = up.__name__
    adapter = rollout(
        patch(f"{n}:EPS", 1e-5, "value"),
        patch(f"{n}:NAME", Value("new"), "value"),
        patch(f"{n}:C.LIMIT", 4, "value"),
    )
    with install(adapter, "rollout"):
        assert (up.EPS, up.NAME, up.C.LIMIT) == (1e-5, "new", 4)
    assert (up.EPS, up.NAME, up.C.LIMIT) == (1e-6, "old", 3)


def test_registry_entries_go_through_the_registrys_own_door(mk: Toys) -> None:
    up = mk(
        """
        class Registry(dict):
            log = []
            def register(self, name, value):
                self.log.append(name)
                self[name] = value
        def old(x): return 'old'
        TABLE = Registry(silu=old)
        """
    )
    n = up.__name__
    door = lambda registry, key, value: registry.register(key, value)  # noqa: E731
    up.door = door
    adapter = rollout(
        patch(f"{n}:TABLE", new_static, "register", key="silu"),
        patch(f"{n}:TABLE", new_static, "register", key="exact", door=f"{n}:door"),
    )
    with install(adapter, "rollout"):
        assert up.TABLE["silu"](1) == ("new", 1)
        assert up.TABLE["exact"](1) == ("new", 1)
        assert up.TABLE.log == ["exact"]
    assert {"silu": up.old} == up.TABLE


def test_references_are_resolved_when_planned_and_not_before(mk: Toys) -> None:
    up = mk("def f(): return 'old'")
    ours = mk.write("def f(): return 'new'")
    adapter = rollout(patch(f"{up.__name__}:f", f"{ours}:f"))
    import sys

    assert ours not in sys.modules
    with install(adapter, "rollout"):
        assert up.f() == "new"


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import no_such_module_anywhere\ndef f(): return 2", "no_such_module_anywhere"),
        ("raise ValueError('no licence')\ndef f(): return 2", "ValueError: no licence"),
    ],
)
def test_a_replacement_whose_module_does_not_import_is_told_with_its_error(
    mk: Toys, source: str, error: str
) -> None:
    up = mk("def f(): return 'old'")
    adapter = rollout(patch(f"{up.__name__}:f", f"{mk.write(source)}:f"))
    with pytest.raises(PreflightError, match=error):
        install(adapter, "rollout")
    assert up.f() == "old"


def test_reinstalling_the_same_definition_gives_the_same_handle(mk: Toys) -> None:
    up = mk("def f(n): return n")

    def plus_one(original):
        def f(n):
            return original(n) + 1

        return f

    adapter = rollout(patch(f"{up.__name__}:f", plus_one, "wrap"))
    with install(adapter, "rollout") as inst:
        with install(adapter, "rollout") as again:
            assert again is inst
            assert up.f(0) == 1, "not wrapped twice"
        assert up.f(0) == 1, "the inner `with` does not undo the outer one's installation"
    assert up.f(0) == 0


def test_another_definition_is_refused(mk: Toys) -> None:
    up = mk("def f(n): return n\ndef g(n): return n")
    with install(rollout(patch(f"{up.__name__}:f", new_static_n)), "rollout"):
        with pytest.raises(AlreadyInstalledError, match="with another definition"):
            install(rollout(patch(f"{up.__name__}:g", new_static_n)), "rollout")


def new_static_n(n):
    return "new"


def test_all_violations_come_together(mk: Toys) -> None:
    up = mk("def f(q, k, scale=None): return q\nclass C:\n    @classmethod\n    def g(cls): ...\n")
    n = up.__name__
    adapter = rollout(
        patch(f"{n}:f", lambda q, k: 0),
        patch(f"{n}:gone", new_static),
        patch(f"{n}:C.g", new_gen),
        patch(f"{n}:C.missing", "no_such_module:f"),
    )
    before = dict(vars(up))
    with pytest.raises(PreflightError) as caught:
        install(adapter, "rollout")
    text = str(caught.value)
    assert "lacks scale=…" in text
    assert f"{n}:gone: not there" in text
    assert "a generator function" in text
    assert "'missing' in class" in text
    assert len(caught.value.violations) == 4
    assert vars(up) == before
    assert installations() == []


def test_reviewed_digests_gate_the_installation(mk: Toys) -> None:
    up = mk("def f(x): return x + 1")
    symbol = f"{up.__name__}:f"
    good = reviewed(symbol)
    with install(rollout(patch(symbol, new_static), reviewed=good), "rollout") as inst:
        assert inst.unreviewed == {}
    bad = {"schema": 1, "symbols": {symbol: {"0" * 16: ["0.9"]}}}
    drifted = rollout(patch(symbol, new_static), reviewed=bad)
    with pytest.raises(PreflightError, match="its code changed since it was reviewed") as caught:
        install(drifted, "rollout")
    digest = next(iter(good["symbols"][symbol]))
    assert f"--accept '{symbol}={digest}'" in str(caught.value)
    with install(drifted, "rollout", accept={symbol: digest}) as inst:
        assert inst.unreviewed == {symbol: digest}
        assert inst.manifest.as_dict()["reviewed"] is False
    with pytest.raises(PreflightError, match=r"digest accepted for it .* is another one"):
        install(drifted, "rollout", accept={symbol: "1234"})


def test_relied_on_symbols_concern_the_side_that_patches_their_package(mk: Toys) -> None:
    here = mk("def f(): return 1")
    nowhere = "engine_of_another_machine:Model.forward"
    two_sided = Adapter(
        name="toy",
        rollout=(patch("engine_of_another_machine:sample", lambda: 2),),
        trainer=(patch(f"{here.__name__}:f", lambda: 2),),
        relies_on=(nowhere, f"{here.__name__}:gone"),
    )
    with pytest.raises(PreflightError, match=":gone: not there") as refused:
        install(two_sided, "trainer")
    assert nowhere not in str(refused.value), "a trainer needs no inference engine"
    with pytest.raises(PreflightError, match=r"_machine:Model\.forward: not there"):
        install(two_sided, "rollout")
    neither = rollout(patch(f"{here.__name__}:f", lambda: 2), relies_on=(nowhere,))
    with pytest.raises(PreflightError, match=r"_machine:Model\.forward: not there"):
        install(neither, "rollout")


def test_what_is_installed_pickles_and_deep_copies(mk: Toys) -> None:
    up = mk("class C:\n    def f(self): return 'old'\ndef g(): return 'old'\n")
    n = up.__name__
    adapter = rollout(patch(f"{n}:C.f", new_none), patch(f"{n}:g", lambda: "new"))
    with install(adapter, "rollout") as inst:
        assert pickle.loads(pickle.dumps(up.g)) is up.g
        assert pickle.loads(pickle.dumps(up.C)) is up.C
        assert pickle.loads(pickle.dumps(up.C().f))() == "new"
        assert copy.deepcopy(up.C()).f() == "new"
        assert copy.deepcopy(up.g) is up.g
        for bad in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(ProcessBoundError, match="belongs to the process"):
                bad(inst)


def test_leftovers_are_inert_after_undo(mk: Toys) -> None:
    up = mk(
        """
        class App:
            def __init__(self): self.handler = self.handle
            def handle(self, x=1): return ('old', x)
        """
    )
    with install(
        rollout(patch(f"{up.__name__}:App.handle", lambda self, x=1: ("new", x))), "rollout"
    ):
        live = up.App()
        assert live.handler(3) == ("new", 3)
    assert live.handler() == ("old", 1), "a method bound meanwhile runs the original"
    assert live.handler(x=2) == ("old", 2)


def test_with_undoes_on_exceptions_too(mk: Toys) -> None:
    up = mk("def f(): return 'old'")
    with (
        pytest.raises(ValueError),
        install(rollout(patch(f"{up.__name__}:f", lambda: "new")), "rollout") as inst,
    ):
        assert isinstance(inst, Installation)
        raise ValueError
    assert up.f() == "old"


def test_temporary_installs_in_generators_and_tasks(mk: Toys) -> None:
    import asyncio

    up = mk("def f(): return 'old'\ndef g(): return 'old'\n")
    f = rollout(patch(f"{up.__name__}:f", lambda: "new"), name="f")
    g = rollout(patch(f"{up.__name__}:g", lambda: "new"), name="g")

    def steps() -> Any:
        with install(f, "rollout"):
            yield up.f()
            raise AssertionError("closed before this")

    generator = steps()
    assert next(generator) == "new"
    generator.close()
    assert up.f() == "old"

    async def task(adapter: Any, name: str) -> list[str]:
        with install(adapter, "rollout"):
            before = getattr(up, name)()
            await asyncio.sleep(0)
            return [before, getattr(up, name)()]

    async def main() -> Any:
        return await asyncio.gather(task(f, "f"), task(g, "g"), task(f, "f"))

    assert asyncio.run(main()) == [["new", "new"]] * 3
    assert (up.f(), up.g()) == ("old", "old")
