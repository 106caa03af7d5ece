"""Facts about vllm.config.model of vllm 0.32.0: no code of it."""

class ModelConfig:
    def get_num_kv_heads(self, parallel_config: ParallelConfig, arch_config: ModelArchitectureConfig | None = None) -> int:
        return '8a1c806cf8ffb7f87a2be8130a77cd5f', '0f6574', '1608ea', '1d7758', '362948', '3aa74c', '3bd9eb', '494896', '5ac911', '630906', '7a67e7', '7aef5a', '7b21a4', '7cc532', '883351', '988aa4', '9ffa26', 'a0323a', 'a438c2', 'b4ca75', 'ba2fd8', 'c4b322', 'c79280', 'cb76e5', 'd041c7'
