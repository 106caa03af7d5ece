"""Faster operators: admitted after trials, named by a profile, refused otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from patchkit.engine import Adapter, Patch
from patchkit.errors import ConfigurationError
from patchkit.runtime import providers as standing
from patchkit.runtime.contract import ContractError, Machine, preflight
from patchkit.runtime.profile import load_profile
from patchkit.runtime.providers import (
    Standing,
    find_implementation,
    standing_of,
    used_implementations,
)

FAST = "patchkit.providers.fast"
QWEN3 = Path(__file__).parents[2] / "adapters" / "qwen3" / "profiles" / "cpu_tree.toml"

PACKAGE = '''
"""An implementation, planted."""
from quick.kernels import rms_norm
IMPLEMENTS = "patchkit.providers"
DEVICE = "cpu"
CASES = "quick.cases:cases"
__all__ = ["rms_norm"]
'''
KERNELS = """
from patchkit.providers.norm import rms_norm as reference

def rms_norm(x, weight, eps):
    return reference(x, weight, eps)
"""
CASES = """
import torch
from patchkit.parity.admission import AdmissionCase
from patchkit.parity.conformance import RowOperator
from patchkit.providers.norm import rms_norm as reference
from quick.kernels import rms_norm

def cases():
    generator = torch.Generator().manual_seed(0)
    operator = RowOperator(
        name="rms_norm [K=64]",
        run=lambda x, weight: rms_norm(x, weight, 1e-6),
        inputs={"x": torch.randn(33, 64, generator=generator)},
        weights={"weight": torch.randn(64, generator=generator)},
        row_counts=(1, 2, 7, 33),
    )
    yield AdmissionCase(
        name="rms_norm", operator=operator,
        reference=lambda x, weight: reference(x, weight, 1e-6)PROMISE
    )
