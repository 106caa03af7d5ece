"""docs/errors.md shows what the code really says.

Each example below makes its error happen; the page is rendered from that and
compared. After a change of words: ``PATCHKIT_WRITE_DOCS=1 pytest`` this file.
"""

from __future__ import annotations

import copy
import importlib
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from patchkit.engine import (
    Adapter,
    exact_context,
    find_adapter,
    install,
    installations,
)
from patchkit.engine import _journal as journal
from patchkit.engine import errors as errors_module
from patchkit.engine._slots import AttributeSlot
from patchkit.errors import PatchkitError, ViolationsError

from .conftest import Toys, patch, rollout, trainer

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
UP = "def f(x, scale=1.0):\n    return x * scale\n"

Example = Callable[[Toys], Any]
EXAMPLES: dict[str, tuple[str, Example]] = {}


def example(title: str) -> Callable[[Example], Example]:
    """An example; the error's class is that of what it raises."""

    def register(make: Example) -> Example:
        EXAMPLES[make.__name__] = (title, make)
        return make

    return register


def new(x, scale=1.0):
    return 0


def ours(mk: Toys) -> Any:
    return mk("def f(x, scale=1.0):\n    return 0\ndef g(x):\n    return 0\n", name="my_adapter")


@example("The adapter is not installed, or misspelt.")
def adapter_not_found(mk: Toys) -> None:
    errors_module.AdapterNotFoundError.__init__  # noqa: B018 - the class that is shown
    try:
        find_adapter("qwen3_mo")
    except errors_module.AdapterNotFoundError as error:
        raise errors_module.AdapterNotFoundError(error.name, ["qwen3_moe"]) from None


@example("A declaration contradicts itself.")
def declaration(mk: Toys) -> None:
    patch("shop:f", new, "overwrite", until=" ")


@example("A reference in a declaration leads nowhere.")
def reference_not_found(mk: Toys) -> None:
    from patchkit.engine import resolve_reference

    ours(mk)
    resolve_reference("my_adapter:h")


@example("The side was left out, and it is not clear which one is meant.")
def side(mk: Toys) -> None:
    mk(UP, name="shop")
    install(Adapter(name="toy", rollout=(patch("shop:f", new),), trainer=(patch("shop:f", new),)))


@example("The target's signature changed: everything found wrong is told together.")
def signature_grew(mk: Toys) -> None:
    mk("def f(x, scale=1.0, *, bias=None):\n    return x * scale\n", name="shop")
    ours(mk)
    install(rollout(patch("shop:f", "my_adapter:f"), patch("shop:gone", "my_adapter:g")), "rollout")


@example("The code was changed since a person reviewed it.")
def drift(mk: Toys) -> None:
    mk(UP, name="shop")
    old = {"schema": 1, "symbols": {"shop:f": {"0123456789abcdef0123456789abcdef": ["1.0"]}}}
    install(rollout(patch("shop:f", new), reviewed=old), "rollout")


@example("Somebody holds the old function where it cannot be exchanged.")
def unreachable(mk: Toys) -> None:
    mk(UP + "PAIR = (f, f)\n", name="shop")
    install(rollout(patch("shop:f", new)), "rollout")


@example("Instances were built before the patch was installed.")
def live_instance(mk: Toys) -> None:
    up = mk(
        "class Op:\n    def __init__(self):\n        self._run = self.forward\n"
        "    def forward(self, x): return x\n",
        name="shop",
    )
    live = up.Op()
    try:
        install(rollout(patch("shop:Op.forward", lambda self, x: 0)), "rollout")
    finally:
        del live


@example("Another library wrapped the function first.")
def foreign_wrapper(mk: Toys) -> None:
    up = mk(UP, name="shop")
    mk.made.append("tracer")
    vendor = mk(
        "import functools\ndef trace(f):\n    @functools.wraps(f)\n"
        "    def wrapper(*a, **k): return f(*a, **k)\n    return wrapper\n",
        name="tracer",
    )
    up.f = vendor.trace(up.f)
    install(rollout(patch("shop:f", new)), "rollout")


