# ruff: noqa: E501 (rows of the table stand on one line each)
"""One table: what was there, what is there now, and what that is called."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from patchkit.symbols.drift import Finding, SourceView, TreeSource, diff

LONG = """
    total = 0
    for index, weight in enumerate(weights):
        if weight.requires_grad and index % stride == offset:
            total += weight.float().sum() * scale
    return total / max(len(weights), 1)
"""
OTHER = """
    names = sorted(registry.keys(), key=str.lower)
    while names:
        first = names.pop()
        yield first, registry[first].describe(verbose=True)
"""
BODY = "(weights, stride, offset, scale=1.0):" + LONG
METHOD = "(self, weights, stride, offset, scale=1.0):" + LONG.replace("\n", "\n ")


def method(name: str, head: str = METHOD) -> str:
    return f" def {name}{head}\n"


def files(text: str | dict[str, str]) -> dict[str, str]:
    found = {"m": text} if isinstance(text, str) else dict(text)
    return {"__init__": "", **found}


@pytest.fixture
def compare(tmp_path: Path):
    def compare(old: str | dict[str, str], new: str | dict[str, str], symbol: str) -> Finding:
        views = []
        for side, sources in (("old", old), ("new", new)):
            for name, text in files(sources).items():
                file = tmp_path / side / "pkg" / f"{name}.py"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(dedent(text))
            views.append(SourceView(TreeSource(tmp_path / side, "pkg", side)))
        name = symbol if symbol.startswith("pkg") else f"pkg.m:{symbol}"
        drift = diff(*views, [name])
        assert not drift.unknown, drift.unknown
        return drift.findings[0]

    return compare


U, B, C, S = "unchanged", "body-only", "signature-compatible", "signature-breaking"
R, M, N = "removed", "moved", "renamed"

IN_PLACE = [
    # ---- unchanged: what no caller and no reader of the code would notice
    ("def f(a): return a", "def f(a): return a", "f", U),
    ("def f(a): return a", "def f(a):\n    return (a)", "f", U),  # layout
    ("def f(a): return a", "# new\ndef f(a):\n    # why\n    return a", "f", U),  # comments
    ("def f(a): return a", "def f(a):\n    'Says it.'\n    return a", "f", U),  # docstring
    ("def f(a):\n 'One.'\n return a", "def f(a):\n 'Two.'\n return a", "f", U),
    ("def f():\n 'Only this.'", "def f(): pass", "f", U),
    ("def f(a: int): return a", "def f(a: str): return a", "f", U),  # annotation
    ("def f(a): return a", "def f(a) -> int: return a", "f", U),
    ("def f(): return 'a' 'b'", "def f(): return 'ab'", "f", U),
    ("def f(): return 0x10", "def f(): return 16", "f", U),
    ("def f(a, b=1): return a", "def f(a, b = 1,): return a", "f", U),
    ("def f(): return f'{x}a' 'b'", "def f(): return f'{x}ab'", "f", U),
    ("x = 1\ndef f(): return 1", "y = 2\nz = 3\ndef f(): return 1", "f", U),  # line moved
    ("if X:\n def f(): return 1", "if X:\n  def f():\n    return 1", "f", U),
    ("class C:\n 'Doc.'\n x = 1\n 'of x'", "class C:\n x = 1", "C", U),
    ("class C:\n def a(self): pass\n def b(self): pass",
     "class C:\n def b(self): pass\n def a(self): pass", "C", U),
    ("f = 1", "f: int = 1", "f", U),
    ("@overload\ndef f(a: int): ...\ndef f(a): return a", "def f(a): return a", "f", U),
    ("if TYPE_CHECKING:\n def f(a): ...\nelse:\n def f(b): pass", "def f(b): pass", "f", U),
    # ---- body only
    ("def f(a): return a", "def f(a): return -a", "f", B),
    ("def f(a): return a + 1", "def f(a): return a - 1", "f", B),
    ("def f(a): return 1", "def f(a): return 1.0", "f", B),  # type of a constant
    ("def f(a): return 1", "def f(a): return True", "f", B),
    ("def f(): return '1'", "def f(): return b'1'", "f", B),
    ("def f(): return ''", "def f(): return None", "f", B),
    ("def f(a): return a < 1", "def f(a): return a <= 1", "f", B),
    ("def f(a): return a.x", "def f(a): return a.y", "f", B),
    ("def f(a): return g(a)", "def f(a): return g(*a)", "f", B),
    ("def f(a): return f'{a}'", "def f(a): return f'{a!r}'", "f", B),
    ("def f(a): return f'{a:>3}'", "def f(a): return f'{a:<3}'", "f", B),
    ("def f(a): return f'{a}b'", "def f(a): return f'b{a}'", "f", B),
    ("def f(a): return [a]", "def f(a): return (a,)", "f", B),
    ("def f(a): return {**a}", "def f(a): return {None: a}", "f", B),
    ("def f(a):\n if a: pass\n else: g()", "def f(a):\n if a: g()\n else: pass", "f", B),
    ("def f(a):\n for x in a: g()\n else: h()", "def f(a):\n for x in a: g()\n h()", "f", B),
    ("def f(a):\n x: int = a\n return x", "def f(a):\n x = a\n return x", "f", B),  # strict inside
    ("def f(a):\n g()\n 'no docstring'", "def f(a):\n g()", "f", B),
    ("def f():\n def g(): return 1\n return g", "def f():\n def g(): return 2\n return g", "f", B),
    ("def f():\n return lambda x: x", "def f():\n return lambda x: -x", "f", B),
    ("def f(a): pass", "@cached\ndef f(a): pass", "f", B),  # a decorator
    ("@a\n@b\ndef f(): pass", "@b\n@a\ndef f(): pass", "f", B),
    ("@a(1)\ndef f(): pass", "@a(2)\ndef f(): pass", "f", B),
    ("if X:\n def f(): return 1\nelse:\n def f(): return 2",
     "if X:\n def f(): return 1\nelse:\n def f(): return 3", "f", B),  # the other branch
    ("try:\n from x import f\nexcept ImportError:\n def f(): return 1",
     "try:\n from x import f\nexcept ImportError:\n def f(): return 2", "f", B),
    ("def f(): pass", "if X:\n def f(): pass\nelse:\n f = None", "f", B),
    ("class C:\n x = 1", "class C:\n x = 2", "C", B),
    ("class C:\n def a(self): return 1", "class C:\n def a(self): return 2", "C", B),
    ("class C: pass", "class C:\n def a(self): return 2", "C", B),
    ("class C(A): pass", "class C(B): pass", "C", B),
    ("class C(A): pass", "class C(A, metaclass=M): pass", "C", B),
    ("class C: pass", "@dataclass\nclass C: pass", "C", B),
    ("f = 1", "f = 2", "f", B),
    ("f = {'a': 1}", "f = {'a': 1, 'b': 2}", "f", B),
    ("f = []\nf += [1]", "f = []\nf += [2]", "f", B),
    ("class C:\n @property\n def f(self): return 1", "class C:\n @property\n def f(self): return 2",
     "C.f", B),
    ("class C:\n @property\n def f(self): return 1\n @f.setter\n def f(self, v): self.v = v",
     "class C:\n @property\n def f(self): return 1\n @f.setter\n def f(self, v): self.w = v",
     "C.f", B),
    ("def f(X: tl.constexpr): pass", "def f(X): pass", "f", B),  # compilers read this annotation
    # ---- compatible signatures
    ("def f(a): pass", "def f(a, b=1): pass", "f", C),
    ("def f(a): pass", "def f(a, *, b=1): pass", "f", C),
    ("def f(a): pass", "def f(a, *args): pass", "f", C),
    ("def f(a): pass", "def f(a, **kw): pass", "f", C),
    ("def f(a): pass", "def f(a=None): pass", "f", C),
    ("def f(a=1): pass", "def f(a=2): pass", "f", C),  # a default that changes
    ("def f(a=None): pass", "def f(a=X.Y): pass", "f", C),
    ("def f(*, a=1): pass", "def f(*, b=2, a=1): pass", "f", C),  # order of keywords is free
    ("def f(a, *, b): pass", "def f(a, b): pass", "f", C),  # keyword-only no longer
    ("def f(a, /): pass", "def f(a): pass", "f", C),
    ("def f(a, /): pass", "def f(x, /): pass", "f", C),  # nobody can name it
    ("def f(*args): pass", "def f(*rest): pass", "f", C),
    ("def f(**kwargs): pass", "def f(**options): pass", "f", C),
    ("class C:\n def f(self, a): pass", "class C:\n def f(self, a, b=1): pass", "C.f", C),
    ("class C:\n def __init__(self, a): pass", "class C:\n def __init__(self, a, b=1): pass", "C", C),
    ("class C:\n x: int = 1", "class C:\n x: float = 1", "C.x", C),  # a field's type
    ("@dataclass\nclass C:\n a: int", "@dataclass\nclass C:\n a: int\n b: int = 1", "C", C),
    # ---- breaking signatures
    ("def f(a, b): pass", "def f(a): pass", "f", S),
    ("def f(a): pass", "def f(a, b): pass", "f", S),  # one more that is required
    ("def f(a): pass", "def f(a, *, b): pass", "f", S),
    ("def f(a, b): pass", "def f(b, a): pass", "f", S),
    ("def f(a): pass", "def f(b): pass", "f", S),
    ("def f(a, b=1): pass", "def f(a, b): pass", "f", S),
    ("def f(a, c=1): pass", "def f(a, b=0, c=1): pass", "f", S),  # inserted in the middle
    ("def f(a, *args): pass", "def f(a, b=0, *args): pass", "f", S),
    ("def f(a): pass", "def f(*, a): pass", "f", S),
    ("def f(a): pass", "def f(a, /): pass", "f", S),
    ("def f(a, *args): pass", "def f(a): pass", "f", S),
    ("def f(a, **kw): pass", "def f(a): pass", "f", S),
    ("def f(a): pass", "async def f(a): pass", "f", S),
    ("async def f(a): pass", "def f(a): pass", "f", S),
    ("def f(a): return [a]", "def f(a): yield a", "f", S),
    ("def f(a): yield a", "def f(a): return [a]", "f", S),
    ("async def f(a): yield a", "async def f(a): return a", "f", S),
    ("def f(a): yield a", "@contextmanager\ndef f(a): yield a", "f", S),
    ("class f: pass", "def f(): pass", "f", S),  # class → function
    ("def f(): pass", "class f: pass", "f", S),
    ("def f(): pass", "f = 1", "f", S),
    ("f = 1", "def f(): pass", "f", S),
    ("f = 1", "class f: pass", "f", S),
    ("class C:\n def f(self): pass", "class C:\n @staticmethod\n def f(): pass", "C.f", S),
    ("class C:\n def f(self): pass", "class C:\n @classmethod\n def f(cls): pass", "C.f", S),
    ("class C:\n @staticmethod\n def f(self): pass", "class C:\n def f(self): pass", "C.f", S),
    ("class C:\n def f(self): pass", "class C:\n @property\n def f(self): pass", "C.f", S),
    ("class C:\n @property\n def f(self): pass", "class C:\n f = 1", "C.f", S),
    ("class C:\n @property\n def f(self): pass", "class C:\n def __init__(self): self.f = 1",
     "C.f", S),
    ("class C:\n def __init__(self): self.f: int = 1", "class C:\n @property\n def f(self): return 1",
     "C.f", S),
    ("class C:\n f = 1", "class C:\n @property\n def f(self): return 1", "C.f", S),
    ("class C:\n @property\n def f(self): pass", "class C:\n @cached_property\n def f(self): pass",
     "C.f", S),
    ("class C:\n def f(self, x): pass", "class C:\n def f(x): pass", "C.f", S),  # self dropped
    ("class C:\n def f(self): pass", "class C:\n def f(): pass", "C.f", S),
    ("class C:\n def f(x): pass", "class C:\n def f(self, x): pass", "C.f", S),
    ("class C:\n def f(self, a): pass", "class C:\n def f(self, b, a): pass", "C.f", S),
    ("class C:\n def __init__(self, a): pass", "class C:\n def __init__(self): pass", "C", S),
    ("@dataclass\nclass C:\n a: int", "@dataclass\nclass C:\n a: int\n b: int", "C", S),
    # the gravest one decides
    ("def f(a, b): return 1", "def f(a): return 2", "f", S),
    ("def f(a): return 1", "def f(a, b=1): return 2", "f", C),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "symbol", "kind"), IN_PLACE)
def test_in_place(compare, old: str, new: str, symbol: str, kind: str) -> None:
    finding = compare(old, new, symbol)
    assert finding.kind.value == kind, [c.text for c in finding.changes]
    assert finding.new_symbol is None and finding.confidence == 1.0
    differs = finding.old.digest != finding.new.digest
    assert differs == (kind != U)


@pytest.mark.parametrize(("old", "new", "symbol", "kind"), IN_PLACE)
def test_the_other_way_round_is_seen_too(
    compare, old: str, new: str, symbol: str, kind: str
) -> None:
    assert (compare(new, old, symbol).kind.value == U) == (kind == U)


F, G = f"def f{BODY}", f"def g{BODY}"
EMPTY = {"m": ""}
ELSEWHERE = [
    # ---- removed
    (F, "", "f", R, None),
    (F, "x = 1", "f", R, None),
    (F, "if TYPE_CHECKING:\n def f(): pass", "f", R, None),
    ("def f(): pass", "def g(): pass", "f", R, None),  # too short to be known by
    ("def f(self): return 1", {"m": "", "n": "def g(x): return 1"}, "f", R, None),
    (F, f"def h():{OTHER}", "f", R, None),
    ("f = None", "g = None", "f", R, None),
    ({"m": F, "n": f"def f(registry):{OTHER}"}, {"m": "", "n": f"def f(registry):{OTHER}"}, "f", R, None),
    ("class C:\n def f(self): pass", "class C:\n def g(self): pass", "C.f", R, None),
    # ---- moved: the last name stays
    (F, {"m": "", "n": F}, "f", M, "pkg.n:f"),
    (F, {"m": "from pkg.n import f", "n": F}, "f", M, "pkg.n:f"),  # a re-export stays behind
    (F, {"m": "from .n import *", "n": F}, "f", M, "pkg.n:f"),
    (F, {"m": "from . import n\nf = n.f", "n": F}, "f", M, "pkg.n:f"),
    (F, {"m": "def __getattr__(name):\n if name == 'f':\n  from .n import f\n  return f", "n": F},
     "f", M, "pkg.n:f"),
    (F, {"m": "", "n": F.replace("weights)", "weights) + 1")}, "f", M, "pkg.n:f"),  # changed, too
    (F, {"m": "", "n": f"class C:\n{method('f')}"}, "f", M, "pkg.n:C.f"),  # became a method
    (F, {"m": "", "n": "if X:\n " + F.replace("\n", "\n ")}, "f", M, "pkg.n:f"),
    (f"class C:\n{method('f')}", f"class B:\n{method('f')}\nclass C(B): pass", "C.f", M, "pkg.m:B.f"),
    (f"class C:\n{method('f')}",
     {"m": "from .n import B\nclass C(B): pass", "n": f"class B:\n{method('f')}"}, "C.f", M, "pkg.n:B.f"),
    (f"class C:\n{method('f')}", {"m": "", "n": f"class C:\n{method('f')}"}, "C.f", M, "pkg.n:C.f"),
    (f"class C:\n{method('f')}", {"m": "", "n": f"class C:\n{method('f')}"}, "C", M, "pkg.n:C"),
    (f"class C:\n{method('f')}", f"class D:\n{method('f')}", "C.f", M, "pkg.m:D.f"),
    (f"class C:\n{method('f')} def short(self): return 1\n",
     {"m": "", "n": f"class C:\n{method('f')} def short(self): return 1\n"}, "C.short", M, "pkg.n:C.short"),
    (f"class C:\n{method('f')}", f"def f{BODY}", "C.f", M, "pkg.m:f"),  # became a function
    # two classes of one name: the one with this content
    (f"class C:\n{method('f')}",
     {"m": "", "a": f"class C:\n def f(self, registry):{OTHER.replace(chr(10), chr(10) + ' ')}",
      "b": f"class C:\n{method('f')}"}, "C.f", M, "pkg.b:C.f"),
    ({"m": f"class C:\n{method('f')}", "a": f"class C:\n{method('f').replace('max', 'min')}"},
     {"m": "", "a": f"class C:\n{method('f').replace('max', 'min')}", "b": f"class C:\n{method('f')}"},
     "C.f", M, "pkg.b:C.f"),
    ("TABLE = {'alpha': 1, 'beta': 2}", {"m": "", "n": "TABLE = {'alpha': 1, 'beta': 2}"},
     "TABLE", M, "pkg.n:TABLE"),
    # merged into a twin that was there before
    ({"m": F, "n": F}, {"m": "", "n": F}, "f", M, "pkg.n:f"),
    # ---- renamed: the last name differs, wherever it went
    (F, G, "f", N, "pkg.m:g"),
    (F, {"m": "", "n": G}, "f", N, "pkg.n:g"),
    (F, f"{G}\nf = g", "f", N, "pkg.m:g"),
    (F, {"m": "from .n import g as f", "n": G}, "f", N, "pkg.n:g"),
    (F, {"m": "def __getattr__(name):\n if name == 'f':\n  from .n import g\n  return g", "n": G},
     "f", N, "pkg.n:g"),
    (f"class C:\n{method('f')}", f"class C:\n{method('_f')}", "C.f", N, "pkg.m:C._f"),
    (f"class Alpha:\n{method('f')}", f"class AlphaFactory:\n{method('f')}", "Alpha", N,
     "pkg.m:AlphaFactory"),
    (f"class Alpha:\n{method('f')}", f"class Beta:\n{method('f')}", "Alpha", N, "pkg.m:Beta"),
    ("def scaled_sum" + BODY, "def scaled_sum_of_all" + BODY.replace("max", "min"),
     "scaled_sum", N, "pkg.m:scaled_sum_of_all"),
    # ---- an old path that was never a definition: its content counts
    ({"m": "from .n import f", "n": F}, {"m": "from .k import f", "k": F}, "f", U, None),
    ({"m": "from .n import f", "n": F}, {"m": "", "n": F}, "f", M, "pkg.n:f"),
    ({"m": "from .n import f", "n": F}, {"m": "", "k": F}, "f", M, "pkg.k:f"),
    ({"m": f"class B:\n{method('f')}\nclass C(B): pass"}, {"m": f"class B: pass\nclass C(B):\n{method('f')}"},
     "C.f", U, None),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "symbol", "kind", "where"), ELSEWHERE)
def test_elsewhere(compare, old, new, symbol: str, kind: str, where: str | None) -> None:
    finding = compare(old, new, symbol)
    assert (finding.kind.value, finding.new_symbol) == (kind, where), finding.evidence
    assert 0 < finding.confidence <= 1
    if where is not None:
        assert finding.evidence


def test_a_function_that_became_a_flag_is_found_by_its_users(compare) -> None:
    uses = "from pkg.m import is_fast\ndef {}(x):\n if is_fast():\n  return x + 1\n return x"
    flag = "from pkg import envs\ndef {}(x):\n if envs.FAST:\n  return x + 1\n return x"
    old = {"m": "def is_fast(): return FAST", "a": uses.format("a"), "b": uses.format("b")}
    new = {"m": "", "envs": "FAST = False", "a": flag.format("a"), "b": flag.format("b")}
    finding = compare(old, new, "is_fast")
    assert (finding.kind.value, finding.new_symbol) == (N, "pkg.envs:FAST")
    assert "2 of 2 functions" in finding.evidence
    assert finding.also.value == S


def test_parameters_have_old_and_new_positions(compare) -> None:
    finding = compare("def f(a, b, c): pass", "def f(a, c, d): pass", "f")
    found = {c.name: (c.old_position, c.new_position) for c in finding.changes if c.name}
    assert found == {"b": (1, None), "d": (None, 2)}


def test_secondary_changes_of_what_moved(compare) -> None:
    new = {"m": "", "n": F.replace("scale=1.0", "scale=2.0")}
    finding = compare(F, new, "f")
    assert (finding.kind.value, finding.also.value) == (M, C)
    assert finding.as_dict()["details"]["also"] == C


def test_noise_is_listed_apart(compare) -> None:
    finding = compare("def f(a: int): return a", "def f(a: str): return a", "f")
    details = finding.as_dict()["details"]
    assert details["changes"] == []
    assert details["noise"][0]["text"] == "annotation of a: int → str"


def test_nothing_is_imported(tmp_path: Path) -> None:
    for side in ("old", "new"):
        (tmp_path / side / "pkg").mkdir(parents=True)
        (tmp_path / side / "pkg/__init__.py").write_text("raise SystemExit('imported')\nx = 1")
    code = (
        "from patchkit.symbols.drift import *\n"
        "v = [SourceView(TreeSource(__import__('pathlib').Path(p), 'pkg')) for p in ('old', 'new')]\n"
        "print(diff(*v).findings[0].kind.value)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == U
