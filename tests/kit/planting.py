"""A package, and an adapter of it, installed nowhere but on one path: faults are planted there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KERNELS = """
def _total(values, start=0.0):
    for value in values:
        start = start + value
    return start


def mean(values):
    return _total(values) / len(values)


def other(values):
    return list(values)
"""

REPLACEMENTS = """
import math


def total(values, start=0.0):
    return math.fsum([start, *values])
"""

DECLARATION = """
from pathlib import Path

from patchkit import Adapter, Patch

HERE = Path(__file__).parent
adapter = Adapter(
    name="exact_numerics",
    {side}=(
        Patch(
            symbol="numerics.kernels:_total", action="replace",
            replacement="exact_numerics.replacements:total",
            reason="r", consequence="c", until="u"{patch}
        ),
    ),
    reviewed=HERE / "reviewed.json",
    manifests=(HERE / "manifests",),
    exercise="exact_numerics.exercise:exercise"{adapter}
)
"""

EXERCISE = """
from numerics.kernels import mean


def exercise(side):
    return mean([1e16, 1.0, -1e16])
"""


@dataclass
class Planted:
    """A folder that stands on the path of the commands run with it."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def write(self, name: str, text: str) -> Path:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def distribution(self, name: str, version: str, package: str, entry_points: str = "") -> None:
        info = f"{name}-{version}.dist-info"
        self.write(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        self.write(f"{info}/top_level.txt", f"{package}\n")
        self.write(f"{info}/RECORD", f"{package}/__init__.py,,\n")
        if entry_points:
            self.write(f"{info}/entry_points.txt", entry_points)

    def patchkit(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH")]))
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PATCHKIT_", "VLLM_"))}
        return subprocess.run(
            [sys.executable, "-m", "patchkit", *arguments],
            env={**clean, "PYTHONPATH": path, **self.environment},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )

    def conformance(self, *arguments: str, adapter: str = "exact_numerics") -> dict[str, Any]:
        run = self.patchkit("conformance", adapter, "--json", *arguments)
        assert run.returncode in (0, 1), run.stdout + run.stderr
        content = json.loads(run.stdout)
        assert run.returncode == int(any(s["status"] == "failed" for s in content["stages"]))
        return content

    def review(self) -> None:
        """Build the manifest and record the digest, as an author does."""
        manifest = "exact_numerics/manifests/numerics/1.0.json"
        for command in (
            ("manifest", "build", "numerics", "1.0", "-a", "exact_numerics", "-o", manifest),
            ("adapt", "exact_numerics", "--yes"),
        ):
            run = self.patchkit(*command)
            assert run.returncode == 0, run.stdout + run.stderr


def plant_numerics(
    folder: Path, *, side: str = "rollout", patch: str = "", adapter: str = ""
) -> Planted:
    """The guide's package and adapter; ``patch`` and ``adapter`` are further arguments."""
    planted = Planted(folder)
    planted.write("numerics/__init__.py", "")
    planted.write("numerics/kernels.py", KERNELS)
    planted.distribution("numerics", "1.0", "numerics")
    planted.write(
        "exact_numerics/__init__.py",
        DECLARATION.format(
            side=side, patch=patch and f", {patch}", adapter=adapter and f", {adapter}"
        ),
    )
    planted.write("exact_numerics/replacements.py", REPLACEMENTS)
    planted.write("exact_numerics/exercise.py", EXERCISE)
    planted.write("exact_numerics/reviewed.json", '{"schema": 1, "symbols": {}}')
    planted.distribution(
        "exact-numerics",
        "1.0",
        "exact_numerics",
        "[patchkit.adapters]\nexact_numerics = exact_numerics:adapter\n",
    )
    return planted