"""


def plant(folder: Path, kernels: str = KERNELS, promise: str = "") -> Path:
    package = folder / "quick"
    package.mkdir()
    (package / "__init__.py").write_text(PACKAGE)
    (package / "kernels.py").write_text(kernels)
    (package / "cases.py").write_text(CASES.replace("PROMISE", promise))
    return package


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return plant(tmp_path)


def patchkit(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "patchkit", *arguments],
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


# --- what is read from sources -----------------------------------------------------------


def test_an_implementation_says_so_itself_and_the_reference_is_none(quick: Path):
    found = find_implementation("quick")
    assert found is not None
    assert (found.device, found.operators()) == ("cpu", ("rms_norm",))
    assert find_implementation("patchkit.providers") is None
    assert find_implementation("json") is None
    assert find_implementation("nothing_of_this_name") is None


@pytest.mark.stack
def test_what_is_not_in_a_contract_is_not_tried_and_is_said():
    import torch

    from patchkit.parity.conformance import RowOperator, examine
    from patchkit.providers import rms_norm

    def report(run: Any, **contract: Any) -> Any:
        x = torch.randn(9, 16, generator=torch.Generator().manual_seed(0))
        return examine(
            RowOperator(name="o", run=run, inputs={"x": x}, row_counts=(1, 9), **contract),
            only=("layout", "neighbours"),
        )

    def picky(x: Any) -> Any:
        if x.stride(-1) != 1:
            raise ValueError("strided")
        return rms_norm(x, torch.ones(16), 1e-6).nan_to_num(0.0)

    found = report(picky)
    assert found.failed_checks == {"layout", "neighbours"}
    rows = ("every second row", "storage offset 3")
    found = report(picky, layouts=rows, swallows_nan=True)
    assert found.passed
    assert "transposed storage" in found.skipped["layout"]
    assert found.skipped["neighbours"] == "by its contract a NaN need not show in its own row"
    assert report(picky, layouts=(), swallows_nan=True).trials.get("layout") is None
    spread = report(lambda x: x + 0 * x.sum(), spreads_nan=True)
    assert spread.passed
    assert "may show in other rows" in spread.skipped["neighbours"]
    assert "neighbours" in report(lambda x: x + x.sum(), spreads_nan=True).failed_checks
    with pytest.raises(ValueError, match="no layouts \\['sideways'\\]"):
        report(picky, layouts=("sideways",))


def test_a_class_is_an_argument_and_no_operator(quick: Path):
    text = PACKAGE.replace('["rms_norm"]', '["Options", "rms_norm"]')
    (quick / "__init__.py").write_text(text + "class Options: pass\n")
    found = find_implementation("quick")
    assert found is not None
    assert found.operators() == ("rms_norm",)


def test_what_reproduces_another_library_is_chosen_for_no_operator(quick: Path):
    (quick / "__init__.py").write_text(PACKAGE.replace('"patchkit.providers"', '"json.decoder"'))
    found = find_implementation("quick")
    assert found is not None
    assert found.operators() == ("rms_norm",)
    assert standing_of(found).operators == ()


def test_a_gpu_has_a_name_where_the_driver_shows_no_files(monkeypatch: pytest.MonkeyPatch):
    class Library:
        def nvmlInit_v2(self) -> int:
            return 0

        def nvmlShutdown(self) -> int:
            return 0

        def nvmlDeviceGetCount_v2(self, count: Any) -> int:
            count._obj.value = 3
            return 0

        def nvmlDeviceGetHandleByIndex_v2(self, number: int, device: Any) -> int:
            device._obj.value = number + 1
            return 0

        def nvmlDeviceGetName(self, device: Any, name: Any, size: int) -> int:
            name.value = b"NVIDIA H200" if device.value < 3 else b"NVIDIA L4"
            return 0

    monkeypatch.setattr(standing.ctypes, "CDLL", lambda name: Library())
    assert standing.hardware("cuda") == "NVIDIA H200 and NVIDIA L4"


def digest() -> str:
    found = find_implementation("quick")
    assert found is not None
    return found.digest


def test_the_digest_is_of_code_and_not_of_comments(quick: Path):
    before = digest()
    (quick / "kernels.py").write_text('"""Said."""\n# and noted\n' + KERNELS)
    assert digest() == before
    (quick / "kernels.py").write_text(KERNELS.replace("weight, eps)\n", "weight, 2 * eps)\n"))
    assert digest() != before


def test_the_reference_that_it_stands_in_for_is_part_of_the_digest(
    quick: Path, monkeypatch: pytest.MonkeyPatch
):
    before, read = digest(), standing.normal_digest
    norm = Path(str(standing._file("patchkit.providers.norm"))).read_text()
    rope = Path(str(standing._file("patchkit.providers.rope"))).read_text()

    def changed(source: str, text: str) -> str:
        return "changed" if source == text else read(source)

    monkeypatch.setattr(standing, "normal_digest", lambda source: changed(source, rope))
    assert digest() == before  # nothing of it is used
    monkeypatch.setattr(standing, "normal_digest", lambda source: changed(source, norm))
    assert digest() != before


def test_a_record_counts_for_its_hardware_versions_and_sources_only(
    quick: Path, monkeypatch: pytest.MonkeyPatch
):
    implementation = find_implementation("quick")
    assert implementation is not None
    assert standing_of(implementation).found == "no admission at all"
    entry = {
        "hardware": standing.hardware("cpu"),
        "versions": standing.versions_now("cpu"),
        "digest": digest(),
    }

    def record(**changes: Any) -> Standing:
        content = {"schema": 1, "admissions": [{**entry, **changes}]}
        (quick / "admissions.json").write_text(json.dumps(content))
        return standing_of(implementation)

    assert record().admitted
    for changes in ({"hardware": "another"}, {"versions": {"torch": "1.0"}}, {"digest": "0" * 64}):
        assert not record(**changes).admitted
    (quick / "admissions.json").write_text("{")
    with pytest.raises(ConfigurationError, match="write it with `patchkit admit`"):
        standing_of(implementation)


def test_imports_are_followed_to_what_a_profile_uses(quick: Path):
    mine = quick.parent / "mine"
    mine.mkdir()
    (mine / "__init__.py").touch()
    (mine / "replacements.py").write_text("from mine import helper\ndef f(x):\n    return x\n")
    (mine / "helper.py").write_text("from patchkit.providers import fast\n")

    def declared(profiles: tuple[str, ...]) -> Adapter:
        patch = Patch(
            symbol="numerics:f", action="replace", replacement="mine.replacements:f",
            reason="r", consequence="c", until="u", profiles=profiles,
        )  # fmt: skip
        return Adapter(name="toy", rollout=(patch,), default_profile="a")

    assert used_implementations(declared(("a",)), "a") == (FAST,)
    assert used_implementations(declared(("b",)), "a") == ()


@pytest.mark.parametrize(
    ("installed", "counts_as"),
    [
        ("2.14.1+cpu", "2.14"),
        ("2.14.0.post1", "2.14"),
        ("2.14.0.dev20260701+cpu", "2.14.0.dev20260701"),
        ("2.14.0rc2", "2.14.0rc2"),
    ],
)
def test_a_pre_release_is_not_what_a_record_was_made_with(
    monkeypatch: pytest.MonkeyPatch, installed: str, counts_as: str
):
    monkeypatch.setattr(standing, "installed_version", lambda package: installed)
    assert standing.versions_now("cpu") == {"torch": counts_as}


@pytest.mark.parametrize(
    ("reference", "source"),
    [
        ("mine.replacements:f", "from quick import rms_norm"),
        ("mine.replacements:f", "from quick.plain import rms_norm"),
        ("mine.replacements:f", "import quick.plain"),
        ("quick.plain:rms_norm", ""),
    ],
)
@pytest.mark.parametrize("constant", ["IMPLEMENTS =", "IMPLEMENTS: str ="])
def test_an_implementation_is_noticed_however_it_is_reached(
    quick: Path, reference: str, source: str, constant: str
):
    """In a package of its own, by a module inside of it, as a patch's replacement."""
    own = (quick / "__init__.py").read_text().replace("IMPLEMENTS =", constant)
    (quick / "__init__.py").write_text(own)
    (quick / "plain.py").write_text("def rms_norm(x, weight, eps):\n    return x\n")
    mine = quick.parent / "mine"
    mine.mkdir()
    (mine / "__init__.py").touch()
    (mine / "replacements.py").write_text(f"{source}\ndef f(x):\n    return x\n")
    patch = Patch(
        symbol="numerics:f", action="replace", replacement=reference,
        reason="r", consequence="c", until="u",
    )  # fmt: skip
    assert used_implementations(Adapter(name="toy", rollout=(patch,)), "") == ("quick",)


