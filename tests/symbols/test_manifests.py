"""Manifest files: deterministic, checked when read, merged, and never believed blindly."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from patchkit.symbols import Manifest, stored_manifest, stored_versions
from patchkit.symbols.drift import (
    InstalledSource,
    ManifestView,
    Match,
    SourceView,
    TreeSource,
    WheelSource,
    build_manifest,
    build_whole,
    diff,
    open_view,
    trace,
)
from patchkit.symbols.errors import (
    ManifestConflictError,
    ManifestError,
    ManifestSchemaError,
    SourceNotFoundError,
)

SOURCES = {
    "pkg/__init__.py": "from .core import run\n",
    "pkg/envs.py": """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    PKG_FAST: bool = False
environment = {"PKG_FAST": lambda: os.getenv("PKG_FAST", "0") == "1"}
def __getattr__(name): return environment[name]()
""",
    "pkg/core.py": '''
from pkg import envs
def run(x, *, fast=None):
    """Says it."""
    return helper(x) if envs.PKG_FAST else -helper(x)
def helper(x): return x + 1
@Ops.register("norm")
class Norm(Base):
    def forward(self, x: "Tensor") -> "Tensor": return x / 2
''',
    "pkg/user.py": "from pkg import run\nfrom pkg.core import run as go, Norm\n",
    "other/__init__.py": "",
}


def tree(folder: Path, sources: dict[str, str] = SOURCES) -> TreeSource:
    for name, text in sources.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return TreeSource(folder, "pkg", "1.0")


def wheel(path: Path, sources: dict[str, str | bytes] = SOURCES) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in sources.items():
            archive.writestr(name, text)
    return path


NAMES = ["pkg.core:run", "pkg.core:Norm.forward", "pkg:run", "pkg.core:gone", "pkg.envs:PKG_FAST"]


@pytest.fixture
def built(tmp_path: Path) -> Manifest:
    return build_manifest(tree(tmp_path), NAMES, depends_on={"pkg.core:run": ["pkg.core:helper"]})


def test_what_a_manifest_says(built: Manifest) -> None:
    run = built.symbols["pkg.core:run"]
    assert run.aliases == ("pkg.user:go", "pkg.user:run", "pkg:run")
    assert run.depends_on == {"pkg.core:helper": built.symbols["pkg.core:helper"].digest}
    assert run.selectors == {"env PKG_FAST": 'os.getenv("PKG_FAST", "0") == "1"'}
    assert built.symbols["pkg.core:Norm.forward"].selectors == {
        "registered": 'Ops.register("norm")'
    }
    assert built.symbols["pkg.core:Norm"].bases == ("Base",)  # the class comes along
    assert built.symbols["pkg:run"].reexport_of == "pkg.core:run"
    assert built.absent == ("pkg.core:gone",)


def test_dump_and_load_round_trip(built: Manifest, tmp_path: Path) -> None:
    built.dump(tmp_path / "1.0.json")
    loaded = Manifest.load(tmp_path / "1.0.json")
    assert loaded.as_text() == built.as_text()
    assert dict(loaded.symbols) == dict(built.symbols)
    # sorted, one symbol per line
    lines = [x for x in built.as_text().splitlines() if x.startswith(' "pkg')]
    assert len([x for x in lines if x.endswith(("},", "}"))]) == len(built.symbols)
    assert not list(tmp_path.glob(".*"))


def test_the_same_from_a_tree_a_wheel_and_two_processes(tmp_path: Path) -> None:
    from patchkit.symbols._scan import scan

    whole = build_whole(tree(tmp_path / "a"))
    zipped = build_whole(WheelSource(wheel(tmp_path / "pkg_cpu-1.0-py3-none-any.whl")))
    assert dict(zipped.records) == dict(whole.records)
    assert (zipped.package, zipped.version) == ("pkg", "1.0")
    source = tree(tmp_path / "a")
    scan(source, processes=2)
    assert {m: r.records for m, r in source._raws.items()} == {
        m: source.raw(m).records for m in tree(tmp_path / "a").modules()
    }


def test_whole_manifests_follow_reexports_and_bases(tmp_path: Path) -> None:
    sources = dict(SOURCES)
    sources["pkg/sub.py"] = "from pkg.core import Norm as N\nclass Sub(N): pass\n"
    view = ManifestView(build_whole(tree(tmp_path, sources)))
    assert view.facts("pkg:run").reexport_of == "pkg.core:run"
    assert view.facts("pkg.sub:Sub.forward").inherited_from == "pkg.core:Norm.forward"
    assert view.facts("pkg.sub:Sub.none") is None


# ---- damaged and hostile files -------------------------------------------------------


def damaged(built: Manifest, change) -> str:
    data = json.loads(built.as_text())
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d.pop("schema"), "no schema"),
        (lambda d: d.update(schema="1"), "has schema '1'"),
        (lambda d: d.pop("package"), "'package' is missing"),
        (lambda d: d.update(symbols=[]), "'symbols' is missing or no dict"),
        (lambda d: d["symbols"].update({"pkg.core:run": 1}), "is no object"),
        (lambda d: d["symbols"].update({"other:f": {}}), "no symbol of pkg"),
        (lambda d: d["symbols"].update({"pkg.core:a-b": {}}), "is not a symbol"),
        (lambda d: d["symbols"]["pkg.core:run"].update(kind="thing"), "unknown kind 'thing'"),
        (lambda d: d["symbols"]["pkg.core:run"].update(digest="zz"), "'zz' is no digest"),
        (lambda d: d["symbols"]["pkg.core:run"].pop("digest"), "'' is no digest"),
        (lambda d: d["symbols"]["pkg.core:run"].update(typo=1), "typo"),
        (lambda d: d["symbols"]["pkg.core:run"].update(parameters=[["x"]]), "malformed"),
        (lambda d: d["symbols"]["pkg.core:run"].update(
            parameters=[["x", "odd", None, None]]), "unknown kind 'odd'"),
        (lambda d: d["symbols"]["pkg.core:run"].update(line="7"), "file or line"),
        (lambda d: d["symbols"]["pkg.core:run"].update(decorators=[1]), "decorator, base or alias"),
        (lambda d: d["symbols"]["pkg.core:run"].update(selectors=None), "selectors is no object"),
        (lambda d: d.update(lineage={"pkg.core:run": 1}), "malformed beside its symbols"),
    ],
)  # fmt: skip
def test_a_manifest_edited_by_hand(built: Manifest, tmp_path: Path, change, problem: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(damaged(built, change))
    with pytest.raises(ManifestError, match=problem) as caught:
        dict(Manifest.load(path).symbols)
    assert "bad.json" in str(caught.value)


def test_other_symbols_of_a_damaged_manifest_still_work(built: Manifest, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(damaged(built, lambda d: d["symbols"]["pkg.core:run"].update(kind="thing")))
    assert Manifest.load(path).symbols["pkg.core:helper"].kind == "function"


def test_a_newer_schema_says_what_to_do(built: Manifest, tmp_path: Path) -> None:
    path = tmp_path / "new.json"
    path.write_text(damaged(built, lambda d: d.update(schema=99)))
    with pytest.raises(ManifestSchemaError, match=r"schema 99.*update patchkit"):
        Manifest.load(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00\x01", '{"schema": 1'])
def test_no_json_and_no_manifest(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ManifestError, match=r"x\.json"):
        Manifest.load(path)


def test_a_wheel_with_everything_wrong_in_it(tmp_path: Path) -> None:
    sources: dict[str, str | bytes] = {
        "pkg/__init__.py": "",
        "pkg/good.py": "def f(): return 1\n",
        "pkg/../../evil.py": "x = 1",
        "/abs/evil.py": "x = 1",
        "pkg/syntax.py": "def f(:",
        "pkg/newer.py": "type X[T = int] = @",
        "pkg/latin.py": "x = 'é'".encode("latin-1"),
        "pkg/null.py": "x = 1\x00",
        "pkg/deep.py": "x = " + "(" * 900 + ")" * 900,
        "pkg/not-a-name.py": "x = 1",
    }
    source = WheelSource(wheel(tmp_path / "pkg-1.0-py3-none-any.whl", sources))
    manifest = build_whole(source)
    assert manifest.symbols["pkg.good:f"].kind == "function"
    assert not [s for s in manifest.symbols if "evil" in s or "not-a-name" in s]
    assert set(manifest.unreadable) >= {
        "pkg/../../evil.py", "/abs/evil.py", "pkg/syntax.py", "pkg/newer.py", "pkg/latin.py",
        "pkg/null.py", "pkg/deep.py",
    }  # fmt: skip
    assert "leads out" in manifest.unreadable["/abs/evil.py"]


def test_a_truncated_wheel(tmp_path: Path) -> None:
    path = wheel(tmp_path / "pkg-1.0-py3-none-any.whl")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(SourceNotFoundError, match="no readable wheel"):
        WheelSource(path)


def test_a_damaged_file_in_a_wheel_does_not_hide_the_others(tmp_path: Path) -> None:
    path = tmp_path / "pkg-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("pkg/bad.py", "def f(): return 'MARK'\n")
        archive.writestr("pkg/good.py", "def g(): return 1\n")
    path.write_bytes(path.read_bytes().replace(b"MARK", b"KRAM"))
    manifest = build_whole(WheelSource(path))
    assert "damaged in the archive" in manifest.unreadable["pkg/bad.py"]
    assert "pkg.good:g" in manifest.symbols


def test_a_file_that_is_larger_than_any_module(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("patchkit.symbols._sources.MAX_SOURCE_BYTES", 20)
    sources = {"pkg/__init__.py": "", "pkg/big.py": "x = 1  # " + "#" * 50}
    manifest = build_whole(WheelSource(wheel(tmp_path / "pkg-1-py3-none-any.whl", sources)))
    assert "larger than any module" in manifest.unreadable["pkg/big.py"]


def test_links_do_not_lead_in_circles(tmp_path: Path) -> None:
    source = tree(tmp_path)
    (tmp_path / "pkg/loop").symlink_to(tmp_path / "pkg", target_is_directory=True)
    assert not [m for m in source.modules() if "loop" in m]


# ---- stored versions -----------------------------------------------------------------


def test_two_manifests_add_to_each_other_and_must_agree(built: Manifest, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        built.dump(tmp_path / folder / "pkg" / "1.0.json")
    extra = [tmp_path / "a", tmp_path / "b"]
    assert set(stored_manifest("pkg", "1.0+cpu", extra=extra).symbols) == set(built.symbols)
    other = damaged(built, lambda d: d["symbols"]["pkg.core:run"].update(digest="ab" * 16))
    (tmp_path / "b/pkg/1.0.json").write_text(other)
    with pytest.raises(ManifestConflictError, match=r"pkg\.core:run") as caught:
        stored_manifest("pkg", "1.0", extra=extra)
    assert "abab" in str(caught.value)


def test_no_manifest_of_a_version() -> None:
    assert stored_manifest("vllm", "0.0.1") is None
    with pytest.raises(SourceNotFoundError, match=r"no stored manifest.*0\.32\.0"):
        open_view("vllm@0.0.1")


@pytest.mark.parametrize("text", ["", "nothing", "no/such/folder", "a b@1", "x@"])
def test_what_names_nothing(text: str) -> None:
    with pytest.raises(SourceNotFoundError):
        open_view(text or "@")


def test_folders_that_hold_a_package(tmp_path: Path) -> None:
    tree(tmp_path)
    assert open_view(str(tmp_path), package="pkg").package == "pkg"
    assert open_view(str(tmp_path / "pkg")).package == "pkg"
    with pytest.raises(SourceNotFoundError, match="2 packages"):
        open_view(str(tmp_path))
    with pytest.raises(SourceNotFoundError, match="no package 'vllm'"):
        open_view(str(tmp_path), package="vllm")


def test_an_installed_package_is_read_where_it_is() -> None:
    import packaging

    view = SourceView(InstalledSource("packaging"))
    assert view.facts("packaging.version:Version.public").kind == "property"
    assert view.version == packaging.__version__


def test_what_was_traced_is_followed_without_sources(tmp_path: Path) -> None:
    """A flag in the place of a function: only whole packages show that."""
    use = "from pkg.core import {0}\ndef {1}(x):\n return x if {0}{2} else -x"
    call, flag = ("is_fast", "()"), ("FAST", "")
    old = tree(tmp_path / "old", {
        "pkg/core.py": "def is_fast(): return bool(FLAG)",
        **{f"pkg/{n}.py": use.format(call[0], n, call[1]) for n in "ab"}})  # fmt: skip
    new = tree(tmp_path / "new", {
        "pkg/core.py": "FAST = 0",
        **{f"pkg/{n}.py": use.format(flag[0], n, flag[1]) for n in "ab"}})  # fmt: skip
    moves = trace(old, new, ["pkg.core:is_fast"])
    assert moves["pkg.core:is_fast"].symbol == "pkg.core:FAST"
    names = ["pkg.core:is_fast", "pkg.core:FAST"]
    before = build_manifest(tree(tmp_path / "old", {}), names)
    after = build_manifest(tree(tmp_path / "new", {}), names, lineage=moves, lineage_from="1.0")
    views = ManifestView(before), ManifestView(after)
    assert diff(*views, names[:1]).findings[0].kind.value == "removed"
    finding = diff(*views, names[:1], between=[after]).findings[0]
    assert (finding.kind.value, finding.new_symbol) == ("renamed", "pkg.core:FAST")


def test_steps_through_several_versions_multiply_their_doubts(tmp_path: Path) -> None:
    def version(name: str, lineage: dict[str, Match]) -> Manifest:
        source = tree(tmp_path / name, {"pkg/core.py": f"def {name}(x): return x"})
        return build_manifest(source, [f"pkg.core:{n}" for n in "abc"], lineage=lineage)

    first = version("a", {})
    second = version("b", {"pkg.core:a": Match(symbol="pkg.core:b", confidence=0.8, evidence="x")})
    third = version("c", {"pkg.core:b": Match(symbol="pkg.core:c", confidence=0.5, evidence="y")})
    views = ManifestView(first), ManifestView(third)
    finding = diff(*views, ["pkg.core:a"], between=[second, third]).findings[0]
    assert (finding.new_symbol, finding.confidence) == ("pkg.core:c", 0.4)


def test_shipped_versions() -> None:
    assert {"0.8.5", "0.26.0", "0.32.0", "0.33.0"} <= set(stored_versions("vllm"))
    assert {"4.51.3", "5.17.0", "5.19.0", "5.24.0"} <= set(stored_versions("transformers"))
    assert {"2.11.0", "2.13.0", "2.14.0"} <= set(stored_versions("torch"))
