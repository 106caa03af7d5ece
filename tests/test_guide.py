"""The adapter guide's code runs, as a reader would run it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

GUIDE = Path(__file__).parents[1] / "docs" / "adapter-guide.md"
BLOCK = re.compile(r"^```(?:python|json) (file=(?P<file>\S+)|run)\n(?P<code>.*?)^```$", re.M | re.S)


def test_the_adapter_guide_runs(tmp_path: Path) -> None:
    program = []
    for block in BLOCK.finditer(GUIDE.read_text()):
        if block["file"]:
            target = tmp_path / block["file"]
            target.parent.mkdir(exist_ok=True)
            (target.parent / "__init__.py").touch()
            target.write_text(block["code"])
        else:
            program.append(block["code"])
    assert len(program) == 3
    # In a file: the code of a program is read as source, too.
    (tmp_path / "program.py").write_text("\n".join(program))
    run = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
