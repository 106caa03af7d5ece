"""What the newer adapters cover is decided from config.json, all of it at once."""

from __future__ import annotations

from typing import Any

import pytest

from patchkit_adapters.glm4_moe.coverage import check_model as check_glm4_moe
from patchkit_adapters.qwen3.coverage import check_model as check_qwen3

# As their makers published them.
QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "sliding_window": None,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
}
GLM_45_AIR: dict[str, Any] = {
    "model_type": "glm4_moe",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "use_qk_norm": False,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_the_models_themselves_are_covered(tied: bool, size: int) -> None:
    tied_or_not = {**QWEN3_8B, "tie_word_embeddings": tied}
    assert check_qwen3(tied_or_not, rollout_tensor=size) == []
    assert check_glm4_moe(GLM_45_AIR, rollout_tensor=size) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "qwen2"}, "model_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"intermediate_size": 12290}, "intermediate_size"),
        ({"intermediate_size": 40000}, "intermediate_size"),
        ({"hidden_size": 16384}, "hidden_size"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
    ],
)
def test_what_qwen3_does_not_cover_is_named(change: dict[str, Any], named: str) -> None:
    (violation,) = check_qwen3({**QWEN3_8B, **change})
    assert named in violation.subject
    assert "adapter qwen3" in violation.problem
    assert violation.found
    assert violation.expected
    assert violation.remedy


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "glm4"}, "model_type"),
        ({"n_shared_experts": 0}, "n_shared_experts"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"n_group": 3}, "n_group"),
        ({"n_group": 128, "topk_group": 64}, "n_group"),
        ({"n_group": 32, "topk_group": 1}, "topk_group"),
        ({"topk_group": 2}, "topk_group"),
        ({"partial_rotary_factor": 0.01}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type"),
        ({"n_routed_experts": 4}, "n_routed_experts"),
        ({"moe_intermediate_size": 1410}, "moe_intermediate_size"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_what_glm_does_not_cover_is_named(change: dict[str, Any], named: str) -> None:
    violations = check_glm4_moe({**GLM_45_AIR, **change})
    assert named in "\n".join(v.subject for v in violations)
    assert all(v.found and v.expected and v.remedy for v in violations)


def test_everything_wrong_is_reported_at_once() -> None:
    wrong = {**GLM_45_AIR, "hidden_act": "gelu", "n_shared_experts": 0, "n_group": 3}
    subjects = {v.subject for v in check_glm4_moe(wrong, rollout_tensor=3)}
    assert {"config.hidden_act", "config.n_shared_experts", "config.n_group"} <= subjects
    assert "tensor-parallel size" in subjects
