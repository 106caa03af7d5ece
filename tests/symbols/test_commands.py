"""The commands as a user types them: answers, exit codes, files written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import patchkit.engine
from patchkit.cli import adapt, diff, manifest, matrix
from patchkit.engine import Adapter, Patch

OLD = {
    "pkg/__init__.py": "",
    "pkg/ops.py": "def norm(x, eps=1e-6):\n total = sum(v * v for v in x)\n"
    " return [v / (total / len(x) + eps) ** 0.5 for v in x]\n"
    "def scale(x): return x * 2\ndef keep(x): return x\ndef drop(x): return [x, x, x, 'gone']\n",
}
NEW = {
    "pkg/__init__.py": "",
    "pkg/ops.py": "def scale(x): return x * 3\ndef keep(x):\n 'Doc.'\n return x\n",
    "pkg/math/__init__.py": "",
    "pkg/math/norms.py": OLD["pkg/ops.py"].partition("def scale")[0],
}


def write(folder: Path, sources: dict[str, str]) -> Path:
    for name, text in sources.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


@pytest.fixture
def trees(tmp_path: Path) -> tuple[str, str]:
    return str(write(tmp_path / "old", OLD)), str(write(tmp_path / "new", NEW))


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Adapter:
    """An adapter in a folder of its own, with manifests of two versions."""
    home = tmp_path / "toy"
    home.mkdir()
    (home / "__init__.py").write_text('_OPS = "pkg.ops:"\nNORM = _OPS + "norm"\n')
    (home / "reviewed.json").write_text('{"schema": 1, "symbols": {}}')

    def patch(name: str, **more: str) -> Patch:
        return Patch(
            symbol=f"pkg.ops:{name}", action="replace", replacement="toy:f",
            reason="r", consequence="c", until="u", **more,
        )  # fmt: skip

    adapter = Adapter(
        name="toy",
        rollout=(patch("norm"), patch("scale"), patch("drop", versions="<2")),
        relies_on=("pkg.ops:keep",),
        reviewed=home / "reviewed.json",
        manifests=(tmp_path / "manifests",),
    )
    monkeypatch.setattr(patchkit.engine, "find_adapter", lambda name: adapter)
    for version, sources in (("1.0", OLD), ("2.0", NEW)):
        folder = write(tmp_path / f"v{version}", sources)
        result = run(
            manifest, "build", "pkg", version, "--from", str(folder), "--adapter", "toy",
            "-s", "pkg.math.norms:norm", "-o", str(tmp_path / f"manifests/pkg/{version}.json"),
        )  # fmt: skip
        assert result.exit_code == 0, result.output
    return adapter


def run(command, *arguments: str):
    return CliRunner().invoke(command.app, list(arguments))


def review(adapter: Adapter, *versions: str) -> None:
    for version in versions:
        result = run(adapt, "toy", "--against", f"pkg@{version}", "--yes", "--json")
        assert result.exit_code in (0, 1), result.output


# ---- diff ------------------------------------------------------------------------------


def test_json_of_named_symbols(trees) -> None:
    names = ("norm", "scale", "keep", "drop")
    result = run(diff, *trees, *[x for n in names for x in ("-s", f"pkg.ops:{n}")], "--json")
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    found = {f["symbol"]: (f["kind"], f["new_symbol"]) for f in answer["findings"]}
    assert found == {
        "pkg.ops:norm": ("moved", "pkg.math.norms:norm"),
        "pkg.ops:scale": ("body-only", None),
        "pkg.ops:keep": ("unchanged", None),
        "pkg.ops:drop": ("removed", None),
    }
    assert all({"confidence", "details"} <= set(f) for f in answer["findings"])
    assert answer["summary"]["moved"] == 1


def test_exit_codes(trees, tmp_path: Path) -> None:
    assert run(diff, *trees, "-s", "pkg.ops:keep").exit_code == 0
    assert run(diff, *trees, "-s", "pkg.ops:scale").exit_code == 1
    for wrong in (
        ["-s", "no colon"],
        ["-s", "pkg.ops:never"],
        ["-s", "pkg.ops:keep", "--all"],
        [],
        ["-s", "pkg.ops:keep", "--accept", "pkg.ops:keep=00"],
        ["-s", "pkg.ops:keep", "-s", "other.m:f"],
        ["-s", "pkg.ops:keep", "--profile", "without_adapter"],
    ):
        assert run(diff, *trees, *wrong).exit_code == 2, wrong
    assert run(diff, trees[0], "pkg@9.9", "-s", "pkg.ops:keep").exit_code == 2
    assert run(diff, trees[0], str(tmp_path / "no.whl"), "-s", "pkg.ops:keep").exit_code == 2
    assert run(diff, *trees, "--adapter", "no_such_adapter").exit_code == 2


def test_all_symbols(trees) -> None:
    answer = json.loads(run(diff, *trees, "--all", "--json").stdout)
    assert answer["summary"]["removed"] == 1 and len(answer["findings"]) == 4


def test_errors_are_json_when_json_is_asked_for(trees) -> None:
    answer = json.loads(run(diff, *trees, "-s", "pkg.ops:never", "--json").stdout)
    assert "pkg.ops:never" in answer["error"]


def test_table_body_and_unchanged(trees) -> None:
    result = run(diff, *trees, "--all", "--unchanged", "--body")
    assert "moved" in result.stdout and "pkg.math.norms:norm" in result.stdout
    assert "-    return x * 2" in result.stdout and "+    return x * 3" in result.stdout
    assert "Doc." not in result.stdout  # noise stays out of the diff of a body


@pytest.mark.parametrize("style", ["markdown", "github", "sarif"])
def test_other_styles(trees, style: str) -> None:
    result = run(diff, *trees, "--all", "--format", style, "--body")
    assert result.exit_code == 1
    assert "return x * 3" in result.stderr
    assert "pkg.math.norms:norm" in result.stdout
    if style == "sarif":
        results = json.loads(result.stdout)["runs"][0]["results"]
        levels = {r["ruleId"]: r["level"] for r in results}
        assert levels == {
            "patchkit/moved": "warning", "patchkit/removed": "error", "patchkit/body-only": "note",
        }  # fmt: skip
    if style == "github":
        lines = result.stdout.splitlines()
        assert sum(line.startswith("::error ") for line in lines) == 1
        assert all(line.startswith("::") for line in lines if line)


# ---- adapters: verdicts, reviews, exceptions --------------------------------------------


def test_verdicts_before_and_after_a_review(toy: Adapter) -> None:
    def verdicts(*more: str) -> tuple[int, dict[str, str]]:
        result = run(diff, "pkg@1.0", "pkg@2.0", "--adapter", "toy", "--json", *more)
        answer = json.loads(result.stdout)
        return result.exit_code, {v["symbol"]: v["verdict"] for v in answer["verdicts"]}

    assert verdicts() == (1, {
        "pkg.ops:norm": "moved", "pkg.ops:scale": "review", "pkg.ops:drop": "skipped",
        "pkg.ops:keep": "review",
    })  # fmt: skip
    review(toy, "1.0", "2.0")
    assert verdicts()[1] == {
        "pkg.ops:norm": "moved", "pkg.ops:scale": "ready", "pkg.ops:drop": "skipped",
        "pkg.ops:keep": "ready",
    }  # fmt: skip


def test_one_digest_can_be_accepted_and_every_output_says_so(toy: Adapter) -> None:
    review(toy, "1.0")
    scope = ("pkg@1.0", "pkg@2.0", "--adapter", "toy")
    answer = json.loads(run(diff, *scope, "--json").stdout)
    digest = next(v["digest"] for v in answer["verdicts"] if v["symbol"] == "pkg.ops:scale")
    accept = ("--accept", f"pkg.ops:scale={digest}")
    for style in ("table", "json", "markdown", "github", "sarif"):
        text = run(diff, *scope, *accept, "--format", style).stdout
        assert "unreviewed" in text.lower(), style
        assert "pkg.ops:scale" in text
    answer = json.loads(run(diff, *scope, *accept, "--json").stdout)
    assert answer["unreviewed"] == ["pkg.ops:scale"]
    for more in ([], ["--reasons"], ["--markdown"], ["--json"]):
        text = run(matrix, "toy", *accept, *more).stdout
        assert "unreviewed" in text.lower(), more
    # A digest that nothing has is no exception, but a mistake.
    result = run(diff, *scope, "--accept", f"pkg.ops:scale={'0' * 32}")
    assert result.exit_code == 2


def test_matrix_says_why(toy: Adapter) -> None:
    review(toy, "1.0")
    result = run(matrix, "toy", "--json")
    rows = {r["version"]: r for r in json.loads(result.stdout)["versions"]}
    assert (rows["1.0"]["verdict"], rows["2.0"]["verdict"]) == ("ready", "broken")
    assert "norm" in rows["2.0"]["reason"] and "moved to" in rows["2.0"]["reason"]
    assert "2.0" in run(matrix, "toy", "--reasons").stdout


def test_matrix_in_a_file_is_written_and_checked(toy: Adapter, tmp_path: Path) -> None:
    review(toy, "1.0")
    readme = tmp_path / "README.md"
    readme.write_text("no markers")
    assert run(matrix, "toy", "--write", str(readme)).exit_code == 2
    begin, end = matrix._BEGIN.format(name="toy"), matrix._END.format(name="toy")
    readme.write_text(f"before\n{begin}\n{end}\nafter\n")
    assert run(matrix, "toy", "--check", str(readme)).exit_code == 1
    assert run(matrix, "toy", "--write", str(readme)).exit_code == 0
    assert "| pkg | 1.0 | – | 2.0 |" in readme.read_text()
    assert readme.read_text().startswith("before\n") and readme.read_text().endswith("\nafter\n")
    assert run(matrix, "toy", "--check", str(readme)).exit_code == 0


def test_adapt_writes_nothing_unasked(toy: Adapter) -> None:
    before = toy.reviewed.read_text()
    result = run(adapt, "toy", "--against", "pkg@1.0")
    assert result.exit_code == 1 and "never reviewed" in result.output
    assert toy.reviewed.read_text() == before


def test_adapt_records_and_proposes(toy: Adapter) -> None:
    review(toy, "1.0")
    recorded = json.loads(toy.reviewed.read_text())["symbols"]
    assert {v for d in recorded.values() for vs in d.values() for v in vs} == {"1.0"}
    result = run(
        adapt, "toy", "--against", "pkg@2.0", "--since", "pkg@1.0", "--yes", "--json"
    )  # fmt: skip
    assert result.exit_code == 1  # a move waits for a person
    answer = json.loads(result.stdout)
    assert [m["new_symbol"] for m in answer["moves"]] == ["pkg.math.norms:norm"]
    home = toy.reviewed.parent
    text = (home / "moves.patch").read_text()
    assert '-NORM = _OPS + "norm"' in text and '+NORM = "pkg.math.norms:norm"' in text
    assert "nothing was applied" in text
    assert (home / "__init__.py").read_text() == '_OPS = "pkg.ops:"\nNORM = _OPS + "norm"\n'
    scale = json.loads(toy.reviewed.read_text())["symbols"]["pkg.ops:scale"]
    assert [v for vs in scale.values() for v in vs] == ["1.0", "2.0"] and len(scale) == 2


@pytest.mark.parametrize("digests", ["5", '{"d": 5}', '{"d": ["latest"]}', '{"d": [1]}'])
@pytest.mark.parametrize("command", [adapt, matrix])
def test_a_review_of_another_form_is_named(toy: Adapter, command, digests: str) -> None:
    toy.reviewed.write_text(f'{{"schema": 1, "symbols": {{"pkg.ops:norm": {digests}}}}}')
    result = run(command, "toy", *(["--against", "pkg@2.0"] if command is adapt else []))
    assert result.exit_code == 2, result.exception
    assert "reviewed.json: not a file of reviewed digests" in result.output


def test_another_package_than_the_versions_are_of(toy: Adapter) -> None:
    result = run(diff, "pkg@1.0", "pkg@2.0", "--adapter", "toy", "--package", "other")
    assert result.exit_code == 2 and "--package is other, and pkg@1.0 is pkg" in result.output


def test_a_damaged_review_is_an_error(toy: Adapter) -> None:
    toy.reviewed.write_text('{"schema": 7, "symbols": {}}')
    result = run(diff, "pkg@1.0", "pkg@2.0", "--adapter", "toy")
    assert result.exit_code == 2 and "schema 7" in result.output


def test_manifest_build_refuses_what_it_is_not(tmp_path: Path, trees) -> None:
    out = str(tmp_path / "x.json")
    assert run(manifest, "build", "pkg", "1", "-o", out).exit_code == 2  # not installed
    assert run(manifest, "build", "pkg", "1", "--from", "nothing", "-o", out).exit_code == 2
    named = ("--from", trees[0], "-s", "pkg.ops:norm", "-o", out)
    assert run(manifest, "build", "pkg", "1.5", *named).exit_code == 0
    assert json.loads(Path(out).read_text())["version"] == "1.5"
    first = Path(out).read_bytes()
    assert run(manifest, "build", "pkg", "1.5", *named).exit_code == 0
    assert Path(out).read_bytes() == first
    assert run(manifest, "build", "pkg", "1", "--from", trees[0], "--all", "-o", out).exit_code == 0
    assert json.loads(Path(out).read_text())["whole"] is True


# ---- the pytest plugin --------------------------------------------------------------------

PLUGIN_ADAPTER = """
from patchkit.engine import Adapter, Patch
def patch(symbol, **more):
    return Patch(symbol=symbol, action="replace", replacement="toy:f", reason="r",
                 consequence="c", until="u", **more)
