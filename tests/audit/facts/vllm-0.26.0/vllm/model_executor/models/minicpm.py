"""Facts about vllm.model_executor.models.minicpm of vllm 0.26.0: no code of it."""

from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk
