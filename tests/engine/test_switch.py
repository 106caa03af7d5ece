"""The trainer's switch: threads, tasks, generators, forks, and what a call costs it."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import patchkit
from patchkit.engine import exact_context, install, stock_context, trainer_switch
from patchkit.engine.errors import (
    AmbiguousInstallationError,
    NoInstallationError,
    PreflightError,
    SwitchBusyError,
    SwitchOrderError,
    SwitchUnsetError,
)

from .conftest import Toys, patch, trainer

UP = """
import functools
def f(x=1, *rest, key=2, **more): return ('old', x, rest, key, more)
class C:
    def method(self, x): return ('old', x)
    @staticmethod
    def static(x): return ('old', x)
    @classmethod
    def klass(cls, x): return ('old', cls.__name__, x)
    @property
    def prop(self): return 'old'
    def gen(self):
        yield 'old'
    async def coro(self): return 'old'
    def positional(self, x, /, y): return ('old', x, y)
"""


def f(x=1, *rest, key=2, **more):
    return ("new", x, rest, key, more)


@pytest.fixture
def up(mk: Toys) -> Any:
    return mk(UP)


@pytest.fixture
def inst(up: Any) -> Any:
    n = up.__name__
    patches = (
        patch(f"{n}:f", f),
        patch(f"{n}:C.method", lambda self, x: ("new", x)),
        patch(f"{n}:C.static", lambda x: ("new", x)),
        patch(f"{n}:C.klass", lambda cls, x: ("new", cls.__name__, x)),
        patch(f"{n}:C.prop", lambda self: "new"),
        patch(f"{n}:C.gen", gen),
        patch(f"{n}:C.coro", coro),
        patch(f"{n}:C.positional", positional),
    )
    with install(trainer(*patches), "trainer") as installation:
        yield installation


def gen(self):
    yield "new"


async def coro(self):
    return "new"


def positional(self, x, /, y):
    return ("new", x, y)


def test_stock_outside_exact_inside_for_every_kind(up: Any, inst: Any) -> None:
    def everything() -> list[Any]:
        c = up.C()
        return [
            up.f(1, 2, key=3, z=4),
            c.method(1),
            up.C.static(1),
            up.C.klass(1),
            c.prop,
            *c.gen(),
            asyncio.run(c.coro()),
            c.positional(1, y=2),
        ]

    outside = everything()
    assert "new" not in str(outside)
    with patchkit.exact_context():
        inside = everything()
    assert "old" not in str(inside)
    assert str(inside).replace("new", "old") == str(outside)
    assert everything() == outside


def test_async_generators_pass_everything_on(mk: Toys) -> None:
    up = mk(
        """
        async def f(x):
            try:
                while True:
                    try:
                        x = yield ('old', x)
                    except KeyError:
                        x = 'caught'
            finally:
                log.append('closed')
        log = []
        """
    )

    async def f(x):
        async for value in original(x):
            yield ("new", *value)

    original = up.f

    async def talk(generator: Any) -> list[Any]:
        heard = [await generator.__anext__(), await generator.asend(2)]
        heard.append(await generator.athrow(KeyError()))
        await generator.aclose()
        return heard

    allowed = patch(f"{up.__name__}:f", f, accepts_unreachable=("*",))
    with install(trainer(allowed), "trainer"):
        assert asyncio.run(talk(up.f(1))) == [("old", 1), ("old", 2), ("old", "caught")]
        assert up.log == ["closed"]

        async def first() -> Any:
            return await up.f(1).__anext__()

        with exact_context():
            assert asyncio.run(first()) == ("new", "old", 1)


def test_a_raised_exception_leaves_the_context(up: Any, inst: Any) -> None:
    with pytest.raises(ZeroDivisionError), exact_context():
        raise ZeroDivisionError
    assert up.f()[0] == "old"
    assert inst.switch.inside == 0


def test_nesting_and_explicit_stock(up: Any, inst: Any) -> None:
    with exact_context():
        with stock_context():
            assert up.f()[0] == "old"
            with exact_context():
                assert up.f()[0] == "new"
        assert up.f()[0] == "new"


def in_thread(work: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_a_thread_that_never_said_is_refused_while_somebody_is_inside(up: Any, inst: Any) -> None:
    assert in_thread(up.f)[0] == "old"
    with exact_context():
        with pytest.raises(SwitchUnsetError, match=r"(?s)switch.capture\(\).*stock_context"):
            in_thread(up.f)
    assert in_thread(up.f)[0] == "old"


def test_the_state_can_be_carried_over(up: Any, inst: Any) -> None:
    with exact_context():
        state = trainer_switch().capture()

    def recompute() -> str:
        with state:
            return up.f()[0]

    assert in_thread(recompute) == "new", "after the context was left, as in backward"
    with stock_context():
        state = trainer_switch().capture()
    with exact_context():
        assert in_thread(recompute) == "old"
        assert recompute() == "old"
        assert up.f()[0] == "new"


def test_tasks_of_one_loop_do_not_see_each_other(up: Any, inst: Any) -> None:
    async def exact(entered: asyncio.Event, leave: asyncio.Event) -> list[str]:
        with exact_context():
            entered.set()
            await leave.wait()
            return [up.f()[0], await up.C().coro()]

    async def stock(entered: asyncio.Event, leave: asyncio.Event) -> str:
        await entered.wait()
        with stock_context():
            result = up.f()[0]
        with pytest.raises(SwitchUnsetError):
            up.f()
        leave.set()
        return result

    async def main() -> Any:
        events = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(exact(*events), stock(*events))

    assert asyncio.run(main()) == [["new", "new"], "old"]


def test_a_generator_closed_elsewhere_is_told_and_does_not_leave_it_open(
    up: Any, inst: Any
) -> None:
    def leaking() -> Any:
        with exact_context():
            yield

    generator = leaking()
    contextvars.copy_context().run(next, generator)
    assert inst.switch.inside == 1
    with pytest.raises(SwitchOrderError, match="left in another task or thread"):
        generator.close()
    assert inst.switch.inside == 0
    assert up.f()[0] == "old"


def test_undo_inside_is_refused(up: Any, inst: Any) -> None:
    with exact_context():
        with pytest.raises(SwitchBusyError, match="leave exact_context"):
            inst.uninstall()
        assert up.f()[0] == "new"


def test_leftovers_run_the_original(up: Any, mk: Toys) -> None:
    with install(trainer(patch(f"{up.__name__}:C.method", lambda self, x: ("new", x))), "trainer"):
        kept = up.C().method
        with exact_context():
            assert kept(1) == ("new", 1)
    assert kept(1) == ("old", 1)


REFUSED = [
    ("LIMIT", 3, "value", "a value cannot be switched"),
    ("cached", lambda x: 1, "replace", "an answer that is cached cannot be switched"),
    ("K", type("K", (), {}), "replace", "a class can only be replaced by a class, and not"),
]


@pytest.mark.parametrize(("name", "new", "action", "match"), REFUSED)
def test_what_cannot_be_switched_is_refused(
    mk: Toys, name: str, new: Any, action: str, match: str
) -> None:
    up = mk("import functools\nLIMIT = 2\n@functools.cache\ndef cached(x): ...\nclass K: ...\n")
    with pytest.raises(PreflightError, match=match):
        install(trainer(patch(f"{up.__name__}:{name}", new, action)), "trainer")


def test_which_installation_is_meant(mk: Toys) -> None:
    up = mk("def f(x=1): return 'old'\ndef g(x=1): return 'old'\n")
    new = lambda x=1: "new"  # noqa: E731
    with pytest.raises(NoInstallationError, match="no trainer installation"):
        exact_context()
    with install(trainer(patch(f"{up.__name__}:f", new), name="a"), "trainer"):
        with install(trainer(patch(f"{up.__name__}:g", new), name="b"), "trainer"):
            with pytest.raises(AmbiguousInstallationError, match=r'exact_context\(adapter="a"\)'):
                exact_context()
            with exact_context(adapter="b"):
                assert (up.f(), up.g()) == ("old", "new")
        with pytest.raises(NoInstallationError, match="'b'"):
            exact_context(adapter="b")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_keeps_the_patches_and_forgets_other_threads(up: Any, inst: Any) -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with exact_context():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    thread.start()
    entered.wait()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            answers = [up.f()[0]]
            with exact_context():
                answers.append(up.f()[0])
            inst.verify()
            inst.uninstall()
            answers.append(up.f()[0])
            os.write(write, " ".join(answers).encode())
        except BaseException as error:
            os.write(write, repr(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    leave.set()
    thread.join()
    assert os.read(read, 1000).decode() == "old new old"
