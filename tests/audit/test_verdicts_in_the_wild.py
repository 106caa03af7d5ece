"""Verdicts on forms as real projects write them, at one version."""

from __future__ import annotations

from pathlib import Path

import pytest
from audit_trees import write_tree

from patchkit.audit import Report, audit

CORE = """
from json import dumps
from other.nn import functional
from other.nn.functional import loss
FLAG = True
state = object()
def f(a, b=1): return a
class K:
    def m(self, x, *, y=0): return x
    def opt(self, x, first=0, second=0): return x
    @classmethod
    def load(cls, path): return cls()
class Sub(K):
    pass
def use(): return FLAG
"""
OTHER = {
    "other/__init__.py": "__version__ = '3.0'\n",
    "other/nn/__init__.py": "from other.nn import functional\n",
    "other/nn/functional.py": "def loss(x, y): return x\n",
}

# name: (patches, kind, words in the verdict)
ROWS: dict[str, tuple[str, str, str]] = {
    "name from another package": (
        "def g(*a, **k): ...\nc.dumps = g", "fine", "json:dumps",
    ),
    "name from nowhere": ("def g(): ...\nc.nowhere = g", "gone", "has no nowhere"),
    "special method that the class has from object": (
        "def g(self): return 'K'\nc.K.__repr__ = g", "fine", "",
    ),
    "added, and used by the project itself": (
        "def g(self): ...\nc.K.extra_thing = g\nclass Mine(c.K):\n"
        "    def go(self): return self.extra_thing()", "unknown", "--from",
    ),
    "added, and used by the project in a text": (
        "def g(self): ...\nc.K._of_text = g\nTEXT = 'x = self._of_text()'", "unknown", "--from",
    ),
    "added, and called by its name": (
        "def by_name(self): ...\nc.K.by_name = by_name\ndef go(rpc): rpc.call('by_name')",
        "unknown", "--from",
    ),
    "added under the project's own name": (
        "def g(self): ...\nc.K.run_of_mykit = g", "fine", "",
    ),
    "value that the package reads": ("c.FLAG = False", "fine", ""),
    "value that nothing reads": ("c.K.knob_of_old = False", "gone", "knob_of_old"),
    "optional parameters left out, the rest in order": (
        "def g(self, x, first=0): return x\nc.K.opt = g", "signature", "second",
    ),
    "optional parameters in another order": (
        "def g(self, x, second=0, first=0): return x\nc.K.opt = g", "signature", "",
    ),
    "one more optional parameter in between": (
        "def g(self, x, more=0, first=0, second=0): return more\nc.K.opt = g",
        "fine", "another place",
    ),
    "original of a class method, without its class": (
        "old = c.K.load.__func__\n@classmethod\ndef g(cls, path): return old(cls, path)\n"
        "c.K.load = g", "fine", "",
    ),
    "original of a class method, called with too much": (
        "old = c.K.load\n@classmethod\ndef g(cls, path): return old(cls, path, 3)\n"
        "c.K.load = g", "signature", "",
    ),
    "member of an object": ("def g(): ...\nc.state.hook = g", "unknown", "is an object"),
    # ---- guards over what `getattr` found
    "looked for, and there": (
        "old = getattr(c, 'f', None)\nif old is not None:\n    c.f = lambda a, b=1: a", "fine", "",
    ),
    "looked for, and not there": (
        "old = getattr(c, 'gone_one', None)\nif old is not None:\n    c.gone_one = print",
        "guard-never-true", "old is not None",
    ),
    "looked for by truth, and not there": (
        "def go():\n    K = getattr(c, 'GoneClass', None)\n    if not K:\n        return\n"
        "    c.f = lambda a, b=1: a", "guard-never-true", "not K",
    ),
    "put there only where it is missing": (
        "if getattr(c, 'f', None) is None:\n    c.f = print", "guard-never-true", "is None",
    ),
    "looked for where an object is": (
        "old = getattr(c.state, 'hook', None)\nif old is not None:\n    c.f = lambda a, b=1: a",
        "fine", "",
    ),
    "the code of a function is looked for": (
        "code = getattr(c.f, '__code__', None)\nif code is not None:\n"
        "    c.f = lambda a, b=1: a", "fine", "",
    ),
}  # fmt: skip


def run(tmp_path: Path, patches: str) -> Report:
    lib = write_tree(tmp_path / "1.0", {
        "lib/__init__.py": "__version__ = '1.0'\n", "lib/core.py": CORE,
    })  # fmt: skip
    other = write_tree(tmp_path / "3.0", OTHER)
    project = write_tree(
        tmp_path / "project",
        {"mykit/__init__.py": "", "mykit/p.py": "import lib.core as c\n" + patches + "\n"},
    )
    return audit(project, against=[str(lib), str(other)], workers=1)


@pytest.mark.parametrize("name", ROWS)
def test_verdict(name: str, tmp_path: Path) -> None:
    patches, kind, words = ROWS[name]
    (finding,) = run(tmp_path, patches).findings
    (verdict,) = finding.verdicts
    assert (verdict.kind.value, words in " ".join([verdict.text, *verdict.also])) == (kind, True), (
        verdict
    )


def test_reached_through_another_package(tmp_path: Path) -> None:
    """The patch is one of the package where the name is at home."""
    (finding,) = run(tmp_path, "def g(x, y): ...\nc.functional.loss = g").findings
    assert (finding.target, finding.package) == ("other.nn.functional:loss", "other")
    assert [v.kind.value for v in finding.verdicts] == ["fine"]


def test_what_the_project_adds_may_be_looked_for(tmp_path: Path) -> None:
    report = run(
        tmp_path,
        "def hook(self): ...\ndef first():\n    c.K.hook = hook\n"
        "def second():\n    if getattr(c.K, 'hook', None) is not None:\n"
        "        c.f = lambda a, b=1: a\n",
    )
    kinds = {f.target: f.verdicts[0].kind.value for f in report.findings}
    assert kinds["lib.core:f"] == "fine"


@pytest.mark.parametrize(("name", "kind"), {"web": "unknown", "gone": "gone"}.items())
def test_through_a_name_made_when_asked(name: str, kind: str, tmp_path: Path) -> None:
    lib = write_tree(tmp_path / "1.0", {
        "lib/__init__.py": "def __getattr__(name):\n    if name == 'web':\n"
        "        import other\n        return other\n    raise AttributeError(name)\n",
    })  # fmt: skip
    project = write_tree(
        tmp_path / "project", {"p.py": f"from lib import {name} as w\nw.Client.send = print\n"}
    )
    (finding,) = audit(project, against=[str(lib)], workers=1).findings
    assert finding.verdicts[0].kind.value == kind


def test_what_a_backend_brings_is_not_judged(tmp_path: Path) -> None:
    torch = write_tree(tmp_path / "torch", {"torch/__init__.py": "__version__ = '2.0'\n"})
    project = write_tree(
        tmp_path / "project", {"p.py": "import torch\ntorch.npu.synchronize = print\n"}
    )
    (finding,) = audit(project, against=[str(torch)], workers=1).findings
    assert finding.verdicts[0].kind.value == "unknown"
