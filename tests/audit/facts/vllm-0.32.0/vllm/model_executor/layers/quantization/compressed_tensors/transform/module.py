"""Facts about vllm.model_executor.layers.quantization.compressed_tensors.transform.module of vllm 0.32.0: no code of it."""

from vllm.model_executor.layers.utils import dispatch_unquantized_gemm