# --- trials ---------------------------------------------------------------------------


def refused(tmp_path: Path, kernels: str = KERNELS, promise: str = "") -> str:
    package = plant(tmp_path, kernels, promise)
    run = patchkit(tmp_path, "admit", "quick", "--write")
    assert run.returncode == 1, run.stdout + run.stderr
    assert not (package / "admissions.json").exists()
    return run.stderr


@pytest.mark.stack
def test_what_has_the_references_bits_is_admitted_and_recorded(tmp_path: Path):
    package = plant(tmp_path)
    run = patchkit(tmp_path, "admit", "quick", "--write", "--json")
    assert run.returncode == 0, run.stderr
    (entry,) = json.loads((package / "admissions.json").read_text())["admissions"]
    assert entry["operators"]["rms_norm"]["promise"] == "same bits"
    assert entry["operators"]["rms_norm"]["trials"] > 40
    assert entry["operators"]["rms_norm"]["largest_difference"] == 0.0
    assert entry["operators"]["rms_norm"]["gradients_compared"] == 2
    assert entry["operators"]["rms_norm"]["left_out"] == [
        "tensor parallel: every rank computes the whole operator"
    ]
    assert entry["hardware"] == standing.hardware("cpu")


@pytest.mark.stack
@pytest.mark.parametrize(
    ("kernels", "promise", "named"),
    [
        (KERNELS.replace("(x, weight, eps)\n", "(x, weight, eps) * (1 + 2**-20)\n"), "",
         "same bits as the reference"),
        (KERNELS.replace("    return", "    x = x * (1 + 2**-20 * (len(x) == 1))\n    return"), "",
         "batch size"),
        (KERNELS.replace("eps)\n", "eps) * 1.5\n"), ', promise="same guarantees", within=0.01',
         "is further from the reference than promised"),
        (KERNELS.replace("reference(x", "reference(x.detach() + (x - x.detach()) * 2"), "",
         "has another gradient"),
        (KERNELS.replace("eps)\n", "eps) + (x - x.detach()) * float('inf')\n"), "",
         "gradient"),
    ],
    ids=["bits", "rows", "distance", "gradient", "finite"],
)  # fmt: skip
def test_what_differs_is_refused_and_nothing_is_recorded(
    tmp_path: Path, kernels: str, promise: str, named: str
):
    assert named in refused(tmp_path, kernels, promise)


