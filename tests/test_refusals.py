"""Places that cannot be written or read: one sentence that names them, and exit code 2."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from patchkit.cli import main
from patchkit.errors import ConfigurationError
from patchkit.parity.rollout_engine import engine_arguments

WRITES = {
    "audit": ["project.py", "--write-baseline"],
    "adopt": ["project.py", "--output"],
    "manifest": ["build", "packaging", "installed", "-s", "packaging.version:Version", "--output"],
    "matrix": ["qwen3_moe", "--write"],
    "coverage": ["qwen3_moe", "--write"],
    "demo": ["--runs"],
    "doctor": ["--runs"],
}


MARKS = ("begin (generated)", "end")


def patchkit(command: str, *arguments: str) -> Result:
    module = command.replace("-", "_")
    return CliRunner().invoke(import_module(f"patchkit.cli.{module}").app, list(arguments))


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("project.py").write_text("import json\n")
    Path("file").write_text("")
    Path("latin").write_bytes(b"\xff")
    Path("folder").mkdir()


def test_an_unknown_command_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["patchkit", "dif", "a", "b"])
    with pytest.raises(SystemExit) as stopped:
        main()
    told = capsys.readouterr()
    assert stopped.value.code == 2 and not told.out
    assert "no command 'dif'; did you mean 'diff'?" in told.err


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["patchkit", "--version"])
    main()
    assert capsys.readouterr().out == f"patchkit {version('patchkit')}\n"


@pytest.mark.parametrize(
    "arguments",
    [["audit"], ["diff", "-s", "vllm.a:b", "vllm@0.26.0"], ["adapt", "qwen3_moe", "--against"]],
)
def test_a_path_that_cannot_be_asked_about(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "x" * 5000
    monkeypatch.setattr("sys.argv", ["patchkit", *arguments, long, "--json"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert long in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")
@pytest.mark.parametrize("arguments", [["--help"], ["matrix", "qwen3_moe", "--json"]])
def test_an_answer_that_finds_no_room_or_no_reader(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "patchkit", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: the answer: No space left on device; name another place\n"
    read, written = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=written, stderr=subprocess.PIPE, text=True)
    os.close(written)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_helper_that_is_interrupted_says_nothing() -> None:
    code = (
        "import os, signal, threading\n"
        "from patchkit.symbols._scan import serve\n"
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "serve()\n"
    )
    helper = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert helper.wait(60) == -signal.SIGINT
    assert helper.stderr is not None and helper.stderr.read() == ""


@pytest.mark.parametrize("command", WRITES)
def test_a_place_that_cannot_be_written_is_named(command: str) -> None:
    before = sorted(Path().rglob("*"))
    done = patchkit(command, *WRITES[command], "file/below")
    assert done.exit_code == 2, done.exception
    assert "file/below: cannot be" in done.stderr
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["audit", "project.py", "--manifests", "nowhere"], "--manifests nowhere: there is no"),
        (["adopt", "project.py", "--name", "class"], "'class' is no identifier"),
        (["adopt", "project.py", "--side", "trainr"], "--side is rollout or trainer"),
        (["admit", "patchkit.providers.fast", "--device", "cuda"], "--device goes with --cases"),
        (["manifest", "build", "packaging", "../up", "--from", "folder"], "version '../up'"),
    ],
)
def test_an_option_that_means_nothing_is_refused(arguments: list[str], words: str) -> None:
    done = patchkit(*arguments, "--json")
    assert done.exit_code == 2, done.exception
    assert words in json.loads(done.stdout)["error"]


@pytest.mark.parametrize("command", ["matrix", "coverage"])
@pytest.mark.parametrize("option", ["--write", "--check"])
@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("nowhere", "cannot be read"),
        ("folder", "cannot be read"),
        ("latin", "no UTF-8"),
        ("file", "put these two lines"),
    ],
)
def test_a_file_without_a_place_for_the_table(
    command: str, option: str, file: str, words: str
) -> None:
    done = patchkit(command, "qwen3_moe", option, file)
    assert done.exit_code == 2, done.exception
    assert f"{file}: " in done.stderr and words in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["conformance", "fp32_lm_head", "--stage", "manifests", "--certificate"],
        ["doctor", "--sequences", "1", "--output"],
    ],
)
@pytest.mark.parametrize("place", ["folder", "file/below"])
def test_long_work_does_not_begin_where_its_result_cannot_be_written(
    arguments: list[str], place: str
) -> None:
    done = patchkit(*arguments, place)
    assert done.exit_code == 2, done.exception
    assert f"{place}: cannot be written" in done.stderr
    assert "manifests" not in done.stdout and "tiny model" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["adapt", "nosuch"],
        ["adopt", "nosuch"],
        ["audit", "nosuch"],
        ["check", "nosuch"],
        ["conformance", "nosuch"],
        ["coverage", "nosuch"],
        ["demo", "--adapter", "nosuch"],
        ["diff", "nosuch", "nosuch", "--all"],
        ["doctor", "--adapter", "nosuch"],
        ["doctor", "--compare", "nosuch", "nosuch"],
        ["manifest", "build", "nosuch", "installed"],
        ["matrix", "nosuch"],
        ["new-adapter", "name", "--model", "nosuch"],
        ["report", "nosuch"],
    ],
)
def test_whoever_asked_for_json_gets_it_of_a_refusal_too(arguments: list[str]) -> None:
    done = patchkit(*arguments, "--json")
    assert done.exit_code == 2, done.exception
    assert "nosuch" in json.loads(done.stdout)["error"]


def test_a_place_that_is_only_looked_at_is_not_made() -> None:
    patchkit("conformance", "nosuch", "--certificate", "new/certificate.json")
    assert not Path("new").exists()


def test_a_demo_that_cannot_run_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no room for the engine")

    monkeypatch.setattr("patchkit.parity.demo_setup.set_up", fails)
    done = patchkit("demo", "--json")
    assert done.exit_code == 2, done.exception
    assert json.loads(done.stdout)["error"] == "could not be run: no room for the engine"
    assert "Traceback" in done.stderr  # whose fault it is, nobody knows


def test_a_folder_that_vllm_takes_for_a_pattern_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"runs \[1\]/checkpoint-0: vLLM takes"):
        engine_arguments(object(), Path("runs [1]/checkpoint-0"))  # type: ignore[arg-type]


@pytest.mark.parametrize("command", ["matrix", "coverage"])
def test_whoever_asked_for_json_gets_it_of_a_table_that_is_not_current(command: str) -> None:
    begin, end = (f"<!-- patchkit {command} qwen3_moe: {s} -->" for s in MARKS)
    Path("file").write_text(f"{begin}\n{end}\n")
    done = patchkit(command, "qwen3_moe", "--check", "file", "--json")
    assert done.exit_code == 1, done.exception
    assert "not current" in json.loads(done.stdout)["error"]


def test_writing_a_table_keeps_a_link() -> None:
    begin, end = (f"<!-- patchkit matrix qwen3_moe: {s} -->" for s in MARKS)
    Path("file").write_text(f"head\n{begin}\n{end}\ntail\n")
    Path("link").symlink_to("file")
    assert patchkit("matrix", "qwen3_moe", "--write", "link").exit_code == 0
    assert Path("link").is_symlink()
    assert "| vllm |" in Path("file").read_text()
    assert patchkit("matrix", "qwen3_moe", "--check", "file").exit_code == 0
