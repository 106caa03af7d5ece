"""One source, one digest, whatever Python reads it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSIONS = ("3.10", "3.11", "3.12", "3.13")

# Digest over every record of every symbol of vLLM 0.32.0 (its CPU distribution), as
# read by Python 3.10, 3.11, 3.12 and 3.13 alike.
VLLM_0_32_0 = "b6731008977b57b12beb85546ca2150fa9bd242bb79a5732b3d4d7d4fbbb9354"

# Where interpreters are known to build different trees for the same text.
TRICKY = r"""
def strings(x, width):
    a = f'{x}a' 'b' f'{x!r:>{width}}' f'{{}}' f'{x=}' f'{x = !s}' f"{'nested'}" rf'\d{x}'
    b = 'a' 'b', b'a' b'b', u'text', r'\n', '\N{BULLET}', '\ud800', 'é', ''
    return f'{x:{width}.{width}}', f'{x:}', f'', f'plain', f'{x:%Y-%m}', a, b
def numbers(): return 1_000, 0x1f, 1e400, -0.0, 1j, 10**400, True, None, ...
def syntax(a, /, b=(1,), *args: int, c=lambda x, *y, z=1: (x, y, z), **kw):
    with (open(a) as f, open(b)):
        x[a, b:c, ...], x[()], x[(a, b)]
    match a:
        case {'k': [1, *rest], **others} if rest: pass
        case None | True | 'x' | -1 | C(a=1): pass
        case _: pass
    try: yield (yield)
    except* ValueError if False else TypeError: pass
    return not (a < b < c), (a, *b), {**a, 'b': 1}, [x async for x in y], (y := 1), a if b else c
"""

CODE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from patchkit.symbols._module import read_raw
from patchkit.symbols._sources import TreeSource
from pathlib import Path
if sys.argv[2] == "-":
    records = {k: v for k, v in read_raw(sys.stdin.read(), "m", "m.py").records.items()}
else:
    source = TreeSource(Path(sys.argv[2]), "vllm")
    records = {f"{m}:{k}": v for m in source.modules() for k, v in source.raw(m).records.items()}
print(json.dumps(records, sort_keys=True))
"""


def interpreters() -> list[str]:
    """Interpreters of other versions on this machine; the running one first."""
    found = {f"{sys.version_info[0]}.{sys.version_info[1]}": sys.executable}
    roots = [Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"]
    for version in VERSIONS:
        for path in (
            shutil.which(f"python{version}"),
            *(str(p) for root in roots for p in root.glob(f"{version}.*/bin/python")),
        ):
            if path is None or version in found:
                continue
            asked = [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
            done = subprocess.run(asked, capture_output=True, text=True, check=False)
            if done.returncode == 0 and done.stdout.strip() == version:
                found[version] = path
    return list(found.values())


def read(interpreter: str, folder: str, text: str = "") -> str:
    done = subprocess.run(
        [interpreter, "-c", CODE, str(ROOT), folder],
        input=text, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


def test_tricky_source_reads_alike_everywhere() -> None:
    text = TRICKY.replace("    except* ValueError if False else TypeError: pass\n",
                          "    except ValueError: pass\n")  # fmt: skip
    answers = {read(i, "-", text) for i in interpreters()}
    assert len(answers) == 1
    assert set(json.loads(answers.pop())) == {"strings", "numbers", "syntax"}


def test_tricky_source_has_the_recorded_digests() -> None:
    """Holds where there is but one interpreter."""
    text = TRICKY.replace("    except* ValueError if False else TypeError: pass\n",
                          "    except ValueError: pass\n")  # fmt: skip
    records = json.loads(read(sys.executable, "-", text))
    assert {name: r["digest"] for name, r in records.items()} == {
        "strings": "0c20e7dea52410e7e0d91499c4442af5",
        "numbers": "a4277a7a8a8c30db89f60309d6b0b38d",
        "syntax": "a3a5625bf2a2ccf1da3fca54d862fae3",
    }


def vllm() -> str:
    from patchkit.symbols import installed_version

    spec = find_spec("vllm")
    if spec is None or installed_version("vllm").partition("+")[0] != "0.32.0":
        pytest.skip("vLLM 0.32.0 is not installed")
    return str(Path(next(iter(spec.submodule_search_locations))).parent)


@pytest.mark.stack
def test_every_function_of_vllm_has_the_recorded_digest() -> None:
    text = read(sys.executable, vllm())
    assert sha256(text.encode()).hexdigest() == VLLM_0_32_0


@pytest.mark.stack
@pytest.mark.nightly
def test_every_function_of_vllm_reads_alike_everywhere() -> None:
    folder = vllm()
    for interpreter in interpreters():
        assert sha256(read(interpreter, folder).encode()).hexdigest() == VLLM_0_32_0, interpreter
