"""Somebody else: another adapter, a foreign wrapper, a patcher after us, reload, too late."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from typing import Any

import pytest

from patchkit.engine import Installation, _installation, install, installations
from patchkit.engine.errors import (
    AlreadyInstalledError,
    PreflightError,
    UndoRefusedError,
    VerificationError,
)

from .conftest import Toys, patch, reviewed, rollout


def plus(text: str) -> Any:
    def factory(original):
        def f(x=1):
            return original(x) + text

        return f

    return factory


def new(x=1):
    return "new"


UP = "def f(x=1): return 'old'\n"


@pytest.fixture
def two(mk: Toys) -> tuple[Any, Any, Any]:
    up = mk(UP)
    a = rollout(patch(f"{up.__name__}:f", plus("+a"), "wrap"), name="a")
    b = rollout(patch(f"{up.__name__}:f", plus("+b"), "wrap"), name="b", after=("a",))
    return up, a, b


def test_two_adapters_on_one_symbol_are_refused_unless_ordered(mk: Toys, two: Any) -> None:
    up, a, b = two
    c = rollout(patch(f"{up.__name__}:f", plus("+c"), "wrap"), name="c")
    with install(a, "rollout"):
        with pytest.raises(PreflightError, match=r"(?s)another adapter has.*after=.'a',"):
            install(c, "rollout")
        with install(b, "rollout"):
            assert up.f() == "old+a+b"
        assert up.f() == "old+a"
    assert up.f() == "old"


def test_the_lower_one_cannot_be_undone_first(two: Any) -> None:
    up, a, b = two
    lower, upper = install(a, "rollout"), install(b, "rollout")
    with pytest.raises(UndoRefusedError, match=r"(?s)adapter 'b'.*uninstall adapter 'b' first"):
        lower.uninstall()
    assert up.f() == "old+a+b", "nothing was undone"
    with pytest.raises(VerificationError, match="adapter 'b'"):
        lower.verify()
    upper.uninstall()
    lower.verify()
    lower.uninstall()
    assert up.f() == "old"


def test_disjoint_adapters_are_undone_in_any_order(mk: Toys) -> None:
    up = mk("def f(x=1): return 'old'\ndef g(x=1): return 'old'\n")
    a = install(rollout(patch(f"{up.__name__}:f", new), name="a"), "rollout")
    b = install(rollout(patch(f"{up.__name__}:g", new), name="b"), "rollout")
    a.uninstall()
    b.verify()
    assert (up.f(), up.g()) == ("old", "new")
    b.uninstall()


def elsewhere(mk: Toys) -> Any:
    """A module of another package that wraps in different ways."""
    return mk(
        """
        import functools, wrapt
        def plain(f):
            def wrapper(*args, **kwargs): return f(*args, **kwargs)
            return wrapper
        def polite(f):
            @functools.wraps(f)
            def wrapper(*args, **kwargs): return f(*args, **kwargs)
            return wrapper
        def proxy(f):
            @wrapt.decorator
            def telemetry(wrapped, instance, args, kwargs): return wrapped(*args, **kwargs)
            return telemetry(f)
        def object(f):
            class Wrapper:
                def __call__(self, *args, **kwargs): return f(*args, **kwargs)
            return Wrapper()
        """,
        name="vendor.wrappers",
    )


@pytest.mark.parametrize(
    ("way", "named"),
    [
        ("plain", "code of vendor.wrappers"),
        ("polite", "code of vendor.wrappers"),
        ("proxy", "vendor.wrappers:proxy.<locals>.telemetry"),
        ("object", "vendor.wrappers:object.<locals>.Wrapper"),
    ],
)
def test_a_foreign_wrapper_is_named_and_refused(mk: Toys, way: str, named: str) -> None:
    up = mk(UP)
    mk.made.append("vendor")
    up.f = getattr(elsewhere(mk), way)(up.f)
    with pytest.raises(PreflightError) as caught:
        install(rollout(patch(f"{up.__name__}:f", new)), "rollout")
    assert "somebody else has patched it" in str(caught.value)
    assert named in str(caught.value)


RELIED = """
def f(x=1): return g(x)
def g(x=1): return 'old'
class Norm:
    def forward(self, x): return 'old'
