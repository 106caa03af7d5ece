"""The conformance suite passes what is right, and each stage fails what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from planting import REPLACEMENTS, Planted, plant_numerics

# What needs neither torch nor vLLM; the others are in test_suite_stack.py.
LIGHT = ("manifests", "undo", "plugin", "reached", "ablation")


def stages(content: dict) -> dict[str, dict]:
    return {stage["stage"]: stage for stage in content["stages"]}


def failure(content: dict, stage: str) -> str:
    """All that one stage found, as text; it has to be the one that failed."""
    found = stages(content)[stage]
    assert found["status"] == "failed", found
    assert found["violations"]
    for violation in found["violations"]:
        assert all(violation.values()), violation
    return json.dumps(found["violations"])


@pytest.mark.parametrize("side", ["rollout", "trainer"])
def test_an_adapter_without_fault_is_green_and_gets_a_certificate(tmp_path: Path, side: str):
    planted = plant_numerics(tmp_path, side=side)
    planted.review()
    content = planted.conformance("--certificate", "out/certificate.json")
    assert content["green"], content
    found = stages(content)
    assert found["plugin"]["status"] == found["rows"]["status"] == "not applicable"
    assert found["plugin"]["why"]
    assert {found[s]["status"] for s in ("manifests", "undo", "reached", "ablation")} == {"passed"}
    assert found["manifests"]["figures"]["symbols"] == 1
    assert found["reached"]["figures"] == {f"{side} numerics.kernels:_total": 1}
    written = json.loads((tmp_path / "out/certificate.json").read_text())
    assert written["digest"] == content["digest"]
    assert written["versions"]["numerics"] == "1.0"


def test_a_part_of_the_suite_is_no_certificate(tmp_path: Path):
    planted = plant_numerics(tmp_path)
    planted.review()
    content = planted.conformance("--stage", "manifests")
    assert not content["green"]
    assert content["not_run"] == ["undo", "plugin", "rows", "reached", "ablation"]


def test_a_changed_body_fails_the_manifests(tmp_path: Path):
    planted = plant_numerics(tmp_path)
    planted.review()
    kernels = tmp_path / "numerics/kernels.py"
    kernels.write_text(kernels.read_text().replace("start + value", "value + start"))
    text = failure(planted.conformance("--stage", "manifests"), "manifests")
    assert "review in numerics 1.0" in text
    assert "the stored manifest is not fresh" in text


def test_a_symbol_that_is_gone_and_a_manifest_that_is_missing(tmp_path: Path):
    planted = plant_numerics(tmp_path)
    kernels = tmp_path / "numerics/kernels.py"
    kernels.write_text(kernels.read_text().replace("_total", "_sum"))
    text = failure(planted.conformance("--stage", "manifests"), "manifests")
    assert "numerics.kernels:_total" in text
    assert "no manifest of this version is stored" in text
    assert "patchkit manifest build numerics installed --adapter exact_numerics" in text


FAULTS = {
    "patches on its own behalf": (
        "undo",
        REPLACEMENTS
        + "import numerics.kernels\nnumerics.kernels.other = lambda values: sorted(values)\n",
        "numerics.kernels.other",
    ),
    "exchanges code in place": (
        "undo",
        REPLACEMENTS
        + "import numerics.kernels\n"
        + "def new(values): return 2\n"
        + "numerics.kernels.other.__code__ = new.__code__\n",
        "numerics.kernels.other",
    ),
    "leaves an import hook": (
        "undo",
        REPLACEMENTS + "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, *arguments): return None\n"
        "sys.meta_path.append(Finder())\n",
        "sys.meta_path",
    ),
    "cannot be imported": ("undo", "import nothing_of_this_name\n", "nothing_of_this_name"),
    "does what the original does": (
        "ablation",
        "def total(values, start=0.0):\n    for v in values: start = start + v\n    return start\n",
        "nobody missed it",
    ),
    "has another signature": (
        "undo",
        "def total(numbers, start=0.0):\n    return start\n",
        "numerics.kernels:_total",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_replacement_that(name: str, tmp_path: Path):
    stage, replacements, named = FAULTS[name]
    planted = plant_numerics(tmp_path)
    planted.review()
    planted.write("exact_numerics/replacements.py", replacements)
    assert named in failure(planted.conformance("--stage", stage), stage)


@pytest.mark.parametrize(
    ("evidence", "named"), [("return True", ""), ("return False", "shows no difference")]
)
def test_evidence_speaks_for_a_patch_that_nobody_missed(tmp_path: Path, evidence: str, named: str):
    planted = plant_numerics(tmp_path, patch='evidence="exact_numerics.evidence:differs"')
    planted.review()
    planted.write("exact_numerics/evidence.py", f"def differs():\n    {evidence}\n")
    planted.write(
        "exact_numerics/exercise.py",
        "from numerics.kernels import mean\ndef exercise(side):\n    return mean([1.0])\n",
    )
    content = planted.conformance("--stage", "ablation")
    if named:
        assert named in failure(content, "ablation")
    else:
        assert stages(content)["ablation"]["status"] == "passed"


def test_a_patch_that_nothing_runs_is_not_reached(tmp_path: Path):
    planted = plant_numerics(tmp_path)
    planted.review()
    planted.write("exact_numerics/exercise.py", "def exercise(side):\n    return 1\n")
    text = failure(planted.conformance("--stage", "reached"), "reached")
    assert "numerics.kernels:_total" in text


def test_without_an_exercise_nothing_can_be_certified(tmp_path: Path):
    planted = plant_numerics(tmp_path, adapter="after=()")
    declaration = tmp_path / "exact_numerics/__init__.py"
    text = declaration.read_text().replace(
        'exercise="exact_numerics.exercise:exercise"', "exercise=None"
    )
    declaration.write_text(text)
    planted.review()
    content = planted.conformance()
    assert not content["green"]
    for stage in ("reached", "ablation"):
        assert "exact_numerics': exercise" in failure(content, stage)


def test_an_adapter_of_a_model_must_declare_all_that_the_claim_needs(tmp_path: Path):
    planted = plant_numerics(tmp_path, adapter='logprobs="exact_numerics.exercise:exercise"')
    planted.review()
    content = planted.conformance()
    assert not content["green"]
    assert stages(content)["manifests"]["status"] == "passed"
    for stage, field in (("rows", "operators"), ("reached", "tiny_model"), ("undo", "profiles")):
        assert f"exact_numerics': {field}" in failure(content, stage)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("nobody",), "no adapter is called 'nobody'"),
        (("exact_numerics", "--profile", "x"), "has no profile 'x'"),
        (("exact_numerics", "--stage", "x"), "no stage is called 'x'"),
        (
            ("exact_numerics", "--stage", "manifests", "--certificate", "/proc/no/c.json"),
            "/proc/no",
        ),
    ],
)
def test_wrong_usage_is_named(tmp_path: Path, arguments: tuple[str, ...], named: str):
    run = plant_numerics(tmp_path).patchkit("conformance", *arguments)
    assert run.returncode == 2
    assert named in run.stderr
    assert "Traceback" not in run.stderr


def test_one_line_makes_pytest_tests_of_it(tmp_path: Path):
    planted = plant_numerics(tmp_path)
    planted.review()
    planted.write(
        "tests/test_conformance.py",
        "from patchkit.kit import adapter_suite\n\n"
        'TestConformance = adapter_suite("exact_numerics")\n',
    )
    good = pytest_in(planted)
    assert "4 passed, 2 skipped" in good, good
    planted.write("exact_numerics/replacements.py", FAULTS["does what the original does"][1])
    bad = pytest_in(planted)
    assert "1 failed, 3 passed, 2 skipped" in bad, bad
    assert "numerics.kernels:_total: nobody missed it" in bad


def pytest_in(planted: Planted) -> str:
    import os
    import subprocess
    import sys

    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        env={**os.environ, "PYTHONPATH": str(planted.folder)},
        cwd=planted.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout + run.stderr


def test_the_kit_itself_imports_nothing_heavy():
    import subprocess
    import sys

    code = "import patchkit.kit, sys; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "vllm", "transformers", "ray"} & set(run.stdout.split())
