"""Facts about vllm.model_executor.layers.utils of vllm 0.32.0: no code of it."""

def dispatch_unquantized_gemm(linear_backend: str = "auto") -> Callable[..., torch.Tensor]:
    return '01d70e6ccd72427c73473ec3d25d77e7', '045b53', '08e268', '0afd93', '121493', '1d7758', '3048bb', '3b952a', '3f8bdc', '45c8cf', '494896', '4c8c47', '5a9371', '5af90c', '5b2a1a', '5f6b40', '630906', '63d3f0', '6f595a', '727431', '788b97', '7a67e7', '7aef5a', '7cc532', '7d0758'