GUARANTEES = ', promise="same guarantees", within=0.01'


@pytest.mark.stack
@pytest.mark.parametrize(
    ("kernels", "promise", "named"),
    [
        (KERNELS.replace("eps)\n", "eps) * float('nan')\n"), GUARANTEES,
         "is further from the reference than promised"),
        (KERNELS.replace("eps)\n", "eps).detach()\n"), "", "has no gradient"),
        (KERNELS, ", gradients=lambda x, weight: 2 * reference(x, weight, 1e-6)",
         "has another gradient"),
        (KERNELS, ", gradients=lambda x, weight: 1 // 0", "cannot be compared"),
        (KERNELS, ")\n    raise OSError('no kernel'", "quick.cases:cases: a case cannot be built"),
    ],
    ids=["nan", "no gradient", "other gradients", "raises", "unbuilt"],
)  # fmt: skip
def test_what_shows_nothing_is_refused(tmp_path: Path, kernels: str, promise: str, named: str):
    """A NaN is below no bound, a gradient that is missing differs in nothing."""
    assert named in refused(tmp_path, kernels, promise)


@pytest.mark.stack
def test_a_case_that_raises_does_not_hide_the_others(tmp_path: Path):
    kernels = KERNELS.replace("(x, weight, eps)\n", "(x, weight, eps) * (1 + 2**-20)\n")
    package = plant(tmp_path, kernels)
    broken = "AdmissionCase(name='rms_norm', operator=operator, reference=lambda **_: 1 // 0)"
    text = (package / "cases.py").read_text()
    text = text.replace("    yield", f"    yield {broken}\n    yield")
    (package / "cases.py").write_text(text)
    run = patchkit(tmp_path, "admit", "quick")
    assert run.returncode == 1
    assert "cannot be tried" in run.stderr
    assert "same bits as the reference" in run.stderr
    assert run.stderr.count("FAILED, the first") == 2


@pytest.mark.stack
def test_a_promise_of_guarantees_allows_other_bits_within_a_distance(tmp_path: Path):
    kernels = KERNELS.replace("(x, weight, eps)\n", "(x, weight, eps) * (1 + 2**-20)\n")
    plant(tmp_path, kernels, ', promise="same guarantees", within=1e-5')
    run = patchkit(tmp_path, "admit", "quick", "--json")
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout)["operators"]["rms_norm"]
    assert 0 < seen["largest_difference"] < 1e-5


