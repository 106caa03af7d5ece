"""Static reading: what is found, of which kind, with which facts."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent

import pytest

from patchkit.errors import ConfigurationError
from patchkit.symbols import Symbol, SymbolFacts, find_facts, installed_version, read_module
from patchkit.symbols.errors import (
    MalformedSymbolError,
    PackageNotInstalledError,
    SourceUnreadableError,
)


def facts(source: str, name: str = "f") -> SymbolFacts:
    return read_module(dedent(source), "pkg.m", "pkg/m.py").symbols[name]


class TestSymbol:
    def test_parts(self) -> None:
        symbol = Symbol.parse("a.b:C.d")
        assert (symbol.package, symbol.module, symbol.qualname) == ("a", "a.b", "C.d")
        assert (symbol.name, symbol.owner, str(symbol)) == ("d", "C", "a.b:C.d")

    @pytest.mark.parametrize(
        "text", ["", "a", "a:", ":b", "a..b:c", "a:b.", "a:b-c", "a b:c", "a:1"]
    )
    def test_malformed(self, text: str) -> None:
        with pytest.raises(MalformedSymbolError, match="is not a symbol") as caught:
            Symbol.parse(text)
        assert repr(text) in str(caught.value)
        assert isinstance(caught.value, ConfigurationError)


@pytest.mark.parametrize(
    ("source", "name", "kind"),
    [
        ("def f(): pass", "f", "function"),
        ("f = lambda x: x", "f", "function"),
        ("f = 3", "f", "attribute"),
        ("f: int", "f", "attribute"),
        ("class f: pass", "f", "class"),
        ("class C:\n def f(self): pass", "C.f", "method"),
        ("class C:\n @staticmethod\n def f(): pass", "C.f", "staticmethod"),
        ("class C:\n f = staticmethod(len)", "C.f", "staticmethod"),
        ("class C:\n @classmethod\n def f(cls): pass", "C.f", "classmethod"),
        ("class C:\n @property\n def f(self): pass", "C.f", "property"),
        ("class C:\n @abc.abstractproperty\n def f(self): pass", "C.f", "property"),
        ("class C:\n @functools.cached_property\n def f(self): pass", "C.f", "cached_property"),
        ("class C:\n def __new__(cls): pass", "C.__new__", "staticmethod"),
        ("class C:\n def __init_subclass__(cls): pass", "C.__init_subclass__", "classmethod"),
        ("class C:\n class D:\n  def f(self): pass", "C.D.f", "method"),
        ("class C:\n f = 1", "C.f", "attribute"),
        ("if X:\n def f(): pass", "f", "function"),
        ("try:\n from m import f\nexcept ImportError:\n def f(): pass", "f", "function"),
        ("with x:\n def f(): pass", "f", "function"),
        ("if not TYPE_CHECKING:\n def f(): pass", "f", "function"),
        ("if TYPE_CHECKING:\n pass\nelse:\n def f(): pass", "f", "function"),
    ],
)
def test_kind(source: str, name: str, kind: str) -> None:
    assert facts(source, name).kind == kind


def test_parameters_by_kind_default_and_annotation() -> None:
    found = facts("def f(a, /, b: int, c=1, *args, d, e: 'str' = None, **kw) -> bool: ...")
    assert [(p.name, p.kind, p.default, p.annotation) for p in found.parameters] == [
        ("a", "positional-only", None, None),
        ("b", "positional-or-keyword", None, "int"),
        ("c", "positional-or-keyword", "1", None),
        ("args", "var-positional", None, None),
        ("d", "keyword-only", None, None),
        ("e", "keyword-only", "None", '"str"'),
        ("kw", "var-keyword", None, None),
    ]
    assert [p.required for p in found.parameters] == [True, True, False, False, True, False, False]
    assert found.signature == '(a, /, b: int, c=1, *args, d, e: "str" = None, **kw) -> bool'


def test_constructor_is_the_signature_of_a_class() -> None:
    assert facts("class f:\n def __init__(self, a, *, b=1): pass").signature == "(a, *, b=1)"
    fields = " a: int\n b: int = 1\n c: ClassVar[int] = 2\n d: int = field(init=False)"
    source = f"@dataclass\nclass f:\n{fields}"
    assert facts(source).signature == "(a: int, b: int = 1)"


def test_async_and_generators() -> None:
    assert facts("async def f(): pass").is_async
    assert facts("def f(): yield 1").is_generator
    assert facts("def f():\n x = yield from g()").is_generator
    inner = facts("def f():\n def g(): yield 1\n return g")
    assert not inner.is_generator and not inner.is_async


def test_definitions_for_type_checkers_only_do_not_exist() -> None:
    source = "if TYPE_CHECKING:\n def f(): pass\nif typing.TYPE_CHECKING:\n class g: pass"
    assert not read_module(source, "m", "m.py").symbols


def test_a_later_definition_replaces_an_earlier_one() -> None:
    assert facts("def f(a): pass\ndef f(b): pass").signature == "(b)"
    assert facts("def f(a): pass\ndel f\nf = 1").kind == "attribute"


def test_branches_all_count() -> None:
    one = facts("if X:\n def f(): return 1\nelse:\n def f(): return 2")
    other = facts("if X:\n def f(): return 1\nelse:\n def f(): return 3")
    assert (one.alternatives, one.lines) == (1, (2, 4))
    assert one.digest != other.digest


def test_a_setter_counts_in_the_property() -> None:
    source = (
        "class C:\n @property\n def f(self): return 1\n @f.setter\n def f(self, v): self.x = {}"
    )
    one, other = facts(source.format("v"), "C.f"), facts(source.format("-v"), "C.f")
    assert one.kind == other.kind == "property"
    assert one.signature == "(self)" and one.alternatives == 0
    assert one.digest != other.digest


def test_overloads_are_not_the_function() -> None:
    source = """
    @overload
    def f(a: int) -> int: ...
    @overload
    def f(a: str) -> str: ...
    def f(a): return a
    """
    found = facts(source)
    assert (found.overloads, found.signature, found.decorators) == (2, "(a)", ())


def test_references_and_exports() -> None:
    source = """
    from .sibling import f
    from ..up import g as h
    import a.b.c as d
    import os.path
    from x import *
    from pkg import y
    z = y
    __all__ = ["f"]
    __all__ += ["h"]
    """
    module = read_module(dedent(source), "pkg.sub.m", "pkg/sub/m.py")
    assert module.references == {
        "f": "pkg.sub.sibling:f",
        "h": "pkg.up:g",
        "d": "a.b.c",
        "os": "os",
        "y": "pkg:y",
        "z": "pkg.sub.m:y",
    }
    assert module.stars == ("x",)
    assert module.exports == ("f", "h")


def test_relative_imports_of_a_package_start_at_itself() -> None:
    module = read_module("from .a import f\nfrom .. import g", "pkg.sub", "pkg/sub/__init__.py")
    assert module.references == {"f": "pkg.sub.a:f", "g": "pkg:g"}


# ---- unreadable sources ------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (b"def f(:\n", "not valid for this Python"),
        (b"x = 1\x00\n", "null byte"),
        ("# -*- coding: utf-8 -*-\nx = 'é'".encode("latin-1"), "not valid for this Python"),
        (b"# coding: no-such-codec\nx = 1", "not valid for this Python"),
        (b"(" * 5000 + b")" * 5000, "not valid for this Python|nests deeper"),
        (b"type X[T = int] = match @@", "not valid for this Python"),
    ],
)
def test_unreadable_source_says_why(source: bytes, problem: str) -> None:
    with pytest.raises(SourceUnreadableError, match=problem) as caught:
        read_module(source, "pkg.m", "pkg/m.py")
    assert "pkg/m.py" in str(caught.value)


def test_a_huge_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchkit.symbols._module.MAX_SOURCE_BYTES", 10)
    with pytest.raises(SourceUnreadableError, match="more than any module"):
        read_module(b"x = 1  # too long", "m", "m.py")


def test_declared_encodings_are_followed() -> None:
    source = "# coding: latin-1\nf = 'é'".encode("latin-1")
    assert read_module(source, "m", "m.py").symbols["f"].value == '"\\xe9"'


def test_long_chains_are_read_without_recursion() -> None:
    chain = " + ".join(f"x{i}" for i in range(900))
    found = facts(f"def f(a={chain}):\n return {chain}")
    assert found.parameters[0].default == chain


# ---- packages ----------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "pkg/__init__.py": "raise SystemExit('imported')\n",
        "pkg/base.py": "class Base:\n def run(self): return 1\n def both(self): return 1\n",
        "pkg/mid.py": "from pkg import base\nclass Mid(base.Base):\n def both(self): return 2\n",
        "pkg/leaf.py": "from .mid import Mid as M\nclass Leaf(M):\n x = 1\n go = M.run\n",
        "pkg/face.py": "from .leaf import *\nfrom . import base as b\nfrom .face import Leaf as S",
        "pkg/loop.py": "from .loop2 import f\n",
        "pkg/loop2.py": "from .loop import f\n",
        "pkg/envs.py": """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    FLAG: bool = False
    OTHER: int = 1