"""


@pytest.mark.parametrize("name", ["g", "Norm", "Norm.forward"])
@pytest.mark.parametrize("how", ["relies_on", "depends_on"])
def test_what_is_relied_on_is_held_to_be_upstreams_too(mk: Toys, name: str, how: str) -> None:
    """Its source is as reviewed; what is loaded is somebody else's."""
    up = mk(RELIED)
    n = up.__name__
    symbols = (f"{n}:g", f"{n}:Norm", f"{n}:Norm.forward")
    on_patch, on_adapter = ({how: symbols}, {}) if how == "depends_on" else ({}, {how: symbols})
    adapter = rollout(
        patch(f"{n}:f", new, **on_patch), reviewed=reviewed(f"{n}:f", *symbols), **on_adapter
    )
    with install(adapter, "rollout"):
        pass
    owner = up.Norm if name == "Norm.forward" else up
    setattr(owner, name.rpartition(".")[2], Toys if name == "Norm" else new)
    with pytest.raises(PreflightError, match=rf"(?s){name}: somebody else.*relies on it"):
        install(adapter, "rollout")


def test_upstreams_own_decorators_are_no_conflict(mk: Toys) -> None:
    mk("", name="deco.__init__")
    mk(
        "import functools\ndef loud(f):\n    @functools.wraps(f)\n    def w(*a, **k):\n"
        "        return f(*a, **k)\n    return w\n",
        name="deco.lib",
    )
    up = mk(
        """
        import contextlib, functools
        import deco.lib
        from deco import lib as d
        def local(f):
            @functools.wraps(f)
            def w(*a, **k): return f(*a, **k)
            return w
        class C:
            @d.loud
            @local
            def f(self, x=1): return 'old'
        @contextlib.contextmanager
        def cm(): yield 1
        """
    )
    adapter = rollout(
        patch(f"{up.__name__}:C.f", lambda self, x=1: "new"),
        patch(f"{up.__name__}:cm", lambda: "no context"),
    )
    with install(adapter, "rollout") as inst:
        assert up.C().f() == "new"
        notes = [n for p in inst._patches for n in p.notes]
        assert any("replaces its decorators too" in n and "deco.lib" in n for n in notes)


def test_a_patcher_after_us_is_named_at_verify_and_at_undo(mk: Toys) -> None:
    up = mk(UP)
    inst = install(rollout(patch(f"{up.__name__}:f", new)), "rollout")
    mk.made.append("vendor")
    ours, up.f = up.f, elsewhere(mk).plain(up.f)
    with pytest.raises(VerificationError, match=r"code of vendor.wrappers"):
        inst.verify()
    assert inst.state == "broken"
    with pytest.raises(UndoRefusedError, match=r"code of vendor.wrappers"):
        inst.uninstall()
    top = up.f
    inst.uninstall(leave=(f"{up.__name__}:f",))
    assert up.f is top
    assert up.f() == "old", "what they wrapped is inert now"
    assert ours() == "old"


def test_once_they_are_gone_all_is_well_again(mk: Toys) -> None:
    up = mk(UP)
    with install(rollout(patch(f"{up.__name__}:f", new)), "rollout") as inst:
        ours, up.f = up.f, len
        with pytest.raises(VerificationError, match="builtin"):
            inst.verify()
        up.f = ours
        inst.verify()
        assert inst.state == "active"


def test_reload_is_noticed(mk: Toys) -> None:
    up = mk(UP)
    adapter = rollout(patch(f"{up.__name__}:f", new))
    inst = install(adapter, "rollout")
    importlib.reload(up)
    assert inst.state == "broken"
    with pytest.raises(VerificationError, match=r"(?s)executed again.*was executed again"):
        inst.verify()
    with pytest.raises(AlreadyInstalledError, match="broken"):
        install(adapter, "rollout")
    inst.uninstall(leave=(f"{up.__name__}:f",))
    with install(adapter, "rollout"):
        assert up.f() == "new"
    assert up.f() == "old"


