"""Recorded drift of real packages, answered from the stored manifests (facts, no code)."""

from __future__ import annotations

from itertools import pairwise

import pytest

from patchkit.symbols.drift import Finding, diff, open_view, versions_between

L = "vllm.model_executor.layers"
MOE = f"{L}.fused_moe"
Q = "vllm.model_executor.models.qwen3_moe"
BI = f"{L}.batch_invariant"
NEW_BI = "vllm.model_executor.determinism.batch_invariant"
LLM = "vllm.entrypoints.llm:LLM"
ASYNC = "vllm.v1.engine.async_llm:AsyncLLM"
RL = "vllm.entrypoints.rl.offline:RLOfflineMixin"
HF = "transformers.models.qwen3_moe.modeling_qwen3_moe"


def finding(package: str, old: str, new: str, symbol: str) -> Finding:
    views = open_view(f"{package}@{old}"), open_view(f"{package}@{new}")
    drift = diff(*views, [symbol], between=versions_between(package, *views))
    assert not drift.unknown and not drift.only_new, drift
    return drift.findings[0]


# Identical in signature and body from 0.24 to 0.33.
STABLE = [
    *(f"{Q}:{n}" for n in (
        "Qwen3MoeAttention.forward", "Qwen3MoeDecoderLayer.forward", "Qwen3MoeMLP.forward",
        "Qwen3MoeModel.__init__", "Qwen3MoeModel.forward", "Qwen3MoeForCausalLM.forward",
        "Qwen3MoeForCausalLM.compute_logits", "Qwen3MoeForCausalLM.load_weights")),
    *(f"{L}.rotary_embedding.base:RotaryEmbedding.{n}" for n in (
        "__init__", "_compute_inv_freq", "_compute_cos_sin_cache", "forward_native",
        "forward_cuda", "forward_cpu")),
    f"{L}.layernorm:RMSNorm.forward_native",
    f"{L}.activation:SiluAndMul.forward_native",
    f"{L}.activation:SiluAndMul.forward_cuda",
    f"{L}.linear:RowParallelLinear.forward",
    f"{L}.linear:ColumnParallelLinear.forward",
    f"{L}.linear:ReplicatedLinear.forward",
    f"{L}.vocab_parallel_embedding:get_masked_input_and_mask",
    f"{MOE}.router.fused_moe_router:FusedMoERouter.select_experts",
    f"{MOE}.router.base_router:BaseRouter._select_experts",
    f"{MOE}.router.base_router:BaseRouter._compute_routing",
    f"{MOE}.router.fused_topk_router:FusedTopKRouter._compute_routing",
    f"{MOE}.runner.moe_runner:MoERunner.__init__",
    *(f"{MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.{n}" for n in (
        "apply", "forward_native", "forward_cuda")),
    f"{MOE}.fused_moe:fused_experts",
    f"{MOE}.moe_permute_unpermute:moe_unpermute",
    "vllm.v1.sample.sampler:Sampler.sample",
    "vllm.v1.sample.sampler:Sampler.compute_logprobs",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._model_forward",
    *(f"{c}.{n}" for c in (LLM, ASYNC) for n in ("collective_rpc", "sleep", "reset_prefix_cache")),
    f"{ASYNC}.resume_generation",
    "vllm.plugins:load_general_plugins",
    "vllm.model_executor.custom_op:CustomOp.forward",
    "vllm.model_executor.custom_op:CustomOp.dispatch_forward",
    "vllm.config.model:LogprobsMode",
]  # fmt: skip


@pytest.mark.parametrize("symbol", STABLE)
def test_stable_from_0_24_to_0_33(symbol: str) -> None:
    found = finding("vllm", "0.24.0", "0.33.0", symbol)
    assert found.kind.value == "unchanged", [c.text for c in found.changes]


# Signature stable, body changed in exactly these steps after 0.24.
STEPS = {
    f"{Q}:Qwen3MoeSparseMoeBlock.forward": {"0.28.0"},
    f"{Q}:Qwen3MoeModel.load_weights": {"0.26.0"},
    f"{L}.layernorm:RMSNorm.forward_cuda": {"0.26.0"},
    f"{L}.linear:UnquantizedLinearMethod.apply": {"0.30.0"},
    f"{L}.vocab_parallel_embedding:VocabParallelEmbedding.forward": {"0.27.1", "0.30.0", "0.32.0"},
    f"{MOE}.router.fused_topk_router:fused_topk": {"0.33.0"},
    f"{MOE}.moe_permute_unpermute:moe_permute": {"0.32.0"},
}
VERSIONS = ["0.24.0", "0.26.0", "0.27.1", "0.28.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"]


@pytest.mark.parametrize("symbol", STEPS)
def test_bodies_changed_where_they_did(symbol: str) -> None:
    changed = set()
    for old, new in pairwise(VERSIONS):
        found = finding("vllm", old, new, symbol)
        assert found.kind.value in ("unchanged", "body-only")
        if found.kind.value == "body-only":
            changed.add(new)
    assert changed == STEPS[symbol]


V, T = "vllm", "transformers"
B, S, R, M, N = "body-only", "signature-breaking", "removed", "moved", "renamed"
DRIFT = [
    # the module moved, without a shim
    *((V, "0.28.0", "0.30.0", f"{BI}:{n}", M, f"{NEW_BI}:{n}") for n in (
        "linear_batch_invariant", "rms_norm_batch_invariant", "init_batch_invariance",
        "matmul_persistent", "bmm_batch_invariant", "softmax_batch_invariant")),
    (V, "0.26.0", "0.32.0", f"{BI}:linear_batch_invariant", M, f"{NEW_BI}:linear_batch_invariant"),
    # a function became an environment variable
    (V, "0.18.1", "0.20.2", f"{BI}:vllm_is_batch_invariant", N, "vllm.envs:VLLM_BATCH_INVARIANT"),
    (V, "0.16.0", "0.26.0", f"{BI}:vllm_is_batch_invariant", N, "vllm.envs:VLLM_BATCH_INVARIANT"),
    # a class became a factory function, then got another name
    (V, "0.22.1", "0.24.0", f"{MOE}.layer:FusedMoE", S, None),
    (V, "0.22.1", "0.24.0", f"{MOE}:FusedMoE", S, None),
    (V, "0.26.0", "0.27.1", f"{MOE}.layer:FusedMoE", N, f"{MOE}.layer:FusedMoEFactory"),
    (V, "0.22.1", "0.27.1", f"{MOE}.layer:FusedMoE", N, f"{MOE}.layer:FusedMoEFactory"),
    (V, "0.22.1", "0.33.0", f"{MOE}.layer:FusedMoE", N, f"{MOE}.layer:FusedMoEFactory"),
    # a shim in 0.12, gone by 0.14.1
    *((V, old, new, "vllm.v1.engine.processor:Processor", N,
       "vllm.v1.engine.input_processor:InputProcessor")
      for old, new in (("0.10.2", "0.12.0"), ("0.12.0", "0.14.1"), ("0.10.2", "0.14.1"),
                       ("0.10.2", "0.32.0"))),
    (V, "0.10.2", "0.14.1", "vllm.v1.engine.processor:Processor.process_inputs", M,
     "vllm.v1.engine.input_processor:InputProcessor.process_inputs"),
    # the CPU's mixture of experts
    (V, "0.27.1", "0.28.0", f"{MOE}.cpu_fused_moe:select_experts", M,
     f"{MOE}.experts.cpu_moe:select_experts"),
    (V, "0.26.0", "0.32.0", f"{MOE}.cpu_fused_moe:select_experts", M,
     f"{MOE}.router.cpu_router:select_experts"),
    (V, "0.27.1", "0.28.0", f"{MOE}.cpu_fused_moe:CPUFusedMOE.__call__", R, None),
    # methods that are inherited now
    *((V, "0.31.0", "0.32.0", f"{LLM}.{n}", M, f"{RL}.{n}") for n in (
        "init_weight_transfer_engine", "start_weight_update", "update_weights",
        "finish_weight_update")),
    (V, "0.31.0", "0.32.0", f"{ASYNC}.pause_generation", S, None),
    # transformers
    (T, "4.57.6", "5.0.0", f"{HF}:apply_rotary_pos_emb", S, None),
    (T, "4.51.3", "4.57.6", f"{HF}:Qwen3MoeAttention.forward", S, None),
    (T, "4.51.3", "4.57.6", f"{HF}:Qwen3MoeModel.forward", S, None),
    (T, "5.0.0", "5.5.4", f"{HF}:Qwen3MoeAttention.forward", S, None),
    (T, "5.0.0", "5.5.4", f"{HF}:Qwen3MoeModel.forward", S, None),
    (T, "5.19.0", "5.24.0", f"{HF}:Qwen3MoeAttention.forward", S, None),
    (T, "5.19.0", "5.24.0", f"{HF}:Qwen3MoeModel.forward", S, None),
    (T, "5.17.0", "5.19.0", f"{HF}:Qwen3MoeExperts.forward", B, None),
    (T, "5.17.0", "5.19.0", f"{HF}:Qwen3MoeRotaryEmbedding.forward", B, None),
]  # fmt: skip