table = {"FLAG": lambda: os.getenv("FLAG", "0") == "1"}
def __getattr__(name): return table[name]()
""",
        "pkg/broken.py": "def f(:\n",
    }
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("symbol", "defined_at"),
    [
        ("pkg.base:Base.run", "pkg.base:Base.run"),
        ("pkg.leaf:Leaf.run", "pkg.base:Base.run"),
        ("pkg.leaf:Leaf.both", "pkg.mid:Mid.both"),
        ("pkg.leaf:Leaf.go", "pkg.base:Base.run"),
        ("pkg.leaf:M", "pkg.mid:Mid"),
        ("pkg.face:Leaf", "pkg.leaf:Leaf"),
        ("pkg.face:Leaf.run", "pkg.base:Base.run"),
        ("pkg.face:b.Base.run", "pkg.base:Base.run"),
        ("pkg:face.Leaf.x", "pkg.leaf:Leaf.x"),
        ("pkg.envs:FLAG", "pkg.envs:FLAG"),
    ],
)
def test_lookup_follows_reexports_and_bases(tree: Path, symbol: str, defined_at: str) -> None:
    found = find_facts(symbol, path=[str(tree)])
    assert found is not None and found.symbol == symbol
    assert found.defined_at == defined_at
    assert "pkg" not in sys.modules


@pytest.mark.parametrize(
    "symbol",
    [
        "pkg.base:Base.none",
        "pkg.none:f",
        "none:f",
        "pkg:face",
        "pkg.loop:f",
        "pkg.face:Nothing",
        "pkg.envs:NO",
    ],
)
def test_nothing_is_found_where_nothing_is(tree: Path, symbol: str) -> None:
    assert find_facts(symbol, path=[str(tree)]) is None


def test_how_it_was_reached(tree: Path) -> None:
    inherited = find_facts("pkg.leaf:Leaf.run", path=[str(tree)])
    imported = find_facts("pkg.face:Leaf", path=[str(tree)])
    assert inherited and inherited.inherited_from == "pkg.base:Base.run"
    assert imported and imported.reexport_of == "pkg.leaf:Leaf"
    assert imported.file == "pkg/leaf.py"


def test_environment_defaults_are_values(tree: Path) -> None:
    found = find_facts("pkg.envs:FLAG", path=[str(tree)])
    assert found and found.value == 'os.getenv("FLAG", "0") == "1"'


def test_a_broken_file_is_an_error_and_others_are_not(tree: Path) -> None:
    with pytest.raises(SourceUnreadableError, match=r"pkg/broken\.py, line 1"):
        find_facts("pkg.broken:f", path=[str(tree)])
    assert find_facts("pkg.base:Base", path=[str(tree)])


def test_a_changed_file_is_read_again(tree: Path) -> None:
    before = find_facts("pkg.base:Base.run", path=[str(tree)])
    (tree / "pkg/base.py").write_text("class Base:\n def run(self): return 22\n")
    after = find_facts("pkg.base:Base.run", path=[str(tree)])
    assert before and after and before.digest != after.digest


# ---- installed packages ------------------------------------------------------------


def test_version_of_an_installed_package() -> None:
    assert installed_version("pytest") == pytest.__version__
    assert installed_version("_pytest") == pytest.__version__


def test_version_of_a_distribution_of_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "toyvllm_cpu-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: toyvllm-cpu\nVersion: 1.2+cpu\n")
    (info / "RECORD").write_text("toyvllm/__init__.py,,\n")
    other = tmp_path / "toyvllm_plugin-9.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Name: toyvllm-plugin\nVersion: 9\n")
    (other / "RECORD").write_text("toyvllm_plugin.py,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed_version("toyvllm") == "1.2+cpu"


def test_version_of_nothing() -> None:
    with pytest.raises(PackageNotInstalledError, match="'no_such_package'"):
        installed_version("no_such_package")