def test_a_second_execution_past_the_import_system_is_noticed_by_verify(mk: Toys) -> None:
    up = mk(UP)
    inst = install(rollout(patch(f"{up.__name__}:f", new)), "rollout")
    exec(compile(UP, up.__file__, "exec"), vars(up))
    with pytest.raises(VerificationError, match=r"module was executed again \(reload\)"):
        inst.verify()
    inst.uninstall(leave=(f"{up.__name__}:f",))


def test_a_method_and_its_super_are_not_both_wrapped(mk: Toys) -> None:
    up = mk(
        """
        class M:
            def gen(self): return ['x']
        class A(M):
            def gen(self): return super().gen()
        """
    )

    def span(original):
        def gen(self):
            return ["span", *original(self)]

        return gen

    n = up.__name__
    base, sub = patch(f"{n}:M.gen", span, "wrap"), patch(f"{n}:A.gen", span, "wrap")
    with pytest.raises(PreflightError, match=r"(?s)wrapped in a base class too.*stacks_on"):
        install(rollout(base, sub), "rollout")
    knowing = patch(f"{n}:A.gen", span, "wrap", stacks_on=(f"{n}:M.gen",))
    with install(rollout(base, knowing), "rollout"):
        assert up.A().gen() == ["span", "span", "x"]


def test_one_slot_under_two_names_is_refused(mk: Toys) -> None:
    up = mk("class M:\n    def f(self): ...\nclass A(M): ...\n")
    n = up.__name__
    with pytest.raises(PreflightError, match="same slot as another patch's"):
        install(
            rollout(patch(f"{n}:M.f", lambda self: 1), patch(f"{n}:A.f", lambda self: 2)),
            "rollout",
        )


def test_versions_choose_and_two_matches_are_an_error() -> None:
    one = patch("packaging.version:Version.is_devrelease", lambda self: True, versions=">=1")
    two = patch("packaging.version:Version.is_devrelease", lambda self: True, versions="<1")
    with pytest.raises(PreflightError, match="two patches of one adapter match"):
        install(rollout(one, one.__class__(**fields(one, reason="again"))), "rollout")
    with pytest.raises(PreflightError, match=r"(?s)no patch .* is for what is installed.*<1"):
        install(rollout(two), "rollout")


def test_a_profile_none_of_whose_patches_is_meant_for_this_version_is_refused(mk: Toys) -> None:
    up = mk("def f(): ...\n")
    shared = patch(f"{up.__name__}:f", lambda: 1)
    late = patch(
        "packaging.version:Version.major", lambda self: 0, versions="<1", profiles=("old",)
    )
    adapter = rollout(shared, late)
    with pytest.raises(PreflightError, match=r"(?s)no patch of this profile is for this packaging"):
        install(adapter, "rollout", profile="old")
    with install(adapter, "rollout"):  # the patch belongs to another profile: nothing is left out
        assert up.f() == 1


def fields(p: Any, **changes: Any) -> dict[str, Any]:
    return {**{name: getattr(p, name) for name in type(p).__slots__}, **changes}


# -- too late ------------------------------------------------------------------


def test_a_running_target_is_too_late(mk: Toys) -> None:
    up = mk("def f(event, started):\n    started.set()\n    event.wait()\n")
    event, started = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: up.f(event, started))
    thread.start()
    started.wait()
    try:
        with pytest.raises(PreflightError, match="too late: it is running"):
            install(rollout(patch(f"{up.__name__}:f", lambda event, started: 0)), "rollout")
    finally:
        event.set()
        thread.join()


SUSPENDED = [
    ("def f():\n    yield 1\n    yield 2\n", "suspended, as a generator"),
    (
        "async def f():\n    await P()\nclass P:\n    def __await__(self): yield\n",
        "suspended, as a coroutine",
    ),
    ("async def f():\n    yield 1\n", "suspended, as an async generator"),
]


def _gen():
    yield 1


async def _coro(): ...


async def _agen():
    yield 1


