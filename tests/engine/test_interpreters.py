"""One patch set, one digest, whatever Python asks: workers and drivers can be compared."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSIONS = ("3.10", "3.11", "3.12", "3.13")

# As Python 3.10, 3.11, 3.12 and 3.13 alike compute it for the toy below. It changes
# with the toy, and with what a runtime manifest covers: both on purpose only.
DIGEST = "7aeeb7f7954547f9efe03c3c43d4961f"

UPSTREAM = '''
import functools
from typing import Optional

EPS = 1e-6

def plain(x, /, y: "Optional[int]" = None, *rest: int, key=f"{EPS}a" "b", **more) -> "float":
    """Words do not count."""
    return f"{x!r:>{10}}{{}}", [c for c in "\\N{BULLET}"], -1

class Layer:
    scale: float = 1.0

    def forward(self, x, residual=None):
        match x:
            case {"k": [1, *_]}:
                return residual
        return x * self.scale

    @staticmethod
    def fixed(x): return x

    @classmethod
    def made(cls, n=(1, 2)): return cls()

    @property
    def size(self): return 1

    @functools.cached_property
    def kept(self): return 2

    async def later(self): return 3

class Sub(Layer):
    pass
'''
OURS = """
from patchkit.engine import Adapter, Patch, Value
import math

def patch(symbol, new, action="replace", **more):
    return Patch(symbol="digest_up:" + symbol, replacement=new, action=action,
                 reason="a test", consequence="none", until="never", **more)

adapter = Adapter(name="digest_toy", rollout=(
    patch("plain", "digest_ours:plain", versions=">=1.0,<3"),
    patch("Layer.fixed", "digest_ours:fixed", versions=">=3"),
    patch("Layer.forward", "digest_ours:factory", "wrap"),
    patch("Layer.made", "digest_ours:made"),
    patch("Layer.size", "digest_ours:size"),
    patch("Layer.kept", "digest_ours:kept"),
    patch("Layer.later", "digest_ours:later"),
    patch("Sub.fixed", "digest_ours:fixed", on_subclass=True),
    patch("EPS", 1e-5, "value"),
    patch("Layer.scale", Value("1/2"), "value"),
), relies_on=("digest_up:Layer.forward",))

def plain(x, /, y=None, *rest, key="1e-06ab", **more): return f"{x=}" f"{key:{y}}"
def factory(original):
    def forward(self, x, residual=None): return original(self, x, residual)
    return forward
def fixed(x): return -x
def made(cls, n=(1, 2)): return None
def size(self): return 1_0
def kept(self): return math.inf
async def later(self): return None
"""
ASK = """
import sys
from patchkit.engine import install, patch_set_digest
from digest_ours import adapter
print("%d.%d" % sys.version_info[:2], patch_set_digest(adapter, "rollout"))
assert "digest_up" not in sys.modules, "planned from its source"
with install(adapter, "rollout") as inst:
    before = inst.manifest.digest
    import digest_up
    assert inst.state == "active", inst.state
    assert digest_up.Layer().size == 10
    print(before, inst.manifest.digest)
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digest")
    (folder / "digest_up.py").write_text(UPSTREAM)
    (folder / "digest_ours.py").write_text(OURS)
    info = folder / "digest_up-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: digest-up\nVersion: 1.5+cpu\n")
    (info / "top_level.txt").write_text("digest_up\n")
    # The one package that planning needs; other interpreters may not have it.
    spec = importlib.util.find_spec("packaging")
    assert spec is not None and spec.origin is not None
    (folder / "packaging").symlink_to(Path(spec.origin).parent)
    return folder


def other_interpreters() -> dict[str, str]:
    roots = [Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"]
    found: dict[str, str] = {}
    for version in VERSIONS:
        for path in (
            shutil.which(f"python{version}"),
            *(str(p) for root in roots for p in root.glob(f"{version}.*/bin/python")),
        ):
            # A shim of a version that is not installed is found too, and says so.
            asked = [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
            if path is not None and version not in found:
                done = subprocess.run(asked, capture_output=True, text=True, check=False)  # type: ignore[arg-type]
                if done.stdout.strip() == version:
                    found[version] = path
    found.pop(f"{sys.version_info[0]}.{sys.version_info[1]}", None)
    return found


def digests(interpreter: str, toy: Path) -> tuple[str, set[str]]:
    done = subprocess.run(
        [interpreter, "-c", ASK],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(toy), str(ROOT)])},
        cwd=toy,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{interpreter}: {done.stderr[-3000:]}"
    version, *found = done.stdout.split()
    return version, set(found)


def test_the_recorded_digest_here(toy: Path) -> None:
    """Holds where there is but one interpreter."""
    assert digests(sys.executable, toy)[1] == {DIGEST}


def test_the_recorded_digest_under_every_other_python(toy: Path) -> None:
    others = other_interpreters()
    if not others:
        pytest.skip("no other Python from 3.10 to 3.13 on this machine")
    found = dict(digests(path, toy) for path in others.values())
    assert found == {version: {DIGEST} for version in others}