@pytest.mark.parametrize(("package", "old", "new", "symbol", "kind", "where"), DRIFT)
def test_drift(package, old: str, new: str, symbol: str, kind: str, where: str | None) -> None:
    found = finding(package, old, new, symbol)
    assert (found.kind.value, found.new_symbol) == (kind, where), found


def test_secondary_changes_of_a_rename() -> None:
    found = finding("vllm", "0.18.1", "0.20.2", f"{BI}:vllm_is_batch_invariant")
    assert found.also is not None and found.also.value == "signature-breaking"


@pytest.mark.parametrize(
    ("package", "version", "symbol", "present"),
    [
        (V, "0.28.0", f"{MOE}.router.cpu_router:CPURouter._compute_routing", False),
        (V, "0.30.0", f"{MOE}.router.cpu_router:CPURouter._compute_routing", True),
        (V, "0.24.0", f"{ASYNC}.get_weight_version", False),
        (V, "0.27.1", f"{ASYNC}.get_weight_version", True),
        (V, "0.32.0", f"{ASYNC}.compute_weight_checksums", True),
        (T, "4.57.6", f"{HF}:Qwen3MoeExperts.forward", False),
        (T, "5.0.0", f"{HF}:Qwen3MoeExperts.forward", True),
    ],
)
def test_what_came_when(package: str, version: str, symbol: str, present: bool) -> None:
    view = open_view(f"{package}@{version}")
    assert view.known(symbol)
    assert (view.facts(symbol) is not None) == present


ALIASES = [
    ("0.26.0", f"{BI}:linear_batch_invariant", {f"{L}.linear", f"{L}.vocab_parallel_embedding"}),
    ("0.26.0", f"{BI}:rms_norm_batch_invariant", {f"{L}.layernorm"}),
    ("0.26.0", f"{MOE}.router.fused_topk_router:fused_topk", {MOE}),
    ("0.32.0", f"{L}.utils:dispatch_unquantized_gemm",
     {f"{L}.linear", f"{L}.vocab_parallel_embedding", f"{MOE}.runner.moe_runner"}),
    ("0.26.0", "vllm.v1.sample.sampler:Sampler",
     {"vllm.v1.worker.gpu_model_runner", "vllm.v1.sample.rejection_sampler"}),
]  # fmt: skip


@pytest.mark.parametrize(("version", "symbol", "modules"), ALIASES)
def test_alias_sites(version: str, symbol: str, modules: set[str]) -> None:
    facts = open_view(f"vllm@{version}").facts(symbol)
    assert facts is not None
    assert modules <= {alias.partition(":")[0] for alias in facts.aliases}
