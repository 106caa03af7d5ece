"""The command line: outputs, exit codes, the baseline; and the skeleton of an adapter."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from audit_trees import write_tree
from typer.testing import CliRunner

from patchkit.cli.adopt import app as adopt_app
from patchkit.cli.audit import app as audit_app

PROJECT = {
    "proj/__init__.py": "",
    "proj/patches.py": """
        import lib
        import lib.core as c
        from packaging.version import Version

        def run(self, x, y=0):
            return x

        def helper(a):
            return [a]

        def apply():
            c.Engine.run = run
            c.helper = helper
            lib.LIMIT = 20
            c.REGISTRY["mine"] = helper
            if Version(lib.__version__) >= Version("1.0"):
                c.other = helper

        def wrapped():
            original = c.Engine.stop
            c.Engine.stop = lambda self: original(self)

        def dynamic(name):
            setattr(c, name, helper)
    """,
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "project", PROJECT)


def audit(project: Path, lib: Path, *more: str) -> tuple[int, str]:
    result = CliRunner().invoke(audit_app, [str(project), "--against", str(lib / "lib"), *more])
    return result.exit_code, result.stdout


def as_json(project: Path, lib: Path, *more: str) -> tuple[int, dict[str, Any]]:
    code, text = audit(project, lib, "--json", *more)
    return code, json.loads(text)


def test_json(project: Path, lib: Path) -> None:
    code, data = as_json(project, lib)
    assert code == 1
    assert data["schema"] == 1
    found = {f["target"]: f for f in data["findings"]}
    assert set(found) == {
        "lib.core:Engine.run", "lib.core:helper", "lib:LIMIT", "lib.core:REGISTRY",
        "lib.core:other", "lib.core:Engine.stop",
    }  # fmt: skip
    helper = found["lib.core:helper"]
    assert helper["file"] == "proj/patches.py"
    assert helper["function"] == "apply"
    assert helper["replacement"]["reference"] == "proj.patches:helper"
    assert helper["replacement"]["signature"] == "(a)"
    verdict = helper["verdicts"]["lib 1.0"]
    assert (verdict["kind"], verdict["parameter"]) == ("signature", "b")
    assert verdict["alias_sites"] == ["lib.users:h", "lib:helper"]
    assert found["lib.core:other"]["versions"] == ">=1.0"
    assert data["summary"]["survive"]["lib 1.0"] == {
        "fine": 5, "judged": 6, "not_judged": 0,
    }  # fmt: skip
    assert [n["kind"] for n in data["not_seen"]] == ["dynamic name"]


def test_table_has_everything_on_it(project: Path, lib: Path) -> None:
    code, text = audit(project, lib)
    assert code == 1
    for words in (
        "lib.core", "Engine.run", "signature no longer fits", "does not reach: lib.users:h",
        "5 of 6 survive lib 1.0", "not seen", "proj/patches.py:25",
    ):  # fmt: skip
        assert words in text, words


def test_markdown(project: Path, lib: Path) -> None:
    _, text = audit(project, lib, "--format", "markdown")
    assert "### `lib.core`" in text
    assert "**signature no longer fits**" in text
    assert text.count("|") % 2 == 0


def test_sarif(project: Path, lib: Path) -> None:
    _, text = audit(project, lib, "-f", "sarif")
    data = json.loads(text)
    run = data["runs"][0]
    rules = {r["id"] for r in run["tool"]["driver"]["rules"]}
    (result,) = run["results"]
    assert result["ruleId"] in rules
    assert result["level"] == "error"
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "proj/patches.py"
    assert place["region"]["startLine"] == 14


def test_github_annotations(project: Path, lib: Path) -> None:
    _, text = audit(project, lib, "-f", "github")
    lines = text.splitlines()
    assert lines[0].startswith("::error file=proj/patches.py,line=14,title=patchkit audit%3A")
    assert any(line.startswith("::notice file=proj/patches.py,line=25") for line in lines)


def test_baseline_lets_the_known_pass(project: Path, lib: Path, tmp_path: Path) -> None:
    baseline = tmp_path / "audit-baseline.json"
    code, _ = audit(project, lib, "--write-baseline", str(baseline))
    assert code == 0
    assert len(json.loads(baseline.read_text())["known"]) == 1
    code, data = as_json(project, lib, "--baseline", str(baseline))
    assert (code, data["summary"]["new"]) == (0, 0)
    # Lines added above do not make a finding new …
    file = project / "proj" / "patches.py"
    file.write_text("# a comment\n\n" + file.read_text())
    assert as_json(project, lib, "--baseline", str(baseline))[0] == 0
    # … another patch does.
    file.write_text(file.read_text() + "\nc.Engine.make = lambda: 0\n")
    code, data = as_json(project, lib, "--baseline", str(baseline))
    assert code == 1
    assert [f["target"] for f in data["findings"] if f["new"]] == ["lib.core:Engine.make"]


def test_clean_project(tmp_path: Path, lib: Path) -> None:
    project = write_tree(tmp_path, {"p.py": "import lib\nprint(lib.LIMIT)\n"})
    code, data = as_json(project, lib)
    assert (code, data["findings"]) == (0, [])


def test_only_one_package(project: Path, lib: Path) -> None:
    (project / "more.py").write_text("import json\njson.dumps = None\n")
    _, data = as_json(project, lib, "--package", "lib")
    assert {f["package"] for f in data["findings"]} == {"lib"}
    _, data = as_json(project, lib)
    assert {f["package"] for f in data["findings"]} == {"lib", "json"}


def test_tests_are_left_out_and_counted(project: Path, lib: Path) -> None:
    write_tree(project, {"tests/test_x.py": "import lib\nlib.LIMIT = 3\n"})
    _, data = as_json(project, lib)
    assert data["summary"]["skipped_tests"] == 1
    assert all(f["file"] != "tests/test_x.py" for f in data["findings"])
    _, data = as_json(project, lib, "--include-tests")
    assert any(f["file"] == "tests/test_x.py" for f in data["findings"])


def test_unreadable_file_is_said(project: Path, lib: Path) -> None:
    (project / "broken.py").write_text("import lib\nlib.LIMIT = (\n")
    _, data = as_json(project, lib)
    assert list(data["unreadable"]) == ["broken.py"]
    assert "no Python" in data["unreadable"]["broken.py"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_a_pipe_among_the_files_is_not_waited_for(project: Path, lib: Path) -> None:
    os.mkfifo(project / "pipe.py")
    _, data = as_json(project, lib)
    assert data["unreadable"] == {"pipe.py": "it is no regular file"}


def test_code_that_a_program_nested_too_deep(project: Path, lib: Path) -> None:
    """The rest is audited; what could not be followed is said, and nothing ends in a traceback."""
    deep = "lib" + ".a" * 700
    (project / "deep.py").write_text(
        f"import lib\nx = {deep}\nif f({deep}):\n    lib.LIMIT = 7\nlib.LIMIT = 8\n"
    )
    _, data = as_json(project, lib)
    cut = [s for s in data["not_seen"] if s["file"] == "deep.py"]
    assert [s["line"] for s in cut] == [2, 3]
    assert all("nests too deeply" in s["reason"] for s in cut)
    assert any(f["file"] == "deep.py" and f["line"] == 5 for f in data["findings"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--from", "vllm@0.26.0"], "--from and --to belong together"),
        (["--against", "nothing.whl"], "no such file"),
        (["--against", "vllm@999"], "pip download vllm==999 --no-deps"),
        (["--baseline", "nowhere.json"], "no such baseline"),
        (["--baseline", "deep.json"], "no readable baseline"),
    ],
)
def test_wrong_questions(
    project: Path, options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("deep.json").write_text("[" * 99999)
    result = CliRunner().invoke(audit_app, [str(project), "--json", *options])
    assert result.exit_code == 2
    assert words in json.loads(result.stdout)["error"]


@pytest.mark.parametrize("name", ["nowhere", "circle"])
def test_missing_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    result = CliRunner().invoke(audit_app, [str(tmp_path / name), "--json"])
    assert result.exit_code == 2
    assert "no such file or folder" in json.loads(result.stdout)["error"]


def test_nothing_is_imported(project: Path, lib: Path, tmp_path: Path) -> None:
    """Neither the project nor the package is run, whatever stands at their tops."""
    for file in (project / "proj" / "patches.py",):
        file.write_text(file.read_text() + "\nraise SystemExit('the project was run')\n")
    code = (
        "import sys\n"
        "from patchkit.audit import audit\n"
        f"report = audit({str(project)!r}, against=[{str(lib / 'lib')!r}])\n"
        "assert len(report.findings) == 6\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('lib', 'proj', 'torch')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.stdout.strip() == "[]", done.stderr


# ---- adopt ---------------------------------------------------------------------------


def adopt(project: Path, lib: Path, *more: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(
        adopt_app, [str(project), "--json", "--against", str(lib / "lib"), "-p", "lib", *more]
    )
    return result.exit_code, json.loads(result.stdout)


def test_adopt_declares_what_it_can(project: Path, lib: Path, tmp_path: Path) -> None:
    code, data = adopt(project, lib, "--name", "mine", "-o", str(tmp_path / "mine"))
    assert code == 1
    assert sorted(data["declared"]) == [
        "lib.core:Engine.run", "lib.core:REGISTRY[mine]", "lib.core:helper", "lib.core:other",
        "lib:LIMIT",
    ]  # fmt: skip
    (left,) = [u for u in data["unexpressed"] if not u["declared"]]
    assert left["target"] == "lib.core:Engine.stop"
    assert "defined inside a function" in left["reason"]
    assert "top of a module" in left["remedy"]
    readme = (tmp_path / "mine" / "README.md").read_text()
    assert "lib.core:Engine.stop" in readme
    assert "not seen" in readme


def test_skeleton_is_an_adapter(project: Path, lib: Path, tmp_path: Path) -> None:
    """The declarations are accepted as they are: only the TODOs are left."""
    adopt(project, lib, "--name", "mine", "-o", str(tmp_path / "mine"))
    source = (tmp_path / "mine" / "__init__.py").read_text()
    ast.parse(source)
    namespace: dict[str, Any] = {"__file__": str(tmp_path / "mine" / "__init__.py")}
    exec(compile(source, "mine", "exec"), namespace)
    adapter = namespace["adapter"]
    by_symbol = {p.symbol: p for p in (*adapter.rollout, *adapter.trainer)}
    assert by_symbol["lib.core:Engine.run"].replacement == "proj.patches:run"
    assert by_symbol["lib.core:other"].versions == ">=1.0"
    assert by_symbol["lib:LIMIT"].replacement == 20
    assert by_symbol["lib.core:REGISTRY"].key == "mine"
    assert adapter.name == "mine"


def test_wrappers_in_the_skeleton(tmp_path: Path, lib: Path) -> None:
    project = write_tree(tmp_path / "project", {
        "proj/__init__.py": "",
        "proj/w.py": """
            import wrapt
            import lib.core as c

            _helper = c.helper

            def helper(a, b=1):
                return _helper(a, b)

            c.helper = helper

            def traced(wrapped, instance, args, kwargs):
                return wrapped(*args, **kwargs)

            wrapt.wrap_function_wrapper("lib.core", "other", traced)
        """,
    })  # fmt: skip
    _, data = adopt(project, lib)
    assert data["declared"] == ["lib.core:helper"]
    assert "action='replace'" in data["files"]["__init__.py"]
    reasons = {u["target"]: (u["declared"], u["reason"]) for u in data["unexpressed"]}
    assert reasons["lib.core:helper"][0] is True
    assert reasons["lib.core:other"][0] is False
    assert "wrapt" in reasons["lib.core:other"][1]


def test_installed_beside_another_version(tmp_path: Path) -> None:
    """The installed copy is one more column."""
    project = write_tree(tmp_path / "project", {"p.py": "import packaging\npackaging.x = print\n"})
    other = write_tree(tmp_path / "other", {
        "packaging/__init__.py": "__version__ = '1.0'\ndef x(): ...\n"
    })  # fmt: skip
    command = [str(project), "--json", "--against", str(other / "packaging")]
    columns = []
    for more in ([], ["--installed"]):
        data = json.loads(CliRunner().invoke(audit_app, [*command, *more]).stdout)
        columns.append(len(data["findings"][0]["verdicts"]))
    assert columns == [1, 2]


def test_what_is_added_is_not_declared(tmp_path: Path, lib: Path) -> None:
    project = write_tree(tmp_path / "project", {
        "proj/__init__.py": "", "proj/w.py": "import lib.core as c\nc._KNOB_OF_PROJ_X = {}\n"
        "def g(self): ...\nc.Engine.run_of_proj = g\nc.Engine.size = 4\n",
    })  # fmt: skip
    _, data = adopt(project, lib)
    assert data["declared"] == ["lib.core:Engine.size"]
    reasons = {u["target"]: u["reason"] for u in data["unexpressed"]}
    assert "adds a name" in reasons["lib.core:Engine.run_of_proj"]


def test_the_skeleton_can_be_installed(project: Path, lib: Path, tmp_path: Path) -> None:
    """By its own pyproject: the adapter's entry point, and the package that it names."""
    tomllib = pytest.importorskip("tomllib")

    adopt(project, lib, "--name", "mine", "-o", str(tmp_path / "mine"))
    data = tomllib.loads((tmp_path / "mine" / "pyproject.toml").read_text())
    point = data["project"]["entry-points"]["patchkit.adapters"]["mine"]
    module, _, name = point.partition(":")
    assert module in data["tool"]["setuptools"]["packages"]
    assert data["tool"]["setuptools"]["package-dir"] == {module: "."}
    assert f"{name} = Adapter(" in (tmp_path / "mine" / "__init__.py").read_text()


def test_adopt_overwrites_nothing(project: Path, lib: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("my own")
    code, data = adopt(project, lib, "-o", str(tmp_path / "mine"))
    assert code == 2
    assert "nothing is overwritten" in data["error"]
    assert not (tmp_path / "mine" / "__init__.py").exists()
