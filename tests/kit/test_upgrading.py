"""The upgrade that docs/upgrading.md tells is made again, and every line of it compared."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from planting import Planted

pytest.importorskip("vllm", reason="the last steps read the installed version")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "upgrading.md"
BLOCK = re.compile(r"^```console(?P<tag> nightly)?\n(?P<lines>.*?)^```$", re.M | re.S)

pytestmark = pytest.mark.stack


@pytest.fixture
def before(tmp_path: Path) -> Planted:
    """The adapter as of vLLM 0.26, with the reviews of that version alone."""
    planted = Planted(tmp_path)
    package = tmp_path / "moe_at_0_26"
    package.mkdir()
    shutil.copy(Path(__file__).parent / "upgrade" / "moe_at_0_26.py", package / "__init__.py")
    reviewed = json.loads((ROOT / "adapters" / "qwen3_moe" / "reviewed.json").read_text())
    known = {
        symbol: then
        for symbol, digests in reviewed["symbols"].items()
        if (then := {digest: ["0.26.0"] for digest, at in digests.items() if "0.26.0" in at})
    }
    planted.write("moe_at_0_26/reviewed.json", json.dumps({"schema": 1, "symbols": known}))
    planted.distribution(
        "moe-at-0-26", "1.0", "moe_at_0_26",
        "[patchkit.adapters]\nmoe_at_0_26 = moe_at_0_26:adapter\n",
    )  # fmt: skip
    return planted


def squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def follow(planted: Planted, *, nightly: bool) -> int:
    """Run every command; what stands below it has to be in its output, in that order."""
    compared = 0
    for block in BLOCK.finditer(PAGE.read_text()):
        if block["tag"] and not nightly:
            continue
        output = ""
        for line in block["lines"].splitlines():
            if line.startswith("$ patchkit "):
                command, _, comment = line[len("$ patchkit ") :].partition(" # ")
                run = planted.patchkit(*command.split())
                assert run.returncode == int("exit 1" in comment), line + run.stdout + run.stderr
                output = squeezed(run.stdout)
            elif line != "…":
                expected = squeezed(line).strip().removesuffix("…")
                assert expected in output, f"{expected!r} is not in {output}"
                output = output.partition(expected)[2]
                compared += 1
    return compared


def test_every_command_says_what_the_page_says(before: Planted):
    assert follow(before, nightly=False) >= 19


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_certificate_at_its_end(before: Planted):
    assert follow(before, nightly=True) >= 25
