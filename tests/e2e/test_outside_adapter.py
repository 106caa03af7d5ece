"""An adapter of another distribution: installed, found by its entry point, certified; and broken.

The example is copied, built and installed as a user would; patchkit knows nothing of it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.timeout(900)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "outside_adapter"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site folder with the example in it, not editable: what is not packaged is not there."""
    folder = tmp_path_factory.mktemp("outside")
    source, site = folder / "source", folder / "site"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--target", str(site), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return site


@pytest.fixture
def copy(installed: Path, tmp_path: Path) -> Path:
    """The same, to be broken."""
    site = tmp_path / "site"
    shutil.copytree(installed, site, ignore=shutil.ignore_patterns("__pycache__"))
    return site


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PATCHKIT_", "VLLM_"))}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        env={**clean, "PYTHONPATH": str(site)},
        cwd=site.parent,
        capture_output=True,
        text=True,
        check=False,
    )


def failure(site: Path, stage: str) -> str:
    """What one stage found, which has to fail."""
    done = run(
        site, "patchkit", "conformance", "llama", "--stage", stage, "--sequences", "4", "--json"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    (found,) = json.loads(done.stdout)["stages"]
    assert found["status"] == "failed"
    return json.dumps(found["violations"])


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_its_own_tests_pass_through_the_entry_point(installed: Path):
    """The whole suite, on real vLLM and real FSDP2."""
    project = EXAMPLE / "pyproject.toml"
    done = run(
        installed, "pytest", "-q", "-p", "no:cacheprovider", "-c", str(project),
        f"--rootdir={EXAMPLE}", str(EXAMPLE / "tests"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "6 passed" in done.stdout
    assert "skipped" not in done.stdout


def test_a_difference_of_one_part_in_a_hundred_and_twenty_eight_is_no_certificate(copy: Path):
    change(copy / "patchkit_llama/trainer.py", "    return shared", "    output, _ = shared")
    with (copy / "patchkit_llama/trainer.py").open("a") as file:
        file.write("    return output * (1 + 2**-7), None\n")
    text = failure(copy, "reached")
    assert "differ" in text


def test_an_operator_whose_rows_share_a_scale_is_named(copy: Path):
    (copy / "patchkit_llama/operators.py").write_text("""
import torch
from patchkit.parity.conformance import RowOperator


def operators():
    yield RowOperator(
        name="planted",
        run=lambda x: x / x.abs().max() if len(x) else x,
        inputs={"x": torch.randn(257, 8)},
    )
""")
    text = failure(copy, "rows")
    assert "planted: neighbours" in text
    assert "planted: batch size" in text


def test_a_plugin_that_patches_without_being_asked_is_named(copy: Path):
    (copy / "patchkit_llama/eager.py").write_text("""
def register():
    import os

    from vllm.model_executor.layers.layernorm import RMSNorm

    stock = RMSNorm.forward_native
    RMSNorm.forward_native = lambda self, *arguments: stock(self, *arguments)
    os.environ["LLAMA_IS_PATCHED"] = "1"
""")
    (points,) = copy.glob("patchkit_llama-*.dist-info/entry_points.txt")
    points.write_text(
        points.read_text() + "\n[vllm.general_plugins]\nllama = patchkit_llama.eager:register\n"
    )
    text = failure(copy, "plugin")
    for named in (
        "vllm.model_executor.layers.layernorm:RMSNorm.forward_native",
        "LLAMA_IS_PATCHED",
        '"patchkit_llama',
    ):
        assert named in text


@pytest.mark.nightly
def test_a_submodule_that_nobody_answers_for_is_named(copy: Path):
    change(
        copy / "patchkit_llama/__init__.py",
        '        "vllm.model_executor.models.llama:LlamaMLP",\n',
        "",
    )
    assert "LlamaMLP" in failure(copy, "reached")


@pytest.mark.nightly
def test_a_patch_that_nothing_runs_is_named(copy: Path):
    """RMSNorm's CUDA path, on a CPU: installed, reviewed, and never called."""
    declaration = copy / "patchkit_llama/__init__.py"
    change(
        declaration,
        "from pathlib import Path",
        "from dataclasses import replace\nfrom pathlib import Path",
    )
    change(
        declaration,
        "    rollout=RUNTIME_PATCHES + vllm_cpu.DENSE,",
        "    rollout=RUNTIME_PATCHES + vllm_cpu.DENSE + (\n"
        "        replace(vllm_cpu.NORM[0], symbol=vllm_cpu.NORM[0].symbol.replace(\n"
        '            "forward_native", "forward_cuda")),\n'
        "    ),",
    )
    assert run(copy, "patchkit", "adapt", "llama", "--yes").returncode == 0
    text = failure(copy, "reached")
    assert "RMSNorm.forward_cuda" in text
    assert "is installed and was never called" in text
