"""Which all-to-all backend an engine has: named, compared or accepted, and else refused."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import evidence
from profiles import machine, profile, text
from test_artifact import reseal, set_to
from test_engine_gate import GOOD, Engine

from patchkit.runtime import all2all
from patchkit.runtime.artifact import Artifact, ArtifactError, verify_artifact
from patchkit.runtime.contract import Contract, ContractError, preflight
from patchkit.runtime.engine_gate import EngineRefusedError, check_settings, require_engine
from patchkit.runtime.profile import Profile, ProfileError, parse_profile

DEFAULT = all2all.DEFAULT
DIGEST = "d" * 64

# Every name that a version of vLLM up to 0.33 knows, spellings that none does, and whose
# kernels the message has to name.
REFUSED = {
    "deepep_high_throughput": "DeepEP",
    "deepep_low_latency": "DeepEP",
    "deepep_v2": "DeepEP",
    "DeepEP-Low-Latency": "DeepEP",
    "deep_ep": "DeepEP",
    "deepep_v3_of_tomorrow": "DeepEP",
    "pplx": "pplx-kernels",
    "naive": "broadcast",
    "mori": "MoRI",
    "mori_high_throughput": "MoRI",
    "mori_low_latency": "MoRI",
    "moonep": "MoonEP",
    "nixl_ep": "NIXL",
    "flashinfer_all2allv": "FlashInfer",
    "flashinfer_nvlink_one_sided": "FlashInfer",
    "flashinfer_nvlink_two_sided": "FlashInfer",
    "passthrough": "by itself",
    "something_new": "something_new",
    "AllGather_ReduceScatter": "AllGather_ReduceScatter",
}
MOE = {"architectures": ["ToyForCausalLM"], "num_experts": 8}
DENSE = {"architectures": ["ToyForCausalLM"]}


def with_backend(backend: str | None, **topology: int) -> Profile:
    """The toy profile with a backend in its own line, and another rollout topology."""
    toml = text(**{f"topology_rollout__{k}": str(v) for k, v in topology.items()})
    if backend is not None:
        moe = 'moe_backend = "auto"'
        toml = toml.replace(moe, f'{moe}\nall2all_backend = "{backend}"')
    return parse_profile(toml, source="toy.toml")


def check(p: Profile, *, config: dict = MOE, accept: dict | None = None, **facts) -> Contract:
    facts = {"model_config": config, "all2all_digest": DIGEST, **facts}
    return preflight(
        p,
        machine(**facts),
        opt_in=True,
        run_dir="/tmp/never-there",
        covers=lambda config, rollout_tensor: (),
        accept_all2all=accept,
    )


def refusal(*args, **kwargs):
    """The only violation, and complete."""
    with pytest.raises(ContractError) as caught:
        check(*args, **kwargs)
    (v,) = caught.value.violations
    assert all(v.as_dict().values())
    return v


# --- the profile -------------------------------------------------------------------------


def test_a_profile_that_does_not_name_it_means_the_default():
    unnamed, said = with_backend(None), with_backend(DEFAULT)
    assert unnamed.content.engine.all2all_backend == DEFAULT
    assert "all2all_backend" not in unnamed.as_dict()["engine"]
    assert unnamed.digest == said.digest == profile().digest
    assert unnamed.engine_arguments("m")["all2all_backend"] == DEFAULT


def test_another_backend_reaches_the_engine_and_the_digest():
    p = with_backend("deepep_v2")
    assert p.engine_arguments("m")["all2all_backend"] == "deepep_v2"
    assert p.as_dict()["engine"]["all2all_backend"] == "deepep_v2"
    assert p.digest != profile().digest
    assert p.changed(**{"engine.max_num_seqs": 4}).content.engine.all2all_backend == "deepep_v2"
    assert p.changed(**{"engine.all2all_backend": DEFAULT}).digest == profile().digest


def test_an_empty_name_is_none():
    with pytest.raises(ProfileError, match=r"toy.toml:\d+ engine.all2all_backend"):
        with_backend("")


# --- before anything starts --------------------------------------------------------------


@pytest.mark.parametrize("expert", [1, 2])
@pytest.mark.parametrize("backend", REFUSED)
def test_what_was_never_compared_is_refused_by_name(backend, expert):
    p = with_backend(backend, expert=expert)
    v = refusal(p)
    line = 1 + p_lines(backend).index(f'all2all_backend = "{backend}"')
    assert v.subject == f"toy.toml:{line} engine.all2all_backend"
    assert f"all-to-all backend {backend}" in v.problem
    assert REFUSED[backend] in v.problem
    assert "no run with it exists whose bits were compared" in v.problem
    assert (v.expected, v.found) == (DEFAULT, backend)
    assert f'all2all_backend = "{DEFAULT}"' in v.remedy
    assert "patchkit.runtime.all2all.COMPARED" in v.remedy
    assert f"--accept-all2all {backend}={DIGEST}" in v.remedy
    assert "every output says so" in v.remedy


def p_lines(backend: str) -> list[str]:
    moe = 'moe_backend = "auto"'
    return text().replace(moe, f'{moe}\nall2all_backend = "{backend}"').splitlines()


def test_without_its_sources_nothing_can_be_accepted():
    v = refusal(with_backend("deepep_v2"), all2all_digest=None)
    assert "cannot be accepted for one run here" in v.remedy
    with pytest.raises(ContractError, match="does not fit"):
        check(with_backend("deepep_v2"), accept={"deepep_v2": "None"}, all2all_digest=None)


@pytest.mark.parametrize("other", ["deepep_low_latency", "naive", "", "nixl_ep"])
@pytest.mark.parametrize("place", ["process", "profile"])
def test_the_variable_of_early_versions_may_not_say_another(other, place):
    if place == "process":
        found = {"OMP_NUM_THREADS": "1", all2all.VARIABLE: other}
        v = refusal(profile(), environment=found)
    else:
        p = parse_profile(text() + f'\n{all2all.VARIABLE} = "{other}"\n', source="toy.toml")
        v = refusal(p)
        assert "toy.toml:" in v.subject
    assert all2all.VARIABLE in v.subject
    assert other in v.problem
    assert "no run with it exists" in v.problem
    assert v.found == repr(other)
    assert f"take {all2all.VARIABLE} out" in v.remedy


def test_a_compared_backend_in_the_variable_contradicts_an_accepted_one():
    v = refusal(
        with_backend("deepep_v2"),
        accept={"deepep_v2": DIGEST},
        environment={"OMP_NUM_THREADS": "1", all2all.VARIABLE: DEFAULT},
    )
    assert v.found == repr(DEFAULT)
    assert "versions up to 0.14 obey it" in v.problem


def test_the_variable_may_say_the_same():
    check(profile(), environment={"OMP_NUM_THREADS": "1", all2all.VARIABLE: DEFAULT})


@pytest.mark.parametrize(
    ("topology", "config", "is_entered"),
    [
        ({}, MOE, False),
        ({"expert": 2}, MOE, False),
        ({"data": 2}, DENSE, False),
        ({"data": 2}, MOE, True),
        ({"data": 2}, {**DENSE, "text_config": {"n_routed_experts": 8}}, True),
        ({"data": 2}, {**DENSE, "num_experts": 0}, False),
        ({"data": 2, "expert": 4}, MOE, True),
        ({"data": 2, "expert": 4}, DENSE, True),
    ],
)
def test_entering_the_default_was_not_compared_either(topology, config, is_entered):
    p = with_backend(None, **topology)
    assert all2all.entered(p.content, config) is is_entered
    if not is_entered:
        made = check(p, config=config)
        assert ("all2all_backend" in made.content) is ("expert" in topology)
        return
    v = refusal(p, config=config)
    assert "those had data_parallel_size 1, where vLLM enters none" in v.problem
    assert v.expected == f"{DEFAULT}, with data = 1"
    assert "data = 1 in [topology.rollout]" in v.remedy
    made = check(p, config=config, accept={DEFAULT: DIGEST})
    assert made.content["uncompared"] == {DEFAULT: DIGEST}
    assert made.content["all2all_backend"] == DEFAULT


# --- contract and artifact ---------------------------------------------------------------


def test_a_contract_with_expert_parallelism_names_its_backend():
    made = check(with_backend(None, expert=2))
    assert made.content["all2all_backend"] == DEFAULT
    assert made.as_dict()["all2all_backend"] == DEFAULT
    assert made.accepted_all2all == {}


def test_a_contract_without_it_is_what_it_was():
    made = check(profile())
    assert sorted(made.content) == ["model_config", "packages", "profile", "unreviewed"]


@pytest.mark.parametrize(
    ("backend", "accept", "expected"),
    [
        ("deepep_v2", {"deepep_v2": "e" * 64}, f"deepep_v2={DIGEST}"),
        ("deepep_v2", {"deepep_v2": DIGEST, "nixl_ep": DIGEST}, f"deepep_v2={DIGEST}"),
        (None, {"deepep_v2": DIGEST}, f"nothing: {DEFAULT} needs no exception"),
        (None, {DEFAULT: DIGEST}, f"nothing: {DEFAULT} needs no exception"),
    ],
)
def test_an_acceptance_that_does_not_fit_is_refused(backend, accept, expected):
    v = refusal(with_backend(backend), accept=accept)
    assert "is accepted unreviewed, which does not fit" in v.problem
    assert v.expected == expected


def accepted_contract() -> Contract:
    return check(with_backend("deepep_v2", expert=2), accept={"deepep_v2": DIGEST})


def artifact(tmp_path: Path) -> Path:
    return Artifact(accepted_contract().as_dict()).write(tmp_path / "run.json")


def test_what_was_accepted_stands_in_every_output(tmp_path):
    made = accepted_contract()
    assert made.content["uncompared"] == made.accepted_all2all == {"deepep_v2": DIGEST}
    assert made.content["all2all_backend"] == "deepep_v2"
    document = json.loads(artifact(tmp_path).read_text())
    assert document["unreviewed"] == ["all-to-all backend deepep_v2"]
    assert "UNREVIEWED" in document["verdict"]
    assert document["contract"]["content"]["all2all_backend"] == "deepep_v2"
    found = verify_artifact(tmp_path / "run.json")
    assert found.unreviewed == ("all-to-all backend deepep_v2",)


def test_the_demo_passes_it_on(monkeypatch, tmp_path):
    from typer.testing import CliRunner

    from patchkit.cli.demo import app
    from patchkit.parity import demo_setup

    asked = []
    monkeypatch.setattr(demo_setup, "make_tiny_checkpoint", lambda *args, **kwargs: None)
    monkeypatch.setattr(demo_setup, "observe", lambda profile, model: machine())

    def refuse(profile, machine, **options):
        asked.append(options["accept_all2all"])
        raise ContractError("refused", [])

    monkeypatch.setattr(demo_setup, "preflight", refuse)
    options = ["--runs", str(tmp_path), "--accept-all2all", f"deepep_v2={DIGEST}"]
    assert CliRunner().invoke(app, options).exit_code == 2
    assert asked == [{"deepep_v2": DIGEST}]


def test_an_artifact_that_hides_it_is_refused(tmp_path):
    path = artifact(tmp_path)
    reseal(path, set_to([], "unreviewed"))
    with pytest.raises(ArtifactError, match="all-to-all backend deepep_v2"):
        verify_artifact(path)


@pytest.mark.parametrize("key", ["all2all_backend", "uncompared"])
def test_an_artifact_whose_contract_contradicts_itself_is_refused(tmp_path, key):
    content = accepted_contract().as_dict()
    content[key] = "nixl_ep" if key == "all2all_backend" else {"nixl_ep": DIGEST}
    path = Artifact(content).write(tmp_path / "run.json")
    with pytest.raises(ArtifactError, match=f"contract, {key}: not the profile's backend"):
        verify_artifact(path)


def test_runs_of_an_expert_parallel_contract_name_it_in_their_report(tmp_path):
    from patchkit.runtime.report import write_report

    content = {**evidence.CONTRACT, "all2all_backend": DEFAULT}
    path = evidence.build(contract=content).write(tmp_path / "run.json")
    assert verify_artifact(path).exact
    write_report(path, tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    assert f"all-to-all backend <code>{DEFAULT}</code>" in page
    write_report(evidence.write(tmp_path, "other.json"), tmp_path / "other.html")
    assert "all-to-all" not in (tmp_path / "other.html").read_text()


# --- the engine that was built -----------------------------------------------------------


def settings(backend: object) -> dict:
    return {**GOOD, all2all.SETTING: backend}


@pytest.mark.parametrize("backend", REFUSED)
def test_an_engine_that_runs_with_it_anyway_is_refused_by_name(backend):
    with pytest.raises(EngineRefusedError) as caught:
        require_engine(Engine(GOOD, GOOD, settings(backend)), profile())
    (v,) = caught.value.violations
    assert v.subject.startswith("worker 1: parallel_config.all2all_backend (toy.toml")
    assert f"all-to-all backend {backend}" in v.problem
    assert REFUSED[backend] in v.problem
    assert "no run with it exists whose bits were compared" in v.problem
    assert (v.expected, v.found) == (repr(DEFAULT), repr(backend))
    assert all2all.VARIABLE in v.remedy
    assert "how to accept it for one run" in v.remedy


@pytest.mark.parametrize("backend", ["deepep_low_latency", "nixl_ep"])
def test_that_a_profile_names_it_is_no_acceptance(backend):
    p = with_backend(backend)
    (v,) = check_settings(settings(backend), p)
    assert f"all-to-all backend {backend}" in v.problem
    assert "Contract.accepted_all2all" in v.remedy
    assert check_settings(settings(backend), p, accept_all2all={"other": DIGEST}) == [v]
    assert check_settings(settings(backend), p, accept_all2all={backend: DIGEST}) == []


def test_accepted_is_one_backend_in_every_process():
    p, accept = with_backend("deepep_v2"), {"deepep_v2": DIGEST}
    own, other = settings("deepep_v2"), settings("deepep_high_throughput")
    assert require_engine(Engine(own, own, own), p, accept_all2all=accept)
    with pytest.raises(EngineRefusedError, match=r"worker 0: .*deepep_high_throughput"):
        require_engine(Engine(own, other, own), p, accept_all2all=accept)


def test_a_name_that_vllm_replaced_is_not_the_one_that_was_accepted():
    """Versions from 0.20 on run "naive" and "pplx" as the default, after a warning."""
    (v,) = check_settings(settings(DEFAULT), with_backend("pplx"), accept_all2all={"pplx": DIGEST})
    assert "another way than the profile says" in v.problem
    assert (v.expected, v.found) == ("'pplx'", repr(DEFAULT))


# --- what an acceptance holds for --------------------------------------------------------

FILES = {
    "distributed/device_communicators/all2all.py": "class Manager:\n    pass\n",
    "model_executor/layers/fused_moe/all2all_utils.py": "def make():\n    return 1\n",
    "model_executor/layers/fused_moe/prepare_finalize/deepep_ht.py": "X = 1\n",
}


@pytest.fixture
def fake_vllm(tmp_path, monkeypatch):
    for name, source in {"__init__.py": "raise RuntimeError('imported')\n", **FILES}.items():
        file = tmp_path / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return tmp_path / "vllm"


@pytest.mark.parametrize("name", FILES)
def test_the_digest_is_that_of_the_code(fake_vllm, name):
    before = all2all.sources_digest("deepep_v2")
    assert before == all2all.sources_digest("deepep_v2")
    assert before != all2all.sources_digest("deepep_high_throughput")
    file = fake_vllm / name
    file.write_text(f"# a comment\n{file.read_text()}")
    assert all2all.sources_digest("deepep_v2") == before
    file.write_text(file.read_text() + "Y = 2\n")
    assert all2all.sources_digest("deepep_v2") != before
    file.unlink()
    assert all2all.sources_digest("deepep_v2") is None


def test_the_digest_covers_the_version_of_the_kernels(fake_vllm):
    before = all2all.sources_digest("deepep_v2")
    made = {}
    for version in ("1.0", "1.1"):
        (fake_vllm.parent / "deep_ep").mkdir(exist_ok=True)
        (fake_vllm.parent / "deep_ep/__init__.py").touch()
        info = fake_vllm.parent / f"deep_ep-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: deep_ep\nVersion: {version}\n")
        (info / "top_level.txt").write_text("deep_ep\n")
        importlib.invalidate_caches()
        made[version] = all2all.sources_digest("deepep_v2")
        for file in info.iterdir():
            file.unlink()
        info.rmdir()
    assert len({before, *made.values()}) == 3


@pytest.mark.stack
def test_the_installed_vllm_has_the_sources():
    pytest.importorskip("vllm")
    digests = {all2all.sources_digest(name) for name in (DEFAULT, "deepep_v2")}
    assert None not in digests
    assert len(digests) == 2
