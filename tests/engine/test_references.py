"""Who holds the old object: found by identity, rebound, accepted by name, or refused."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest

from patchkit.engine import FROZEN, Adapter, inspect_plan, install
from patchkit.engine.errors import PreflightError

from .conftest import Toys, patch, rollout


def new(x=1):
    return "new"


UP = "def f(x=1): return 'old'\n"

# case, source of a user of `up`, how it is called
WRITABLE = [
    ("same name", "from {up} import f", lambda m: m.f()),
    ("another name", "from {up} import f as fast", lambda m: m.fast()),
    ("class attribute", "import {up}\nclass C:\n    g = staticmethod({up}.f)", None),
    ("function in a class", "import {up}\nclass C:\n    g = {up}.f", lambda m: m.C.g()),
    ("dict", "import {up}\nT = dict(silu={up}.f)", lambda m: m.T["silu"]()),
    ("nested dict", "import {up}\nT = dict(a=dict(b={up}.f))", lambda m: m.T["a"]["b"]()),
    ("list", "import {up}\nT = [1, {up}.f]", lambda m: m.T[1]()),
    ("default", "import {up}\ndef run(act={up}.f): return act()", lambda m: m.run()),
    ("keyword default", "import {up}\ndef run(*, act={up}.f): return act()", lambda m: m.run()),
    (
        "closure",
        "import {up}\ndef make(g):\n    def run(): return g()\n    return run\nrun = make({up}.f)",
        lambda m: m.run(),
    ),
]


@pytest.mark.parametrize(("case", "source", "call"), WRITABLE, ids=[w[0] for w in WRITABLE])
def test_writable_references_are_rebound(mk: Toys, case: str, source: str, call: Any) -> None:
    up = mk(UP)
    if call is None:
        user = mk(source.format(up=up.__name__))
        with pytest.raises(PreflightError, match="a staticmethod cannot be changed"):
            install(rollout(patch(f"{up.__name__}:f", new)), "rollout")
        return
    user = mk(source.format(up=up.__name__))
    with install(rollout(patch(f"{up.__name__}:f", new)), "rollout") as inst:
        assert call(user) == "new"
        inst.verify()
    assert call(user) == "old"


FIXED = [
    ("tuple", "import {up}\nT = (1, {up}.f)", r"user:T\[1\]"),
    ("set", "import {up}\nT = {{{up}.f}}", "user:T"),
    ("key", "import {up}\nT = {{{up}.f: 1}}", "key of user:T"),
    (
        "partial",
        "import {up}, functools\nT = functools.partial({up}.f, 3)",
        "functools.partial at user:T",
    ),
]


@pytest.mark.parametrize(("case", "source", "name"), FIXED, ids=[w[0] for w in FIXED])
def test_what_cannot_be_written_is_refused_or_accepted_by_name(
    mk: Toys, case: str, source: str, name: str
) -> None:
    up = mk(UP)
    user = mk(source.format(up=up.__name__))
    name = name.replace("user", user.__name__)
    with pytest.raises(PreflightError, match=f"(?s)in a place that cannot be written.*{name}"):
        install(rollout(patch(f"{up.__name__}:f", new)), "rollout")
    plain = name.replace("\\", "")
    accepting = patch(f"{up.__name__}:f", new, accepts_unreachable=(plain,))
    with install(rollout(accepting), "rollout") as inst:
        assert inst.manifest.as_dict()["slots"][f"{up.__name__}:f"]["accepted"] == [plain]
    starred = patch(f"{up.__name__}:f", new, accepts_unreachable=(plain[:-2] + "*",))
    with install(rollout(starred), "rollout"):
        assert up.f() == "new"


def test_the_scan_runs_no_foreign_code(mk: Toys) -> None:
    up = mk(UP)
    trap = mk(
        f"""
        import sys, types
        from {up.__name__} import f
        touched = []
        class Lazy(types.ModuleType):
            def __getattr__(self, name):
                touched.append(name); raise AttributeError(name)
            def __dir__(self):
                touched.append('dir'); return []
        class Meta(type):
            def __getattribute__(cls, name):
                touched.append(('meta', name)); return super().__getattribute__(name)
        class C(metaclass=Meta):
            g = f
        class Proxy:
            @property
            def __class__(self):
                touched.append('class'); return dict
            def __getattribute__(self, name):
                touched.append(name); return object.__getattribute__(self, name)
            def __eq__(self, other):
                touched.append('eq'); return True
            __hash__ = object.__hash__
        proxy = Proxy()
        sys.modules[__name__ + '_lazy'] = Lazy(__name__ + '_lazy')
        sys.modules[__name__ + '_proxy'] = proxy
        """
    )
    mk.made += [trap.__name__ + "_lazy", trap.__name__ + "_proxy"]
    trap.touched.clear()
    loaded = set(sys.modules)
    plan = inspect_plan(rollout(patch(f"{up.__name__}:f", new)), "rollout")
    assert not plan.violations
    assert trap.touched == []
    assert set(sys.modules) == loaded
    slots = {e.slot.name for e in plan.entries}
    assert slots == {f"{n}:f" for n in (up.__name__, trap.__name__)} | {f"{trap.__name__}:C.g"}


def test_an_alias_that_the_replacement_uses_goes_on_to_reach_the_original(mk: Toys) -> None:
    up = mk(UP)
    ours = mk(
        f"""
        from {up.__name__} import f as original
        from {up.__name__} import f as unused
        def helper(): return original()
        def f(x=1): return helper() + '+new'
        """
    )
    with install(rollout(patch(f"{up.__name__}:f", f"{ours.__name__}:f")), "rollout") as inst:
        assert up.f() == "old+new"
        assert ours.unused() == "old+new", "an alias that the replacement does not use is rebound"
        kept = inst.manifest.as_dict()["slots"][f"{up.__name__}:f"]["kept"]
        assert kept == [f"{ours.__name__}:original"]


INSTANCES = """
class Op:
    def __init__(self):
        self._forward_method = self.dispatch()
    def dispatch(self): return self.forward_cpu
    def __call__(self): return self._forward_method()
    def forward_cpu(self): return 'old'