import patchkit.engine
patchkit.engine.find_adapter = lambda name: Adapter(name=name, rollout=(
    patch("packaging.version:Version.public"), patch("packaging.version:parse"),
    patch("packaging.version:gone"), patch("no_such_package:f"),
    patch("packaging.version:Version", versions="<1")),
    reviewed={"packaging.version:parse": {"%s": ["x"]}})
"""


def test_plugin_has_one_item_per_patch_from_any_directory(tmp_path: Path) -> None:
    from patchkit.symbols import find_facts

    digest = find_facts("packaging.version:parse").digest
    (tmp_path / "conftest.py").write_text(PLUGIN_ADAPTER % digest)
    (tmp_path / "pytest.ini").write_text("[pytest]\npatchkit_adapters = toy\n")
    (tmp_path / "test_x.py").write_text("def test_x(): pass\n")
    elsewhere = tmp_path / "deep" / "er"
    elsewhere.mkdir(parents=True)
    for cwd in (tmp_path, elsewhere):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "patchkit.pytest_plugin", "-q", "-rA",
             "-p", "no:cacheprovider", "-c", str(tmp_path / "pytest.ini"), str(tmp_path)],
            cwd=cwd, capture_output=True, text=True, check=False,
        )  # fmt: skip
        out = done.stdout
        assert "2 passed" in out and "2 failed" in out and "2 skipped" in out, out + done.stderr
        assert "packaging.version:gone: broken" in out
        assert "packaging.version:Version.public: review" in out
        assert "no_such_package is not installed" in out
