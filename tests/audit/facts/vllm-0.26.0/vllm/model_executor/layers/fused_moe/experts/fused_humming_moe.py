"""Facts about vllm.model_executor.layers.fused_moe.experts.fused_humming_moe of vllm 0.26.0: no code of it."""

from vllm.model_executor.layers.fused_moe.moe_permute_unpermute import moe_permute
from vllm.model_executor.layers.fused_moe.moe_permute_unpermute import moe_unpermute