@example("Two adapters want one function, and no order was declared.")
def two_adapters(mk: Toys) -> None:
    mk(UP, name="shop")
    with install(rollout(patch("shop:f", new), name="first"), "rollout"):
        install(rollout(patch("shop:f", new), name="second"), "rollout")


@example("The adapter is installed already, with another definition.")
def already_installed(mk: Toys) -> None:
    mk(UP + "def g(x): return x\n", name="shop")
    with install(rollout(patch("shop:f", new)), "rollout"):
        install(rollout(patch("shop:g", lambda x: 0)), "rollout")


@example("A module that was waited for does not fit when it comes.")
def during_import(mk: Toys) -> None:
    mk.write(UP + "import functools\nf = functools.partial(f, 2)\n", name="shop")
    install(rollout(patch("shop:f", new)), "rollout")
    importlib.import_module("shop")


@example("What was installed is gone: verify() says who is there instead.")
def verification(mk: Toys) -> None:
    up = mk(UP, name="shop")
    with install(rollout(patch("shop:f", new)), "rollout") as inst:
        installed = up.f
        up.f = mk("def later(x): return x\n", name="other_patcher").later
        try:
            inst.verify()
        finally:
            up.f = installed


@example("Somebody patched on top; undoing would throw their patch away.")
def undo_refused(mk: Toys) -> None:
    mk(UP, name="shop")
    lower = install(rollout(patch("shop:f", new), name="lower"), "rollout")
    upper = install(rollout(patch("shop:f", new), name="upper", after=("lower",)), "rollout")
    try:
        lower.uninstall()
    finally:
        upper.uninstall()
        lower.uninstall()


@example("Somebody wrote the slot between the check and the write.")
def slot_changed(mk: Toys) -> None:
    up = mk(UP, name="shop")
    commit = journal.commit
    racing = mk("def later(x): return x\n", name="other_patcher").later

    def raced(entries: Any) -> Any:
        up.f = racing
        return commit(entries)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(journal, "commit", raced)
        install(rollout(patch("shop:f", new)), "rollout")


@example("A slot cannot be restored: the process is a mixture, and has to end.")
def rollback(mk: Toys) -> None:
    mk(UP, name="shop")
    inst = install(rollout(patch("shop:f", new)), "rollout")

    def stuck(slot: Any, value: Any) -> None:
        raise MemoryError("cannot allocate")

    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(AttributeSlot, "write", stuck)
            inst.uninstall()
    finally:
        inst.uninstall()


@example("A patch is installed, but nothing ever calls it.")
def not_reached(mk: Toys) -> None:
    up = mk(
        "class V1:\n    def run(self): return 1\nclass V2:\n    def run(self): return 2\n",
        name="shop",
    )
    with install(rollout(patch("shop:V1.run", lambda self: 0)), "rollout") as inst, inst.canary():
        up.V2().run()


@example("Two canary runs at once.")
def canary_busy(mk: Toys) -> None:
    mk(UP, name="shop")
    with install(rollout(patch("shop:f", new)), "rollout") as inst:
        with inst.canary(), inst.canary():
            pass


@example("exact_context() in a process that installed nothing.")
def no_installation(mk: Toys) -> None:
    exact_context()


@example("exact_context() with several trainer installations.")
def ambiguous_installation(mk: Toys) -> None:
    mk(UP + "def g(x): return x\n", name="shop")
    with install(trainer(patch("shop:f", new), name="one"), "trainer"):
        with install(trainer(patch("shop:g", lambda x: 0), name="two"), "trainer"):
            exact_context()


@example("A thread calls a patched function and never said which variant it wants.")
def switch_unset(mk: Toys) -> None:
    up = mk(UP, name="shop")
    caught: list[BaseException] = []

    def backward() -> None:
        try:
            up.f(1)
        except PatchkitError as error:
            caught.append(error)

    with install(trainer(patch("shop:f", new)), "trainer"):
        with exact_context():
            thread = threading.Thread(target=backward, name="autograd-0")
            thread.start()
            thread.join()
    raise caught[0]