@pytest.mark.stack
def test_an_operator_that_no_case_tries_is_refused(tmp_path: Path):
    package = plant(tmp_path)
    text = PACKAGE.replace('["rms_norm"]', '["rms_norm", "linear"]')
    (package / "__init__.py").write_text(text)
    run = patchkit(tmp_path, "admit", "quick")
    assert run.returncode == 1
    assert "quick:linear: no case tries it" in run.stderr


@pytest.mark.stack
@pytest.mark.parametrize("names", ['[*("rms_norm",)]', '["rms_norm"]\n__all__ += ["linear"]', "[]"])
def test_operators_that_cannot_be_read_are_not_taken_for_none(tmp_path: Path, names: str):
    """What is exported and not named is not missed by any trial."""
    package = plant(tmp_path)
    (package / "__init__.py").write_text(PACKAGE.replace('["rms_norm"]', names))
    (package / "cases.py").write_text("def cases():\n    return iter(())\n")
    run = patchkit(tmp_path, "admit", "quick")
    assert run.returncode == 1
    assert "names no operator" in run.stderr


@pytest.mark.stack
def test_a_package_is_tried_before_it_says_what_it_is(tmp_path: Path):
    package = plant(tmp_path)
    (package / "__init__.py").write_text(PACKAGE.replace("CASES =", "LATER ="))
    assert patchkit(tmp_path, "admit", "quick").returncode == 2
    run = patchkit(tmp_path, "admit", "quick", "--cases", "quick.cases:cases")
    assert run.returncode == 0, run.stderr
    assert "rms_norm [K=64]" in run.stderr and "passed" in run.stderr
    run = patchkit(tmp_path, "admit", "quick", "--cases", "quick.cases:cases", "--write")
    assert run.returncode == 2
    assert "there is nothing to record" in run.stderr
    assert not (package / "admissions.json").exists()


@pytest.mark.parametrize("module", ["json", "nothing_of_this_name", "patchkit.providers"])
def test_what_is_no_implementation_is_named(tmp_path: Path, module: str):
    run = patchkit(tmp_path, "admit", module)
    assert run.returncode == 2
    assert f"{module} is no implementation of operators" in run.stderr


@pytest.mark.stack
def test_the_fast_providers_pass_here():
    """On whatever machine this runs; the committed record is of the machines it names."""
    from patchkit.parity.admission import admit

    admission = admit(FAST)
    assert admission["operators"]["selected_token_logprobs"]["largest_difference"] == 0.0
    assert admission["operators"]["selected_token_logprobs"]["trials"] > 400
    record = find_implementation(FAST)
    assert record is not None
    assert standing.load_record(record.record)


# --- profiles and contracts --------------------------------------------------------------


def machine(**changes: Any) -> Machine:
    profile = load_profile(QWEN3)
    packages = {"vllm": "0.32.0", "torch": "2.13.0", "transformers": "5.19.0"}
    assert set(profile.content.packages) == set(packages)
    return Machine(
        packages=packages,
        adapters=("qwen3",),
        model_config={"architectures": ["Qwen3ForCausalLM"]},
        known_fields=("0.32.0",),
        **changes,
    )


def contract(tmp_path: Path, allow: tuple[str, ...], use: dict[str, str], **settings: Any) -> Any:
    accept = settings.pop("accept_providers", {})
    profile = load_profile(QWEN3).changed(**{"providers.allow": list(allow), "providers.use": use})
    return preflight(
        profile,
        machine(**settings),
        opt_in=True,
        run_dir=tmp_path / "run",
        accept_providers=accept,
        covers=lambda config, rollout_tensor: [],
    )


GOOD = Standing(digest="d" * 64, operators=("linear",))
BAD = replace(GOOD, expected="this GPU", found="no admission at all")


def test_an_admitted_implementation_is_in_every_process(tmp_path: Path):
    made = contract(tmp_path, ("quick",), {"linear": "quick"}, standings={"quick": GOOD})
    assert json.loads(made.environment.variables["PATCHKIT_PROVIDERS"]) == {"linear": "quick"}
    assert "unadmitted" not in made.content


