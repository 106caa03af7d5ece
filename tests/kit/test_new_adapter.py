"""A skeleton is complete where bindings cover the model, and closed where they do not."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="reads the sources of both libraries")

from patchkit.errors import PatchkitError
from patchkit.kit import (
    Look,
    SkeletonRefusedError,
    UnknownModelError,
    check_place,
    look_at,
    write_skeleton,
)
from patchkit.kit import _skeleton as skeleton

pytestmark = pytest.mark.stack

QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA = {**QWEN2, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
GEMMA2 = {
    **QWEN2,
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
}
QWEN3_MOE = {
    **QWEN2,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GLM4_MOE = {
    **QWEN2,
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": False,
}


def config(folder: Path, content: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        content if isinstance(content, str) else json.dumps(content)
    )
    return folder


def looked(tmp_path: Path, content: Any) -> Look:
    return look_at(config(tmp_path / "model", content))


def statuses(look: Look, side: str) -> dict[str, str]:
    return {row.operator: row.status for row in look.rows if row.side == side}


# --- looking --------------------------------------------------------------------------


def test_a_model_of_the_family_is_covered_operator_by_operator(tmp_path: Path):
    look = looked(tmp_path, QWEN2)
    assert look.missing == ()
    assert statuses(look, "rollout")["QKVParallelLinear"] == "covered"
    assert statuses(look, "rollout")["VocabParallelEmbedding"] == "as it is"
    trainer = statuses(look, "trainer")
    assert {n for n, s in trainer.items() if s == "covered"} == {
        "Qwen2RMSNorm", "Qwen2Attention", "Qwen2MLP", "Qwen2ForCausalLM",
    }  # fmt: skip
    assert trainer["Qwen2DecoderLayer"] == "as it is"
    assert "vllm.model_executor.models.qwen2:Qwen2DecoderLayer.forward" in look.relies_on


def test_a_routed_model_gets_the_experts_patches(tmp_path: Path):
    look = looked(tmp_path, QWEN3_MOE)
    assert look.missing == ()
    assert {"GATE", "ROUTER", "EXPERTS", "EXPERTS_OUTPUT"} <= set(look.rollout)
    assert "ACTIVATION" not in look.rollout
    assert statuses(look, "trainer")["Qwen3MoeMLP"] == "as it is"


def test_shared_experts_get_the_patches_that_know_them(tmp_path: Path):
    look = looked(tmp_path, GLM4_MOE)
    assert look.missing == ()
    assert {"GROUPED_ROUTER", "EXPERTS", "SHARED_EXPERTS_OUTPUT", "ACTIVATION"} <= set(look.rollout)
    assert not {"GATE", "ROUTER", "EXPERTS_OUTPUT"} & set(look.rollout)
    trainer = statuses(look, "trainer")
    assert trainer["Glm4MoeMoE"] == trainer["Glm4MoeMLP"] == "covered"
    assert trainer["Glm4MoeExperts"] == "as it is"  # a patch of it would never be reached
    assert "vllm.model_executor.models.glm4_moe:Glm4MoE.__init__" in look.relies_on


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"n_group": 3}, "n_group"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"n_shared_experts": 0}, "n_shared_experts"),
        ({"partial_rotary_factor": 0.01}, "partial_rotary_factor"),
        ({"router_noise": 0.1}, "router_noise"),
    ],
)
def test_a_setting_of_shared_experts_outside_of_the_rules_is_named(
    tmp_path: Path, change: dict, named: str
):
    look = looked(tmp_path, {**GLM4_MOE, **change})
    assert named in [row.operator for row in look.missing]


def test_classes_that_another_module_defines_are_followed(tmp_path: Path):
    qwen3 = {**QWEN2, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    look = looked(tmp_path, qwen3)
    assert "vllm.model_executor.models.qwen2:Qwen2MLP" in look.rollout_classes
    assert "vllm.model_executor.models.qwen3:Qwen3DecoderLayer" in look.rollout_classes


def test_what_no_binding_covers_is_named_on_both_sides_and_in_the_configuration(tmp_path: Path):
    look = looked(tmp_path, GEMMA2)
    missing = {(row.side, row.operator) for row in look.missing}
    assert missing >= {
        ("rollout", "GemmaRMSNorm"),
        ("rollout", "GeluAndMul"),
        ("trainer", "Gemma2RMSNorm"),
        ("trainer", "Gemma2Attention"),
        ("trainer", "nn.Linear"),
        ("config", "final_logit_softcapping"),
    }
    assert all(row.note for row in look.missing)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type"),
        ({"residual_multiplier": 0.22}, "residual_multiplier"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_a_setting_that_changes_numbers_is_named(tmp_path: Path, change: dict, named: str):
    look = looked(tmp_path, {**QWEN2, **change})
    assert [row.operator for row in look.missing] == [named]


def test_bindings_of_other_versions_cover_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from patchkit.kit import _known

    monkeypatch.setattr(_known, "installed_version", lambda package: "9.0")
    look = looked(tmp_path, QWEN2)
    missing = {(row.side, row.operator): row.note for row in look.missing}
    assert "another version is installed" in missing["rollout", "QKVParallelLinear"]
    assert "another version is installed" in missing["trainer", "Qwen2RMSNorm"]


def test_a_shared_replacement_gets_the_signature_of_the_models_method(tmp_path: Path):
    look = looked(tmp_path, LLAMA)
    assert look.missing == ()
    (wrapper,) = look.wrappers.values()
    parameters = {
        arg.arg: None
        for arg in ast.parse(wrapper.source).body[0].args.args  # type: ignore[attr-defined]
    }
    assert list(parameters)[:4] == [
        "self", "hidden_states", "position_embeddings", "attention_mask",
    ]  # fmt: skip
    assert "position_embeddings: Any = None" in wrapper.source


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "expected JSON"),
        ("[" * 99999, "expected JSON"),
        ("[]", "a JSON object"),
        ({**QWEN2, "architectures": None}, "architectures"),
        ({**QWEN2, "architectures": ["A", "B"]}, "architectures"),
        ({**QWEN2, "model_type": None}, "model_type"),
        ({**QWEN2, "architectures": ["Qwen2ForCausalLN"]}, "similar: Qwen2ForCausalLM"),
        ({**QWEN2, "model_type": "qwen3"}, "is built as Qwen3ForCausalLM"),
        ({**QWEN2, "model_type": "qwen_2"}, "similar: qwen2"),
    ],
)
def test_a_configuration_that_means_no_model_is_refused(tmp_path: Path, content: Any, named: str):
    with pytest.raises(UnknownModelError) as caught:
        looked(tmp_path, content)
    assert named in str(caught.value)
    assert "To do:" in str(caught.value)


def test_a_folder_without_configuration_is_named(tmp_path: Path):
    with pytest.raises(UnknownModelError, match="nothing is downloaded"):
        look_at(tmp_path)


# --- writing --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of three models that are covered, and one that is not."""
    into = tmp_path_factory.mktemp("skeletons")
    made = {}
    models = {
        "plain_qwen2": QWEN2, "old_llama": LLAMA, "shared_glm": GLM4_MOE, "soft_gemma2": GEMMA2,
    }  # fmt: skip
    for name, content in models.items():
        model = config(into / "models" / name, content)
        with pytest.MonkeyPatch.context() as patched:
            # Manifests read all of both libraries; tests/test_guide.py has them.
            patched.setattr(skeleton, "_store_manifests", lambda *a: None)
            made[name] = write_skeleton(name, look_at(model), into)
    return made


def imported(folder: Path, name: str, code: str) -> str:
    """Run code in a process of its own, with the package on its path."""
    run = subprocess.run(
        [sys.executable, "-c", f"from patchkit_{name} import adapter\n{code}"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_package_is_whole_and_imports_nothing_heavy(written: dict[str, Path]):
    folder = written["plain_qwen2"]
    files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert files == {
        "pyproject.toml",
        "README.md",
        "patchkit_plain_qwen2/__init__.py",
        "patchkit_plain_qwen2/coverage.py",
        "patchkit_plain_qwen2/tiny.py",
        "patchkit_plain_qwen2/operators.py",
        "patchkit_plain_qwen2/reviewed.json",
        "patchkit_plain_qwen2/profiles/cpu_tree.toml",
        "tests/test_conformance.py",
    }
    for file in folder.rglob("*.py"):
        ast.parse(file.read_text())
        assert "$" not in file.read_text()
    assert 'adapter_suite("plain_qwen2")' in (folder / "tests/test_conformance.py").read_text()
    loaded = imported(folder, "plain_qwen2", "import sys\nprint(*sys.modules)").split()
    assert not {"torch", "vllm", "transformers"} & set(loaded)
    assert not list(folder.parent.glob(".patchkit-*"))


def test_a_wrapper_is_declared_for_the_signature_that_it_has(written: dict[str, Path]):
    code = """
print([(p.replacement, p.versions) for p in adapter.trainer if "Attention" in p.symbol])
"""
    assert imported(written["old_llama"], "old_llama", code).strip() == repr(
        [("patchkit_old_llama.trainer:attention_forward_5_17", ">=5.17,<5.24")]
    )


def test_a_model_with_shared_experts_is_declared_as_its_adapter_is(written: dict[str, Path]):
    code = """
from patchkit.engine import find_adapter
from patchkit_shared_glm.tiny import SHAPE
from patchkit_shared_glm.operators import TINY, operators
glm = find_adapter("glm4_moe")
names = {m.name for m in glm.modules}
print({p.symbol for p in adapter.trainer} == {p.symbol for p in glm.trainer})
print(adapter.rollout == glm.rollout, names <= {m.name for m in adapter.modules})
print(SHAPE["n_group"], SHAPE["rope_parameters"]["partial_rotary_factor"], TINY.rotary_dim)
from patchkit_adapters.glm4_moe.operators import operators as all_of_glm
print(sorted({o.name for o in all_of_glm()} - {o.name for o in operators()}))
"""
    printed = imported(written["shared_glm"], "shared_glm", code).splitlines()
    # This configuration norms no queries and keys, and has one group.
    other = "['rms_norm [K=32]', 'route_grouped [E=8, k=2, 2 of 4 groups]']"
    assert printed == ["True", "True True", "1 0.5 16", other]


def test_its_profile_and_its_model_fit_each_other(written: dict[str, Path]):
    code = f"""
import json
from patchkit.runtime.profile import load_profile
from patchkit.engine import resolve_reference
from patchkit_plain_qwen2.tiny import SHAPE
profile = load_profile(adapter.profiles / "cpu_tree.toml")
check = resolve_reference(adapter.covers)
config = json.loads({json.dumps(json.dumps(QWEN2))})
print(profile.content.model.architecture, check(config), check({{**config, **SHAPE}}))
print([v.subject for v in check({{**config, "hidden_act": "gelu"}}, rollout_tensor=3)])
"""
    printed = imported(written["plain_qwen2"], "plain_qwen2", code).splitlines()
    assert printed[0] == "Qwen2ForCausalLM [] []"
    assert printed[1] == "['config.hidden_act', 'tensor-parallel size']"


def test_reviews_come_along_where_function_and_replacement_are_the_same(written: dict[str, Path]):
    folder = written["plain_qwen2"]
    reviewed = json.loads((folder / "patchkit_plain_qwen2/reviewed.json").read_text())["symbols"]
    assert "vllm.model_executor.layers.linear:UnquantizedLinearMethod.apply" in reviewed
    assert not [symbol for symbol in reviewed if "qwen2" in symbol]
    code = """
from patchkit.engine import inspect_plan
print([v.subject for v in inspect_plan(adapter, "trainer").violations])
"""
    refused = imported(folder, "plain_qwen2", code)
    assert "modeling_qwen2:Qwen2Attention.forward" in refused
    assert "torch.utils.checkpoint" not in refused


def test_what_is_missing_keeps_the_skeleton_closed(written: dict[str, Path]):
    code = f"""
import json
from patchkit.engine import resolve_reference
config = json.loads({json.dumps(json.dumps(GEMMA2))})
for violation in resolve_reference(adapter.covers)(config):
    print(violation.subject, "|", violation.remedy)
"""
    printed = imported(written["soft_gemma2"], "soft_gemma2", code)
    for subject in (
        "rollout: GemmaRMSNorm",
        "trainer: Gemma2Attention",
        "config: final_logit_softcapping",
    ):
        assert f"{subject} | write it, then take the entry out of MISSING" in printed
    readme = (written["soft_gemma2"] / "README.md").read_text()
    assert "**needs you**" in readme
    assert "declare `modules=`" in readme


@pytest.mark.parametrize(
    ("name", "place", "named"),
    [
        ("qwen3_moe", "", "an adapter of this name is installed"),
        ("Qwen2", "", "is no name for an adapter"),
        ("class", "", "is no name for an adapter"),
        ("a-b", "", "is no name for an adapter"),
        ("vllm_plugin", "", "a package of this name can be imported already"),
        ("taken", "", "exists already"),
        ("mine", "nowhere", "nothing can be written there"),
    ],
)
def test_a_place_or_name_that_is_taken_is_refused(
    tmp_path: Path, name: str, place: str, named: str
):
    (tmp_path / "taken").mkdir()
    with pytest.raises(SkeletonRefusedError) as caught:
        check_place(name, tmp_path / place)
    assert named in str(caught.value)
    assert all(all(v.as_dict().values()) for v in caught.value.violations)


@pytest.mark.parametrize("step", ["_carry_reviews", "_store_manifests", "_files"])
def test_a_failure_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
):
    def broken(*_: object) -> None:
        raise PatchkitError("the disk is full")

    look = looked(tmp_path, QWEN2)
    monkeypatch.setattr(skeleton, step, broken)
    into = tmp_path / "into"
    into.mkdir()
    with pytest.raises(PatchkitError, match="the disk is full"):
        write_skeleton("plain_qwen2", look, into)
    assert list(into.iterdir()) == []
    assert not [m for m in sys.modules if m.startswith("patchkit_plain_qwen2")]
    assert not [p for p in sys.path if "plain_qwen2" in p]


# --- the command ----------------------------------------------------------------------


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "patchkit", "new-adapter", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_says_what_is_covered_and_what_is_not(tmp_path: Path):
    model = config(tmp_path / "model", GEMMA2)
    run = command("soft_gemma2", "--model", str(model), "--look-only", "--json")
    assert run.returncode == 1, run.stderr
    told = json.loads(run.stdout)
    assert told["covered"] is False
    assert told["folder"] is None
    assert told["transformers"].endswith("modeling_gemma2:Gemma2ForCausalLM")
    table = command("soft_gemma2", "--model", str(model), "--look-only")
    assert "GemmaRMSNorm" in table.stdout
    assert "need you" in table.stdout


def test_the_command_refuses_before_it_reads_anything(tmp_path: Path):
    run = command("qwen3", "--model", str(tmp_path), "--into", str(tmp_path / "no"))
    assert run.returncode == 2
    assert "nothing can be written there" in run.stderr
    assert "an adapter of this name is installed" in run.stderr
    assert "Traceback" not in run.stderr