"""


def forward(self):
    return "new"


def test_live_instances_that_bound_the_old_function_are_refused(mk: Toys) -> None:
    up = mk(INSTANCES)
    live = up.Op()
    symbol = f"{up.__name__}:Op.forward_cpu"
    with pytest.raises(PreflightError, match=r"(?s)a live instance has bound.*_forward_method"):
        install(rollout(patch(symbol, forward)), "rollout")
    assert live() == "old"


def test_or_rebound_when_the_declaration_says_so(mk: Toys) -> None:
    up = mk(INSTANCES)
    live = up.Op()
    before = live._forward_method
    symbol = f"{up.__name__}:Op.forward_cpu"
    with install(rollout(patch(symbol, forward, rebind_instances=True)), "rollout") as inst:
        assert live() == "new"
        assert up.Op()() == "new"
        inst.verify()
    assert live() == "old"
    assert live._forward_method is before


def test_an_alias_of_a_static_method_holds_the_function_inside(mk: Toys) -> None:
    up = mk("class C:\n    @staticmethod\n    def f(x=1): return 'old'\nalias = C.f\n")
    with install(rollout(patch(f"{up.__name__}:C.f", new)), "rollout"):
        assert (up.alias(), up.C.f()) == ("new", "new")
    assert (up.alias(), up.C.f()) == ("old", "old")


def test_a_bound_class_method_is_rebound(mk: Toys) -> None:
    up = mk("class C:\n    @classmethod\n    def f(cls): return 'old'\nalias = C.f\n")
    with install(rollout(patch(f"{up.__name__}:C.f", lambda cls: "new")), "rollout") as inst:
        assert (up.alias(), up.C.f()) == ("new", "new")
        inst.verify()
    assert (up.alias(), up.C.f()) == ("old", "old")


def test_a_frozen_collector_is_refused_or_accepted_by_name(mk: Toys) -> None:
    up = mk(UP)
    user = mk(f"from {up.__name__} import f as g\nT = dict(a=g)\nclass C:\n    h = g\n")
    symbol = f"{up.__name__}:f"
    gc.freeze()
    try:
        with pytest.raises(PreflightError, match=r"gc.freeze\(\) was called"):
            install(rollout(patch(symbol, new)), "rollout")
        with install(rollout(patch(symbol, new, accepts_unreachable=(FROZEN,))), "rollout"):
            assert (up.f(), user.g(), user.T["a"](), user.C.h()) == ("new",) * 4
        assert (up.f(), user.g(), user.T["a"](), user.C.h()) == ("old",) * 4
    finally:
        gc.unfreeze()


def test_constants_are_not_looked_for_by_identity(mk: Toys) -> None:
    up = mk("FLAG = None\nN = 1\n")
    adapter = rollout(
        patch(f"{up.__name__}:FLAG", True, "value"), patch(f"{up.__name__}:N", 2, "value")
    )
    plan = inspect_plan(adapter, "rollout")
    assert [e.slot.name for e in plan.entries] == [f"{up.__name__}:FLAG", f"{up.__name__}:N"]


def test_an_object_constant_is(mk: Toys) -> None:
    up = mk("TABLE = {'a': 1}\n")
    user = mk(f"from {up.__name__} import TABLE\n")
    with install(rollout(patch(f"{up.__name__}:TABLE", {"b": 2}, "value")), "rollout"):
        assert user.TABLE == {"b": 2}
    assert user.TABLE == {"a": 1}


def test_a_replaced_class_is_rebound_and_its_subclasses_are_refused(mk: Toys) -> None:
    up = mk("class Norm:\n    def __init__(self, eps): ...\n")
    user = mk(f"from {up.__name__} import Norm\n")

    class Fast:
        def __init__(self, eps): ...

    adapter = Adapter(name="toy", rollout=(patch(f"{up.__name__}:Norm", Fast),))
    with install(adapter, "rollout"):
        assert user.Norm is Fast
    sub = mk(f"from {up.__name__} import Norm\nclass Sub(Norm): ...\n")
    with pytest.raises(PreflightError, match="subclasses keep their base"):
        install(adapter, "rollout")
    del sub
