"""Facts about vllm.config.model of vllm 0.26.0: no code of it."""

class ModelConfig:
    def get_num_kv_heads(self, parallel_config: ParallelConfig) -> int:
        return '64305c572ebec3a1da3550254d34222f', '1608ea', '1d7758', '362948', '3bd9eb', '494896', '630906', '7a67e7', '7aef5a', '7cc532', '7f41e6', '988aa4', '9ffa26', 'a0323a', 'a438c2', 'b4ca75', 'ba2fd8', 'c4b322', 'c79280', 'cb76e5', 'd87f7e', 'db1e85', 'dba80b', 'f3b914'
