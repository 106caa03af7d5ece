"""What the adapter covers is decided from config.json, all of it at once."""

from __future__ import annotations

from typing import Any

import pytest

from patchkit_adapters.qwen3_moe.coverage import check_model

QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("tied", [True, False])
def test_the_model_itself_is_covered(tied: bool) -> None:
    assert check_model({**QWEN3_30B, "tie_word_embeddings": tied}) == []


@pytest.mark.parametrize("size", [1, 2, 4])
def test_tensor_parallel_sizes_that_divide_the_tree_are_covered(size: int) -> None:
    assert check_model(QWEN3_30B, rollout_tensor=size) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "qwen2_moe"}, "model_type"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type"),
        ({"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"moe_intermediate_size": 770}, "moe_intermediate_size"),
        ({"hidden_size": 16384}, "hidden_size"),
        ({"num_experts": 4}, "num_experts"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
    ],
)
def test_what_is_not_covered_is_named(change: dict[str, Any], named: str) -> None:
    (violation,) = check_model({**QWEN3_30B, **change})
    assert named in violation.subject
    assert violation.found
    assert violation.expected
    assert violation.remedy


def test_everything_wrong_is_reported_at_once() -> None:
    wrong = {**QWEN3_30B, "attention_bias": True, "decoder_sparse_step": 2, "hidden_act": "gelu"}
    assert len(check_model(wrong, rollout_tensor=3)) == 4
