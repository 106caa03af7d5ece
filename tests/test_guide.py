"""The adapter guide's code and commands run, as a reader would run them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[1] / "docs" / "adapter-guide.md"
BLOCK = re.compile(
    r"^```(?P<language>python|json|toml|console) "
    r"(?:file=(?P<file>\S+)|(?P<tag>run|stack|nightly))\n(?P<code>.*?)^```$",
    re.M | re.S,
)
SITE = Path(str(importlib.util.find_spec("pytest").origin)).parents[1]  # type: ignore[union-attr]


@dataclass
class Reader:
    """A folder and an environment of the reader's own, on top of what is installed here."""

    folder: Path
    bin: Path

    def run(self, *command: str, status: int = 0) -> None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PATCHKIT_", "VLLM_"))}
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**clean, "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
        told = f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert done.returncode == status, told

    def commands(self, text: str) -> None:
        """What stands behind the prompts; a comment says where another status is right."""
        for line in text.splitlines():
            if line.startswith("$ "):
                self.run("bash", "-c", line[2:], status=int("# exit 1" in line))

    def follow(self, tags: set[str]) -> int:
        """Do what the page says, in its order; how many blocks were run."""
        count = 0
        for number, block in enumerate(BLOCK.finditer(GUIDE.read_text())):
            if block["file"]:
                target = self.folder / block["file"]
                target.parent.mkdir(exist_ok=True)
                target.write_text(block["code"])
            elif block["tag"] in tags:
                count += 1
                if block["language"] == "console":
                    self.commands(block["code"])
                else:
                    # In a file: the code of a program is read as source, too.
                    (self.folder / f"step_{number}.py").write_text(block["code"])
                    self.run(str(self.bin / "python"), f"step_{number}.py")
        return count


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """An environment in which packages can be installed without touching this one."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    (site,) = home.glob("lib/python*/site-packages")
    # Everything that is installed here, editable packages included.
    (site / "outer.pth").write_text(f"import site; site.addsitedir({str(SITE)!r})\n")
    for name in ("pip", "patchkit", "pytest"):
        script = home / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{home}/bin/python" -m {name} "$@"\n')
        script.chmod(0o755)
    folder = tmp_path / "work"
    folder.mkdir()
    yield Reader(folder, home / "bin")


def test_from_nothing_to_a_certificate(reader: Reader) -> None:
    assert reader.follow({"run"}) == 5
    assert '"green":true' in (reader.folder / "certificate.json").read_text()
    reader.run("pytest", "-q", "-p", "no:cacheprovider", "tests")


@pytest.mark.stack
def test_a_model_of_the_family_is_sketched_installed_and_reviewed(reader: Reader) -> None:
    pytest.importorskip("vllm")
    assert reader.follow({"stack"}) == 4
    manifests = reader.folder / "my_qwen2/patchkit_my_qwen2/manifests"
    assert len(list(manifests.glob("*/*.json"))) == 2
    reader.run("patchkit", "conformance", "my_qwen2", "--stage", "manifests", "--stage", "rows")
    reader.run("patchkit", "check", "my_qwen2", "--static")


@pytest.mark.nightly
@pytest.mark.stack
@pytest.mark.timeout(1800)
def test_the_sketch_is_green_without_an_edit(reader: Reader) -> None:
    assert reader.follow({"stack", "nightly"}) == 6
    assert '"green":true' in (reader.folder / "certificate.json").read_text()


def test_the_table_of_stages_is_complete() -> None:
    from patchkit.kit import STAGES

    text = GUIDE.read_text().partition("| stage | fails when |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", text, re.M) == list(STAGES)
