"""Preflight reports everything, before anything is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from profiles import machine, profile, text

from patchkit.errors import ConfigurationError, Violation
from patchkit.runtime.attestation import read_attestations
from patchkit.runtime.contract import Contract, ContractError, observe, preflight
from patchkit.runtime.environment import Environment, LateEnvironmentError
from patchkit.symbols import installed_version

ROOT = Path(__file__).parents[2]


def covers(config, *, rollout_tensor):
    if config.get("tie_word_embeddings"):
        yield Violation(subject="tie_word_embeddings", problem="not covered")


def check(p=None, m=None, *, opt_in=True, folder="/tmp/never-there", **kwargs) -> Contract:
    return preflight(
        p or profile(), m or machine(), opt_in=opt_in, run_dir=folder, covers=covers, **kwargs
    )


def test_a_valid_contract():
    contract = check()
    assert contract.on_policy
    assert contract.digest == check().digest
    variables = contract.environment.variables
    assert variables["PATCHKIT_CONTRACT_DIGEST"] == contract.digest
    assert variables["PATCHKIT_ENABLE"] == "1"
    assert variables["OMP_NUM_THREADS"] == "1"
    assert "PATCHKIT_RUN_DIR" not in contract.environment.compared


def test_a_process_attests_every_variable_that_the_profile_names(tmp_path):
    p = profile().changed(environment={"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "avx2"})
    given = check(p, folder=tmp_path).environment
    code = "from patchkit.runtime.attestation import attest; attest(role='trainer', rank=0)"
    subprocess.run([sys.executable, "-c", code], env=given.for_child(), check=True)
    (told,) = read_attestations(tmp_path)
    assert {k: told.environment.get(k) for k in given.compared} == given.compared
    assert told.packages == {k: installed_version(k) for k in told.packages}
    assert set(told.packages) <= set(json.loads(given.variables["PATCHKIT_PACKAGES"]))


@pytest.mark.parametrize(
    "other",
    [
        lambda: check(profile(engine__max_num_seqs="4")),
        lambda: check(m=machine(model_config={"architectures": ["ToyForCausalLM"], "x": 1})),
        lambda: check(accept={"m:f": "abc"}),
    ],
)
def test_the_digest_covers_profile_versions_model_and_acceptances(other):
    assert other().digest != check().digest


def test_the_digest_does_not_cover_places():
    assert check(folder="/tmp/elsewhere").digest == check().digest


CASES = [
    ({}, {}, {"opt_in": False}, "nobody asked for it"),
    ({}, {"adapters": ("other",)}, {}, "no such adapter"),
    (
        {},
        {"model_config": {"architectures": ["ToyForCausalLM"], "tie_word_embeddings": True}},
        {},
        "tie_word_embeddings: not covered",
    ),
    ({}, {"model_config": None}, {}, "no config.json"),
    ({}, {"model_config": {"architectures": ["MambaForCausalLM"]}}, {}, "another model"),
    (
        {},
        {
            "model_config": {
                "architectures": ["ToyForCausalLM"],
                "quantization_config": {"quant_method": "fp8"},
            }
        },
        {},
        "the checkpoint is quantised",
    ),
    ({"packages__torch": '"==2.11.*"'}, {}, {}, "another version is installed"),
    (
        {},
        {"packages": {"vllm": "0.32.0", "torch": "2.13.0", "transformers": None}},
        {},
        "not installed",
    ),
    ({}, {"known_fields": ("0.26.0",)}, {}, "request fields of vLLM"),
    ({"topology_rollout__pipeline": "2"}, {}, {}, "not certified"),
    ({"topology_rollout__context": "2"}, {}, {}, "not certified"),
    ({"topology_trainer__tensor": "2"}, {}, {}, "not certified"),
    ({"topology_rollout__expert": "3"}, {}, {}, "no such expert-parallel group"),
    ({}, {"devices": 1}, {}, "more ranks than accelerators"),
    ({"sampling__policy": '"greedy_smoke"'}, {}, {}, 'does not go with the claim "on_policy"'),
    ({"weights__receipts": '"log"'}, {}, {}, "loaded weights are not proven"),
    ({"engine__cascade_attention": "true"}, {}, {}, "reduced in another order"),
    ({"engine__async_scheduling": "true"}, {}, {}, "engine.async_scheduling: not certified"),
    ({"engine__cuda_graphs": '"full"'}, {}, {}, "contradicts"),
    ({"profile__claim": '"in_flight"'}, {}, {}, "a reset throws away"),
    ({}, {"loaded": ("torch",), "environment": {}}, {}, "OMP_NUM_THREADS would be set after torch"),
    ({}, {"ray_connected": True, "environment": {}}, {}, "after this process connected to Ray"),
]


@pytest.mark.parametrize(("changes", "facts", "options", "words"), CASES, ids=[c[3] for c in CASES])
def test_each_violation(changes, facts, options, words):
    with pytest.raises(ContractError) as e:
        check(profile(**changes), machine(**facts), **options)
    assert any(words in str(v) for v in e.value.violations), str(e.value)
    assert all(
        v.expected and v.found and v.remedy for v in e.value.violations if "covered" not in str(v)
    )
    if changes:
        assert "toy.toml:" in str(e.value)


def test_twenty_violations_are_twenty(tmp_path):
    (tmp_path / "worker-0-1.json").write_text("{}")
    wrong = profile(
        packages__torch='"==2.11.*"',
        packages__vllm='"==0.31.0"',
        packages__transformers='"==4.*"',
        topology_rollout__pipeline="2",
        topology_rollout__context="2",
        topology_rollout__expert="3",
        topology_trainer__pipeline="2",
        topology_trainer__context="2",
        topology_trainer__expert="5",
        topology_trainer__tensor="2",
        sampling__policy='"greedy_smoke"',
        weights__receipts='"off"',
        engine__cascade_attention="true",
        engine__async_scheduling="true",
        engine__cuda_graphs='"full"',
    )
    bad = machine(
        adapters=(),
        model_config={"architectures": ["Other"], "quantization_config": {"quant_method": "awq"}},
        known_fields=(),
    )
    with pytest.raises(ContractError) as e:
        check(wrong, bad, opt_in=False, folder=tmp_path)
    subjects = [str(v) for v in e.value.violations]
    assert len(subjects) == len(set(subjects)) == 21, str(e.value)
    assert "21 violations" in str(e.value)
    assert "nothing started" in str(e.value)


def test_a_run_folder_is_used_once(tmp_path):
    check(folder=tmp_path)
    (tmp_path / "x").write_text("")
    with pytest.raises(ContractError, match="an earlier start"):
        check(folder=tmp_path)
    with pytest.raises(ContractError, match="a file"):
        check(folder=tmp_path / "x")


def test_only_one_claim_is_on_policy():
    greedy = check(profile(profile__claim='"greedy_smoke"', sampling__policy='"greedy_smoke"'))
    flying = check(profile(profile__claim='"in_flight"', weights__caches='"salt"'))
    assert not greedy.on_policy
    assert not flying.on_policy


def test_written_for_later(tmp_path):
    contract = check()
    data = json.loads(contract.write(tmp_path).read_text())
    assert data["digest"] == contract.digest
    assert data["content"]["profile"]["profile"]["name"] == "toy_cpu"


# -- the environment ----------------------------------------------------------------------


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


APPLY = """
import sys
{before}
from patchkit.runtime.environment import Environment
Environment({{"OMP_NUM_THREADS": "1", "PATCHKIT_X": "y"}}).apply()
import os; print(os.environ["OMP_NUM_THREADS"], os.environ["PATCHKIT_X"])
"""


def test_applied_in_time():
    done = run(APPLY.format(before=""))
    assert done.stdout.split() == ["1", "y"], done.stderr


def test_too_late_is_an_error_that_names_who_read_it():
    done = run(
        APPLY.format(before="import types; sys.modules['torch'] = types.ModuleType('torch')")
    )
    assert "LateEnvironmentError" in done.stderr
    assert "torch imported before it was set" in done.stderr


def test_late_but_equal_is_fine():
    code = APPLY.format(before="import types; sys.modules['torch'] = types.ModuleType('torch')")
    assert run(code, OMP_NUM_THREADS="1").returncode == 0


def test_late_in_this_process(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", sys)
    monkeypatch.delenv("SOME_VARIABLE", raising=False)
    with pytest.raises(LateEnvironmentError, match="SOME_VARIABLE"):
        Environment({"SOME_VARIABLE": "1"}).apply()


def test_children_get_it(monkeypatch):
    monkeypatch.delenv("PATCHKIT_SOME", raising=False)
    environment = Environment({"PATCHKIT_SOME": "1"})
    assert environment.for_child()["PATCHKIT_SOME"] == "1"
    assert environment.ray_runtime_env() == {"env_vars": {"PATCHKIT_SOME": "1"}}
    with environment.spawning():
        assert os.environ["PATCHKIT_SOME"] == "1"
    assert "PATCHKIT_SOME" not in os.environ
    assert environment.differing({"PATCHKIT_SOME": "2"}) == {"PATCHKIT_SOME": "2"}


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]", b"[" * 99999])
def test_a_damaged_config_json_is_named(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"config\.json: "):
        observe(profile(), tmp_path)


def test_validating_starts_and_imports_nothing(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["ToyForCausalLM"]}')
    (tmp_path / "p.toml").write_text(text())
    done = run(
        "import sys\n"
        "from patchkit.runtime.contract import observe, preflight\n"
        "from patchkit.runtime.profile import load_profile\n"
        f"p = load_profile({str(tmp_path / 'p.toml')!r})\n"
        f"m = observe(p, {str(tmp_path)!r})\n"
        "try: preflight(p, m, run_dir='/tmp/never-there')\n"
        "except Exception as e: print(type(e).__name__, len(e.violations))\n"
        "print(sorted({'torch', 'vllm', 'ray', 'transformers'} & set(sys.modules)))"
    )
    assert done.stdout.splitlines()[0].startswith("ContractError"), done.stderr
    assert done.stdout.splitlines()[1] == "[]"