@example("A generator was closed in another task than the one that entered the context.")
def switch_order(mk: Toys) -> None:
    import contextvars

    mk(UP, name="shop")

    def leaking() -> Any:
        with exact_context():
            yield

    with install(trainer(patch("shop:f", new)), "trainer"):
        generator = leaking()
        contextvars.copy_context().run(next, generator)
        generator.close()


@example("uninstall() while somebody is inside exact_context().")
def switch_busy(mk: Toys) -> None:
    mk(UP, name="shop")
    with install(trainer(patch("shop:f", new)), "trainer") as inst, exact_context():
        inst.uninstall()


@example("An installation was sent to another process.")
def process_bound(mk: Toys) -> None:
    mk(UP, name="shop")
    with install(rollout(patch("shop:f", new)), "rollout") as inst:
        copy.deepcopy(inst)


def shown(name: str, mk: Toys) -> tuple[str, str]:
    """(class name, message) of an example."""
    with pytest.raises(PatchkitError) as caught:
        EXAMPLES[name][1](mk)
    text = str(caught.value).replace(str(mk.root), "…")
    text = re.sub(r"engine/test_errors_doc\.py:\d+", "my_code.py", text)
    return type(caught.value).__name__, text


@pytest.fixture
def clear(mk: Toys) -> Callable[[], None]:
    def now() -> None:
        assert installations() == []
        for module in mk.made:
            sys.modules.pop(module, None)

    return now


@pytest.mark.skipif(sys.version_info < (3, 11), reason="3.10 cannot name the class of a code")
def test_the_page_shows_what_the_code_says(mk: Toys, clear: Callable[[], None]) -> None:
    rows, blocks, classes = [], [], set()
    for name, (title, _) in EXAMPLES.items():
        kind, message = shown(name, mk)
        clear()
        classes.add(kind)
        anchor = name.replace("_", "-")
        rows.append(f"| [{title}](#{anchor}) | `{kind}` |")
        head = f'<a id="{anchor}"></a>\n### {title}\n\n`{kind}`\n'
        blocks.append(f"{head}\n```text\n{message}\n```\n")
    page = HEAD + "\n".join(rows) + "\n\n" + "\n".join(blocks)
    written, mark, others = PAGE.read_text("utf-8").partition(OTHER_PARTS)
    if os.environ.get("PATCHKIT_WRITE_DOCS"):
        PAGE.write_text(page + mark + others, "utf-8")
        written = page
    assert written == page, "docs/errors.md is not current"
    known = {
        cls.__name__
        for cls in vars(errors_module).values()
        if isinstance(cls, type)
        and issubclass(cls, PatchkitError)
        and cls.__module__ == errors_module.__name__
    }
    assert known - classes == set(), "every error of the engine has an example"


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_message_says_what_to_do(name: str, mk: Toys) -> None:
    with pytest.raises(PatchkitError) as caught:
        EXAMPLES[name][1](mk)
    error = caught.value
    if isinstance(error, ViolationsError):
        for violation in error.violations:
            assert violation.subject and violation.found and violation.remedy, violation
    else:
        ways_out = ("; ", "Install", "call ", "say ", "leave ", "end ", "correct", "Either", "find")
        assert any(word in str(error) for word in ways_out)


# Below it stand the errors of the other parts: see tests/test_errors_doc.py.
OTHER_PARTS = "\n# What the other parts refuse\n"

HEAD = """\
# What the engine refuses, and what to do about it

Every message below was produced by the code (a test compares this page with it).
All errors are `patchkit.PatchkitError`; `ConfigurationError` among them means that
something was named or declared wrongly (exit code 2 on the command line). Where
several things can be wrong they arrive together, each with what was expected, what
was found, and what to do.

| what happened | error |
| --- | --- |
"""
