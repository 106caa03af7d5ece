"""One row per verdict: the package at two versions, the patch, what becomes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from audit_trees import write_tree

from patchkit.audit import Finding, Verdict, audit

BODY = """
def f(a, b=1):
    first = prepare(a)
    second = combine(first, b)
    third = finish(second)
    return third
"""
CLS = """
class K:
    def m(self, x, y=0):
        total = x + y
        return self.scale(total)
    def other(self): return 0
"""

# name: (core.py before, core.py after, patches.py, kind, words in the text)
ROWS: dict[str, tuple[str, str, str, str, str]] = {
    "unchanged": (BODY, BODY, "c.f = lambda a, b=1: a", "fine", ""),
    "docstring and layout": (
        BODY, BODY.replace("def f(a, b=1):", 'def f(a, b=1):\n    """Text."""\n    # more'),
        "c.f = lambda a, b=1: a", "fine", "",
    ),
    "body changed": (
        BODY, BODY.replace("finish(second)", "finish(second, 2)"),
        "def g(a, b=1): return a\nc.f = g", "body-changed", "the body changed",
    ),
    "body changed under a wrapper": (
        BODY, BODY.replace("finish(second)", "finish(second, 2)"),
        "o = c.f\ndef g(a, b=1): return o(a, b)\nc.f = g", "fine", "",
    ),
    "gone": (BODY, "x = 1", "def g(a, b=1): return a\nc.f = g", "gone", "before has it"),
    "class gone": (CLS, "x = 1", "def g(self, x, y=0): return 0\nc.K.m = g", "gone", ""),
    "parameter added": (
        BODY, BODY.replace("b=1", "b=1, scale=None"),
        "def g(a, b=1): return a\nc.f = g", "signature", "scale",
    ),
    "parameter added, taken by **": (
        BODY, BODY.replace("def f(a, b=1):", "def f(a, b=1, scale=None):"),
        "def g(a, b=1, **more): return a\nc.f = g", "fine", "",
    ),
    "parameter removed": (
        BODY, BODY.replace("b=1", "").replace(", b)", ")"),
        "def g(a, b): return a\nc.f = g", "signature", "requires b",
    ),
    "parameter renamed": (
        BODY, BODY.replace("def f(a,", "def f(q,").replace("prepare(a)", "prepare(q)"),
        "def g(a, b=1): return a\nc.f = g", "signature", "called q now",
    ),
    "parameter that always had another name": (
        BODY, BODY, "def g(mine, b=1): return mine\nc.f = g", "fine", "",
    ),
    "keyword-only now": (
        BODY, BODY.replace("b=1", "*, b=1"),
        "def g(a, b=1): return a\nc.f = g", "fine", "",
    ),
    "method parameter added": (
        CLS, CLS.replace("y=0", "y=0, z=0"),
        "def g(self, x, y=0): return 0\nc.K.m = g", "signature", "z",
    ),
    "receiver may have another name": (
        CLS, CLS, "def g(this, x, y=0): return 0\nc.K.m = g", "fine", "",
    ),
    "wrapper passes what is gone": (
        BODY, "def f(a):\n    return a",
        "o = c.f\ndef g(a, b=1): return o(a, b=b)\nc.f = g", "signature", "passes b",
    ),
    "wrapper does not pass what is new": (
        BODY, "def f(a, b=1, *, key):\n    return a",
        "o = c.f\ndef g(a, b=1, **k): return o(a, b)\nc.f = g", "signature", "does not pass key",
    ),
    "wrapper passes everything on": (
        BODY, "def f(z, *, key): return z",
        "o = c.f\ndef g(*a, **k): return o(*a, **k)\nc.f = g", "fine", "",
    ),
    "became a property": (
        CLS, CLS.replace("    def m(self, x, y=0):", "    @property\n    def m(self):").replace(
            "x + y", "1"
        ),
        "def g(self, x, y=0): return 0\nc.K.m = g", "signature", "property",
    ),
    "became async": (
        BODY, BODY.replace("def f", "async def f"),
        "def g(a, b=1): return a\nc.f = g", "signature", "async",
    ),
    "became a static method": (
        CLS, CLS.replace("    def other(self)", "    @staticmethod\n    def other()"),
        "def g(self): return 0\nc.K.other = g", "signature", "staticmethod",
    ),
    "static method, wrapped as one": (
        CLS.replace("    def other(self)", "    @staticmethod\n    def other()"),
        CLS.replace("    def other(self)", "    @staticmethod\n    def other()"),
        "c.K.other = staticmethod(lambda: 1)", "fine", "",
    ),
    "class method, called through the class": (
        CLS.replace("    def other(self)", "    @classmethod\n    def other(cls, a)"),
        CLS.replace("    def other(self)", "    @classmethod\n    def other(cls, a)"),
        "c.K.other = lambda a: 1", "fine", "",
    ),
    "member of a base without source": (
        "from lib._C import Base\nclass K(Base): ...",
        "from lib._C import Base\nclass K(Base): ...",
        "from unittest.mock import patch\npatch.object(c.K, 'copy_', print).start()",
        "unknown", "lib._C:Base",
    ),
    "attribute of an object": (
        "state = make()", "state = make()", "c.state.hook = print", "fine", "",
    ),
    "class became a function": (
        CLS, "def K(): return 0", "def g(self, x, y=0): return 0\nc.K.m = g", "gone", "",
    ),
    "renamed": (
        BODY, BODY.replace("def f(", "def f_impl("),
        "def g(a, b=1): return a\nc.f = g", "renamed", "f_impl",
    ),
    "absorbed, whole body": (
        BODY, "def f(a, b=1):\n    if a is None:\n        return 0\n    return finish(a)",
        "def g(a, b=1):\n    if a is None:\n        return 0\n    return finish(a)\nc.f = g",
        "absorbed", "the replacement's",
    ),
    "absorbed, the change": (
        BODY,
        BODY.replace("    second", "    if first is None:\n        return EMPTY\n    second")
        .replace("finish(second)", "finish(second, other)"),
        "def g(a, b=1):\n    first = prepare(a)\n    if first is None:\n        return EMPTY\n"
        "    second = combine(first, b)\n    third = finish(second)\n    return third\nc.f = g",
        "absorbed", "2 of 2",
    ),
    "not absorbed: upstream did something else": (
        BODY, BODY.replace("finish(second)", "finish(second, other)"),
        "def g(a, b=1):\n    first = prepare(a)\n    if first is None:\n        return EMPTY\n"
        "    second = combine(first, b)\n    third = finish(second)\n    return third\nc.f = g",
        "body-changed", "",
    ),
    "absorbed value": ("N = 1", "N = 5", "c.N = 5", "absorbed", "its value is 5"),
    "value": ("N = 1", "N = 2", "c.N = 5", "body-changed", "1 → 2"),
    "value gone": ("N = 1", "M = 'x'", "c.N = 5", "gone", ""),
    "adds a function": (BODY, BODY, "def g(): ...\nc.fresh = g", "fine", "new name"),
    "registry": ("R = {}", "R = {}", "c.R['x'] = print", "fine", ""),
    "registry gone": ("R = {}", "x = 1", "c.R['x'] = print", "gone", ""),
    "anchor": (
        BODY, BODY,
        "from pathlib import Path\np = Path(lib.__file__).parent / 'core.py'\n"
        "p.write_text(p.read_text().replace('prepare(a)', 'prepare(a, 0)'))",
        "fine", "",
    ),
    "anchor lost": (
        BODY, BODY.replace("prepare(a)", "prepare(a, None)"),
        "from pathlib import Path\np = Path(lib.__file__).parent / 'core.py'\n"
        "p.write_text(p.read_text().replace('prepare(a)', 'get(a)'))",
        "anchor-lost", "prepare(a)",
    ),
    "anchor, absorbed": (
        BODY, BODY.replace("prepare(a)", "get(a, None)"),
        "from pathlib import Path\np = Path(lib.__file__).parent / 'core.py'\n"
        "p.write_text(p.read_text().replace('prepare(a)', 'get(a, None)'))",
        "absorbed", "already",
    ),
    "anchor of a regular expression": (
        BODY, BODY.replace("prepare", "ready"),
        "import re\nfrom pathlib import Path\np = Path(lib.__file__).parent / 'core.py'\n"
        "p.write_text(re.sub(r'prepare\\(\\w+\\)', 'x', p.read_text()))",
        "anchor-lost", "prepare",
    ),
    "anchor in the source of a function": (
        BODY, BODY.replace("combine", "merge"),
        "import inspect\ns = inspect.getsource(c.f).replace('combine(first, b)', '0')\nexec(s)",
        "anchor-lost", "combine",
    ),
    "guard false": (
        BODY, BODY,
        "from packaging.version import Version\nif Version(lib.__version__) < Version('0.5'):\n"
        "    c.f = print", "guard-never-true", "0.5",
    ),
    "hasattr false": (
        BODY, "x = 1", "if hasattr(c, 'f'):\n    c.f = print", "guard-never-true", "hasattr",
    ),
    "import fails without a word": (
        CLS, "x = 1",
        "try:\n    from lib.core import K\n    K.m = print\nexcept ImportError:\n    pass",
        "gone", "",
    ),
    "marker": (BODY, BODY, "def g(a, b=1): return a\nc.f = g\nc._patched = True", "fine", ""),
}  # fmt: skip


def run(tmp_path: Path, before: str, after: str, patches: str) -> tuple[Finding, Verdict]:
    for version, core in (("1.0", before), ("2.0", after)):
        write_tree(tmp_path / version, {
            "lib/__init__.py": f"__version__ = '{version}'\n",
            "lib/core.py": core,
        })  # fmt: skip
    project = write_tree(
        tmp_path / "project", {"p.py": "import lib\nimport lib.core as c\n" + patches + "\n"}
    )
    report = audit(project, old=str(tmp_path / "1.0"), new=str(tmp_path / "2.0"), workers=1)
    assert len(report.findings) == 1, [f.target for f in report.findings]
    finding = report.findings[0]
    return finding, next(v for v in finding.verdicts if v.version == "lib 2.0")


@pytest.mark.parametrize("name", ROWS)
def test_verdict(name: str, tmp_path: Path) -> None:
    before, after, patches, kind, words = ROWS[name]
    if "has it" in words:
        words = "has it"
    _, verdict = run(tmp_path, before, after, patches)
    assert (verdict.kind.value, words in verdict.text) == (kind, True), verdict


def test_moved_to_another_file(tmp_path: Path) -> None:
    for version, home in (("1.0", "lib/core.py"), ("2.0", "lib/inner/place.py")):
        write_tree(tmp_path / version, {
            "lib/__init__.py": f"__version__ = '{version}'\n",
            "lib/inner/__init__.py": "",
            "lib/core.py": "x = 1\n",
            home: BODY,
        })  # fmt: skip
    project = write_tree(
        tmp_path / "project",
        {"p.py": "import lib.core as c\ndef g(a, b=1): return a\nc.f = g\n"},
    )
    report = audit(project, old=str(tmp_path / "1.0"), new=str(tmp_path / "2.0"), workers=1)
    verdict = report.findings[0].verdicts[1]
    assert (verdict.kind.value, verdict.new_symbol) == ("moved", "lib.inner.place:f")
    assert report.findings[0].verdicts[0].kind.value == "fine"


def test_diff_of_the_original(tmp_path: Path) -> None:
    _, verdict = run(
        tmp_path, BODY, BODY.replace("finish(second)", "finish(second, 2)"),
        "def g(a, b=1): return a\nc.f = g",
    )  # fmt: skip
    assert "-    third = finish(second)" in verdict.diff
    assert "+    third = finish(second, 2)" in verdict.diff


def test_silent_failure_is_said(tmp_path: Path) -> None:
    _, verdict = run(
        tmp_path, CLS, "x = 1",
        "try:\n    from lib.core import K\n    K.m = print\nexcept ImportError:\n    pass",
    )  # fmt: skip
    assert verdict.silent
    assert any("nobody is told" in text for text in verdict.also)


def test_two_patches_of_one_symbol(tmp_path: Path) -> None:
    write_tree(tmp_path / "1.0", {"lib/__init__.py": "", "lib/core.py": BODY})
    project = write_tree(tmp_path / "project", {
        "a.py": "import lib.core as c\nc.f = lambda a, b=1: 1\n",
        "b.py": "from lib import core\ncore.f = lambda a, b=1: 2\n",
    })  # fmt: skip
    report = audit(project, against=[str(tmp_path / "1.0" / "lib")], workers=1)
    assert {f.place.file: f.also_patched for f in report.findings} == {
        "a.py": ("b.py:2",), "b.py": ("a.py:2",),
    }  # fmt: skip