@pytest.mark.parametrize(("source", "match"), SUSPENDED, ids=["generator", "coroutine", "agen"])
def test_a_suspended_one_is_too_late(mk: Toys, source: str, match: str) -> None:
    up = mk(source)
    replacement = {"a generator": _gen, "a coroutine": _coro}.get(match[14:], _agen)
    adapter = rollout(patch(f"{up.__name__}:f", replacement))
    running = up.f()
    step = running.__anext__() if hasattr(running, "__anext__") else running
    with contextlib.suppress(StopIteration):
        step.send(None)
    with pytest.raises(PreflightError, match=match):
        install(adapter, "rollout")
    end = running.aclose() if hasattr(running, "aclose") else running
    with contextlib.suppress(StopIteration):
        end.send(None) if end is not running else running.close()
    with install(adapter, "rollout"):
        pass


CACHED = """
import functools
def flag(x=1): return 'old'
@functools.cache
def use(): return flag()
"""


def test_cached_answers_are_too_late_unless_declared_and_then_cleared(mk: Toys) -> None:
    up = mk(CACHED)
    symbol = f"{up.__name__}:flag"
    with install(rollout(patch(symbol, new)), "rollout"):
        pass  # an empty cache is no problem
    assert up.use() == "old"
    with pytest.raises(PreflightError, match=f"(?s)answers of it are cached.*{up.__name__}:use"):
        install(rollout(patch(symbol, new)), "rollout")
    with install(rollout(patch(symbol, new, caches=(f"{up.__name__}:use",))), "rollout"):
        assert up.use() == "new"
    assert up.use() == "old"


@pytest.mark.parametrize("name", ["no_such", "EPS"])
def test_a_declared_cache_that_is_none_is_refused(mk: Toys, name: str) -> None:
    up = mk(UP + "EPS = 1\n")
    n = up.__name__
    with pytest.raises(PreflightError, match=f"{n}:{name} cannot be cleared"):
        install(rollout(patch(f"{n}:f", new, caches=(f"{n}:{name}",))), "rollout")
    assert up.f() == "old"


@pytest.mark.parametrize("loaded", [True, False])
def test_what_fails_after_the_last_slot_was_written_leaves_nothing(
    mk: Toys, monkeypatch: pytest.MonkeyPatch, loaded: bool
) -> None:
    name = mk.write(UP)
    finders = list(sys.meta_path)
    if loaded:
        importlib.import_module(name)
        monkeypatch.setattr(_installation, "clear_caches", interrupted)
        with pytest.raises(KeyboardInterrupt):
            install(rollout(patch(f"{name}:f", new)), "rollout")
    else:
        install(rollout(patch(f"{name}:f", new)), "rollout")
        monkeypatch.setattr(Installation, "_take_ownership", interrupted)
        with pytest.raises(KeyboardInterrupt):
            importlib.import_module(name)
    assert installations() == []
    assert sys.meta_path == finders
    assert importlib.import_module(name).f() == "old"


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_cached_property_that_answered_is_too_late(mk: Toys) -> None:
    up = mk(
        "import functools\nclass C:\n    @functools.cached_property\n    def p(self): return 1\n"
    )
    adapter = rollout(patch(f"{up.__name__}:C.p", lambda self: 2))
    live = up.C()
    with install(adapter, "rollout"):
        pass
    assert live.p == 1
    with pytest.raises(PreflightError, match="instances have cached it"):
        install(adapter, "rollout")


def test_instances_built_by_the_old_constructor_are_too_late(mk: Toys) -> None:
    up = mk("class C:\n    def __init__(self): self.eps = 1\nclass D(C): ...\n")

    def __init__(self):
        self.eps = self.in_place = 2

    adapter = rollout(patch(f"{up.__name__}:C.__init__", __init__))
    with install(adapter, "rollout"):
        assert up.D().in_place == 2
    live = up.D()
    with pytest.raises(PreflightError, match="built by the old constructor"):
        install(adapter, "rollout")
    del live


def test_instances_of_a_class_to_be_replaced_are_too_late(mk: Toys) -> None:
    up = mk("class C: ...\n")
    live = up.C()
    with pytest.raises(PreflightError, match="instances of it exist"):
        install(rollout(patch(f"{up.__name__}:C", type("C", (), {}))), "rollout")
    del live
