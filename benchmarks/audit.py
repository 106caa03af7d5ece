"""How long an audit takes: 2,000 files without patches, and 2,000 with 500.

    python benchmarks/audit.py [--tree FOLDER] [--files 2000]

Without --tree the files of the first run are those of the installed transformers (or of
another installed package, `--package`): real code with no lack of assignments. The second
tree is generated: the same files, and 500 of them patch something.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from patchkit.audit._project import Project
from patchkit.audit._survey import Survey, collector_paused

FORMS = (
    "import {module} as target\ndef new(*a, **k): ...\ntarget.{name} = new\n",
    "from {module} import {name}\nimport {module} as m\nsetattr(m, '{name}', lambda *a: None)\n",
    "import sys\nsys.modules['{module}'].{name} = None\n",
    "from unittest.mock import patch\npatch('{module}.{name}', None).start()\n",
    "import importlib\nfor m, n in (('{module}', '{name}'),):\n"
    "    setattr(importlib.import_module(m), n, print)\n",
)
TARGETS = (
    ("json.decoder", "scanstring"), ("logging.handlers", "SYSLOG_UDP_PORT"),
    ("email.message", "Message"), ("http.client", "HTTPConnection"), ("asyncio.events", "Handle"),
)  # fmt: skip


def tree(source: Path, folder: Path, files: int, patches: int) -> int:
    """Copy files of a package, so that it is nobody's installed package any more."""
    paths = sorted(p for p in source.rglob("*.py") if "__pycache__" not in p.parts)[:files]
    for index, path in enumerate(paths):
        target = folder / path.relative_to(source.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text("utf-8", "replace")
        if (
            patches
            and index % (len(paths) // patches) == 0
            and index // (len(paths) // patches) < patches
        ):
            module, name = TARGETS[index % len(TARGETS)]
            text += "\n" + FORMS[index % len(FORMS)].format(module=module, name=name)
        target.write_text(text, "utf-8")
    return len(paths)


def measure(folder: Path) -> dict[str, float | int]:
    """The walk alone, in this process; and the command, start-up and verdicts included."""
    wall, cpu = time.perf_counter(), _cpu()
    with collector_paused():
        survey = Survey(Project(folder)).run()
        walked, walked_cpu = time.perf_counter() - wall, _cpu() - cpu
        files = len(survey.project.files)
        survey.close()
    wall = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from patchkit.cli import main; main()",
         "audit", str(folder), "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    whole = time.perf_counter() - wall
    return {
        "files": files,
        "findings": json.loads(done.stdout)["summary"]["findings"],
        "walk_s": round(walked, 2),
        "walk_cpu_s": round(walked_cpu, 2),
        "command_s": round(whole, 2),
    }


def _cpu() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path)
    parser.add_argument("--package", default="transformers")
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    source = options.tree
    if source is None:
        spec = find_spec(options.package)
        if spec is None or not spec.submodule_search_locations:
            parser.error(f"{options.package} is not installed: name a folder with --tree")
        source = Path(next(iter(spec.submodule_search_locations)))
    results = {}
    for name, patches in (("no patches", 0), ("500 patches", 500)):
        folder = Path(tempfile.mkdtemp(prefix="audit-benchmark-"))
        try:
            tree(source, folder, options.files, patches)
            results[name] = measure(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    added = results["500 patches"]["findings"] - results["no patches"]["findings"]
    if options.json:
        print(json.dumps({**results, "added": added, "load": os.getloadavg()[0]}))
        return
    for name, values in results.items():
        print(f"{name:12}", "  ".join(f"{k} {v}" for k, v in values.items()))
    print(f"findings added by 500 patches: {added}; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
