"""How long it takes to know what an upgrade breaks: patchkit, griffe, and the floor.

One run, side by side, on two unpacked trees of one package::

    python benchmarks/diff.py OLD_WHEEL NEW_WHEEL [--adapter qwen3_moe] [--skip-griffe]

Measured, each in fresh processes:

* plain ``ast.parse`` of every file of NEW on one core: the floor of static reading;
* the digests' own cost: the walk over those trees, without the parsing;
* patchkit: the whole-package manifest of NEW; the adapter's symbols from stored manifests
  and from the two trees, as the command that a user types; everything from the two trees;
* griffe: load both packages and compare them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

FLOOR = """
import ast, gc, sys, time, warnings
from pathlib import Path
warnings.simplefilter("ignore")
files = [p.read_bytes() for p in sorted(Path(sys.argv[1], sys.argv[2]).rglob("*.py"))]
gc.disable()
start = time.perf_counter()
for text in files:
    ast.parse(text)
print(time.perf_counter() - start, len(files), sum(map(len, files)))
"""

DIGESTS = """
import gc, sys, time
from pathlib import Path
from patchkit.symbols import _module
from patchkit.symbols._sources import TreeSource
source = TreeSource(Path(sys.argv[1]), sys.argv[2])
texts = [(m, f, source.read(f)) for m, f in source.modules().items()]
gc.disable()
spent = 0.0
for module, file, text in texts:
    tree = _module.parse_source(text, file)
    start = time.perf_counter()
    _module._Reader(module, file).read(tree)
    spent += time.perf_counter() - start
    del tree
print(spent)
"""

WHOLE = """
import os, sys, time
from pathlib import Path
start = time.perf_counter()
from patchkit.symbols.drift import TreeSource, build_whole
manifest = build_whole(TreeSource(Path(sys.argv[1]), sys.argv[2]))
read = time.perf_counter() - start
cpu = os.times()
manifest.dump(Path(sys.argv[3]))
print(read, time.perf_counter() - start, len(manifest.symbols), sum(cpu[:4]))
"""

GRIFFE = """
import sys, time
start = time.perf_counter()
import griffe
old = griffe.load(sys.argv[3], search_paths=[sys.argv[1]], allow_inspection=False)
loaded = time.perf_counter() - start
new = griffe.load(sys.argv[3], search_paths=[sys.argv[2]], allow_inspection=False)
found = 0
for _ in griffe.find_breaking_changes(old, new):
    found += 1
print(loaded, time.perf_counter() - start, found)
"""


def run(code: str, *arguments: str) -> list[float]:
    """Run a measurement in an interpreter of its own; it prints its figures."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return [float(x) for x in done.stdout.split()]


def command(*arguments: str) -> tuple[float, str]:
    """Wall time of the patchkit command itself, and what it printed; best of three."""
    best, text = float("inf"), ""
    for _ in range(3):
        start = time.perf_counter()
        script = str(Path(sys.executable).with_name("patchkit"))
        done = subprocess.run([script, *arguments], capture_output=True, text=True, check=False)
        best = min(best, time.perf_counter() - start)
        if done.returncode not in (0, 1):
            raise SystemExit(done.stderr)
        text = done.stdout
    return best, text


def unpack(wheel: Path, folder: Path) -> str:
    """Unpack the Python files of a wheel; returns the version."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".py") and ".." not in name:
                archive.extract(name, folder)
    return wheel.name.split("-")[1].partition("+")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--package", default="vllm")
    parser.add_argument("--adapter", default="qwen3_moe")
    parser.add_argument("--skip-griffe", action="store_true")
    parser.add_argument("--skip-everything", action="store_true", help="no comparison of all")
    options = parser.parse_args()
    rows: list[tuple[str, float, str]] = []

    def row(what: str, seconds: float, note: str = "") -> None:
        rows.append((what, seconds, note))
        print(f"{what:<62} {seconds:8.2f} s  {note}", flush=True)

    print(f"Python {platform.python_version()}, {len(os.sched_getaffinity(0))} cores, ", end="")
    print(f"load before: {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        old, new = folder / "old", folder / "new"
        versions = unpack(options.old, old), unpack(options.new, new)
        package = options.package
        print(f"{package} {versions[0]} -> {versions[1]}")
        parse, files, size = run(FLOOR, str(new), package)
        row("floor: ast.parse of NEW, one core", parse, f"{files:.0f} files, {size / 1e6:.0f} MB")
        (digests,) = run(DIGESTS, str(new), package)
        row("digests alone, one core", digests)
        read, written, symbols, cpu = run(WHOLE, str(new), package, str(folder / "m.json"))
        row("patchkit: whole manifest of NEW, read", read,
            f"{symbols:.0f} symbols; {cpu:.1f} s of CPU in all processes")  # fmt: skip
        row("patchkit: the same, and written to a file", written)
        row("bound: ast.parse on one core + digests on two", parse + digests / 2)
        measure(row, options, versions, old, new)
        if not options.skip_griffe:
            loaded, total, found = run(GRIFFE, str(old), str(new), package)
            row("griffe: load OLD", loaded)
            row("griffe: load both and compare", total, f"{found:.0f} breakages")
    print(f"load after: {os.getloadavg()[0]:.1f}")


def measure(
    row: Callable[..., None],
    options: argparse.Namespace,
    versions: tuple[str, str],
    old: Path,
    new: Path,
) -> None:
    """The commands that a user types."""
    package, scope = options.package, ["--adapter", options.adapter, "--json"]
    stored = [f"{package}@{v}" for v in versions]
    seconds, text = command("diff", *stored, *scope)
    row(f"patchkit diff {' '.join(stored)} --adapter …", seconds, summary(text))
    seconds, text = command("diff", str(old), str(new), *scope)
    row("patchkit diff OLD_TREE NEW_TREE --adapter …", seconds, summary(text))
    if not options.skip_everything:
        start = time.perf_counter()
        done = subprocess.run(
            [str(Path(sys.executable).with_name("patchkit")), "diff", str(old), str(new), "--all",
             "--json", "--package", package],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        row("patchkit diff OLD_TREE NEW_TREE --all", time.perf_counter() - start,
            summary(done.stdout))  # fmt: skip


def summary(text: str) -> str:
    counts = json.loads(text)["summary"]
    return ", ".join(f"{n} {kind}" for kind, n in counts.items() if n)


if __name__ == "__main__":
    main()
