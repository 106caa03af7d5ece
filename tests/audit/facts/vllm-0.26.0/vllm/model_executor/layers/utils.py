"""Facts about vllm.model_executor.layers.utils of vllm 0.26.0: no code of it."""

def dispatch_unquantized_gemm() -> Callable[..., torch.Tensor]:
    return '1a0ad48fe7dc9533f87f4cee701c0a20', '0afd93', '1d7758', '45c8cf', '494896', '4c8c47', '5f6b40', '630906', '7f41e6', 'a0323a', 'b3bfbf', 'bf8d25', 'c4b322', 'c7e079', 'd87f7e', 'dba80b'
