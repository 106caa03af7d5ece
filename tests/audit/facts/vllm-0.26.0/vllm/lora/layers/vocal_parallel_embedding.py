"""Facts about vllm.lora.layers.vocal_parallel_embedding of vllm 0.26.0: no code of it."""

# class VocabParallelEmbeddingWithLoRA(
class VocabParallelEmbeddingWithLoRA:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 'b0f27b7a40c26a94cf058945e8d063a0', '044c6a', '0517cd', '0a0068', '15031e', '1c4c1a', '1d7758', '2518b0', '2e443e', '3048bb', '382dc7', '3dae78', '3f8bdc', '42993d', '466f2f', '494896', '49a390', '4a36a3', '544a8d', '5a9371', '5af90c', '5cad67', '630906', '659b38', '67299a'
    def set_lora(self, index: int, lora_a: torch.Tensor | list[torch.Tensor], lora_b: torch.Tensor | list[torch.Tensor]):
        return 'c837118a459d69d30dfc5fb27965e66c', '044c6a', '0984bc', '15031e', '1d7758', '26d88e', '340d4f', '392262', '3dae78', '3dc156', '544a8d', '5a9371', '606bc9', '613ea2', '630906', '6e5fdf', '788b97', '7cc532', '7e838c', '9776cd', '9f43e8', 'a438c2', 'a746f7', 'aaebb2', 'ad041e'