def test_without_choice_none_is_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An implementation that nobody allowed here would run, and every process would agree."""
    monkeypatch.setenv("PATCHKIT_PROVIDERS", '{"linear": "quick"}')
    monkeypatch.setenv("PATCHKIT_ACCEPT", '{"m:f": "0"}')
    given = contract(tmp_path, (), {}).environment.for_child()
    assert (given["PATCHKIT_PROVIDERS"], given["PATCHKIT_ACCEPT"]) == ("", "")


@pytest.mark.parametrize(
    ("settings", "allow", "use", "named"),
    [
        ({"used_providers": ("quick",)}, (), {}, "quick is used and not allowed"),
        ({}, (), {"linear": "quick"}, "quick is used and not allowed"),
        ({"standings": {"quick": BAD}}, ("quick",), {}, "quick is not admitted here"),
        ({"standings": {"quick": None}}, ("quick",), {}, "quick is no implementation"),
        ({"standings": {"quick": GOOD}}, ("quick",), {"lineal": "quick"}, "has no such operator"),
        (
            {"standings": {"quick": BAD}, "accept_providers": {"quick": "e" * 64}},
            ("quick",), {}, "accepted unadmitted, which does not fit",
        ),
        (
            {"standings": {"quick": GOOD}, "accept_providers": {"quick": "d" * 64}},
            ("quick",), {}, "and it is admitted",
        ),
    ],
)  # fmt: skip
def test_what_a_profile_does_not_name_or_nobody_admitted_is_refused(
    tmp_path: Path, settings: dict, allow: tuple[str, ...], use: dict[str, str], named: str
):
    with pytest.raises(ContractError) as caught:
        contract(tmp_path, allow, use, **settings)
    assert named in str(caught.value)
    assert all(all(v.as_dict().values()) for v in caught.value.violations)


def test_the_refusal_says_how_to_admit_and_how_to_accept(tmp_path: Path):
    with pytest.raises(ContractError) as caught:
        contract(tmp_path, ("quick",), {}, standings={"quick": BAD})
    assert "patchkit admit quick --write" in str(caught.value)
    assert f"quick={'d' * 64}" in str(caught.value)


def test_what_was_accepted_stands_in_the_contract_and_in_the_artifact(tmp_path: Path):
    from patchkit.runtime.artifact import Artifact

    made = contract(
        tmp_path, ("quick",), {}, standings={"quick": BAD}, accept_providers={"quick": "d" * 64}
    )
    assert made.content["unadmitted"] == {"quick": "d" * 64}
    path = Artifact(made.as_dict()).write(tmp_path / "artifact.json")
    assert json.loads(path.read_text())["unreviewed"] == ["provider quick"]


# --- the choice -------------------------------------------------------------------------

ASK = "import patchkit.providers as p; print(p.selected_token_logprobs.__module__)"


def chosen(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ASK],
        env={**os.environ, "PYTHONPATH": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.stack
@pytest.mark.parametrize(
    ("value", "printed", "error"),
    [
        ("", "patchkit.providers.logprobs", ""),
        (json.dumps({"selected_token_logprobs": FAST}), f"{FAST}.logprobs", ""),
        (json.dumps({"selected": FAST}), "", "there is no operator 'selected'"),
        (json.dumps({"linear": FAST}), "", f"{FAST} has no 'linear'"),
        ("[1]", "", "expected a JSON object"),
        ('{"linear": "no_such_package"}', "", "'no_such_package' cannot be imported"),
        ('{"linear": ".relative"}', "", "'.relative' cannot be imported"),
    ],
)
def test_a_process_has_what_its_contract_chose(
    tmp_path: Path, value: str, printed: str, error: str
):
    run = chosen(tmp_path, PATCHKIT_PROVIDERS=value)
    assert run.stdout.strip() == printed
    assert error in run.stderr
    assert bool(run.returncode) == bool(error)
