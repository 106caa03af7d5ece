"""Facts about vllm.model_executor.layers.fused_moe.runner.moe_runner of vllm 0.32.0: no code of it."""

from vllm.model_executor.layers.utils import dispatch_unquantized_gemm
