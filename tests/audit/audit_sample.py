"""What the sample project patches, and how each patch fares: checked by reading both wheels."""

from __future__ import annotations

L = "vllm.model_executor.layers"

# (target, key, action, verdict at 0.26.0, verdict at 0.32.0, where it is at 0.32.0)
EXPECTED: list[tuple[str, str | None, str, str | None, str | None, str | None]] = [
    # ---- layers.py
    ("vllm.model_executor.models.qwen3_moe:Qwen3MoeAttention.forward", None, "replace",
     "fine", "fine", None),
    (f"{L}.layernorm:RMSNorm.forward_native", None, "replace", "fine", "fine", None),
    (f"{L}.layernorm:RMSNorm.forward_cuda", None, "replace", "fine", "fine", None),
    (f"{L}.activation:SiluAndMul.forward_native", None, "replace", "fine", "fine", None),
    (f"{L}.activation:GeluAndMul.forward_native", None, "replace", "fine", "fine", None),
    (f"{L}.linear:RowParallelLinear.forward", None, "replace", "fine", "fine", None),
    # 0.30 caches the implementation in the constructor: the copied body is stale.
    (f"{L}.linear:UnquantizedLinearMethod.apply", None, "replace", "fine", "body-changed", None),
    (f"{L}.vocab_parallel_embedding:get_masked_input_and_mask", None, "replace",
     "fine", "fine", None),
    (f"{L}.rotary_embedding.base:RotaryEmbeddingBase._compute_inv_freq", None, "replace",
     "fine", "fine", None),
    ("vllm.model_executor.custom_op:CustomOp.dispatch_forward", None, "replace",
     "fine", "fine", None),
    # Its body changed, too, but the wrapper calls it.
    (f"{L}.vocab_parallel_embedding:VocabParallelEmbedding.forward", None, "wrap",
     "fine", "fine", None),
    # ---- moe.py
    ("torch.ops.aten:mm", "CUDA", "dispatch", None, None, None),
    ("vllm.model_executor.models.qwen3_moe:Qwen3MoeSparseMoeBlock.forward", None, "replace",
     "fine", "body-changed", None),
    (f"{L}.fused_moe.moe_permute_unpermute:moe_unpermute", None, "replace", "fine", "fine", None),
    (f"{L}.utils:dispatch_unquantized_gemm", None, "wrap", "fine", "fine", None),
    # Imported from the new place, else from the old one: each holds at one version.
    (f"{L}.batch_invariant:softmax_batch_invariant", None, "replace",
     "fine", "guard-never-true", None),
    # ... and in the new place the third parameter is another one.
    ("vllm.model_executor.determinism.batch_invariant:softmax_batch_invariant", None, "replace",
     "guard-never-true", "signature", None),
    (f"{L}.fused_moe.cpu_fused_moe:CPUFusedMOE.forward_grouped_gemm", None, "replace",
     "fine", "guard-never-true", None),
    (f"{L}.fused_moe.moe_permute_unpermute:moe_permute", None, "wrap",
     "guard-never-true", "guard-never-true", None),
    (f"{L}.fused_moe.router.fused_topk_router:fused_topk", None, "wrap", "fine", "fine", None),
    # ---- scheduling.py
    ("vllm.v1.core.sched.scheduler:Scheduler", None, "replace", "fine", "fine", None),
    # wait_for_inflight_requests is gone: the wrapper still passes it on.
    ("vllm.v1.engine.async_llm:AsyncLLM.pause_generation", None, "wrap",
     "fine", "signature", None),
    ("vllm.v1.engine.async_llm:AsyncLLM.collective_rpc", None, "replace", "fine", "fine", None),
    ("vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots", None, "replace",
     "fine", "signature", None),
    ("vllm.config.model:ModelConfig.get_num_kv_heads", None, "replace",
     "fine", "signature", None),
    ("vllm.v1.engine.async_llm:AsyncLLM.sleep", None, "value",
     "guard-never-true", "guard-never-true", None),
    # ---- runner.py
    ("vllm.v1.sample.sampler:Sampler.compute_logprobs", None, "replace",
     "fine", "off-path", None),
    ("vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample", None, "replace",
     "fine", "off-path", None),
    # The second Ray executor has been the default since before 0.26.
    ("vllm.v1.executor.ray_executor:RayDistributedExecutor.collective_rpc", None, "wrap",
     "off-path", "off-path", None),
    ("vllm.v1.worker.gpu.sample.sampler:Sampler.__call__", None, "replace",
     "guard-never-true", "body-changed", None),
    ("vllm.v1.worker.gpu_model_runner:GPUModelRunner.no_such_method", None, "replace",
     "guard-never-true", "guard-never-true", None),
    # ---- tables.py
    (f"{L}.batch_invariant:matmul_persistent", None, "replace", "fine", "moved",
     "vllm.model_executor.determinism.batch_invariant:matmul_persistent"),
    (f"{L}.batch_invariant:linear_batch_invariant", None, "replace", "fine", "moved",
     "vllm.model_executor.determinism.batch_invariant:linear_batch_invariant"),
    ("vllm.v1.attention.ops.dcp_alltoall:_dcp_a2a_unpack_combine", None, "replace",
     "fine", "moved", "vllm.v1.attention.ops.dcp:_dcp_a2a_unpack_combine"),
    ("vllm.v1.kv_offload.tiering.fs.io:load_block", None, "replace", "fine", "renamed",
     "vllm.v1.kv_offload.tiering.fs.io:_load_block"),
    ("vllm.lora.utils:is_supported_lora_module", None, "replace", "fine", "signature", None),
    ("vllm.v1.attention.backends.utils:set_kv_cache_layout", None, "replace",
     "fine", "gone", None),
    ("vllm.lora.layers.vocal_parallel_embedding", None, "module", "fine", "renamed",
     "vllm.lora.layers.vocab_parallel_embedding"),
    ("vllm.model_executor.models.registry:ModelRegistry", "RlModelForCausalLM", "register",
     "fine", "fine", None),
    ("vllm.envs:environment_variables", "RL_STACK_LEVEL", "register", "fine", "fine", None),
    ("vllm.v1.worker.gpu.sample.bad_words:MAX_NUM_BAD_WORDS", None, "value", "fine", "renamed",
     "vllm.envs:VLLM_MAX_NUM_BAD_WORDS"),
    ("vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata:NIXL_CONNECTOR_VERSION", None,
     "value", "fine", "absorbed", None),
    (f"{L}.linear:ReplicatedLinear", None, "class-swap", "fine", "fine", None),
    # ---- driver.py
    ("vllm.plugins:load_general_plugins", None, "wrap", "fine", "fine", None),
    # ---- rewrites.py
    ("vllm/v1/executor/ray_executor.py", None, "rewrite", "fine", "fine", None),
    ("vllm/v1/executor/ray_executor_v2.py", None, "rewrite", "fine", "anchor-lost", None),
    ("vllm/lora/layers/vocal_parallel_embedding.py", None, "rewrite", "fine", "moved",
     "vllm/lora/layers/vocab_parallel_embedding.py"),
]  # fmt: skip

# Found again by how other code uses it, and trees of facts have no code.
NEEDS_CODE = frozenset({"vllm.v1.worker.gpu.sample.bad_words:MAX_NUM_BAD_WORDS"})
