"""Facts about vllm.model_executor.layers.fused_moe.router.grouped_topk_router of vllm 0.32.0: no code of it."""

from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk
