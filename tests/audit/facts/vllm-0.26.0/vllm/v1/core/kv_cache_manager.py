"""Facts about vllm.v1.core.kv_cache_manager of vllm 0.26.0: no code of it."""

class KVCacheManager:
    def allocate_slots(self, request: Request, num_new_tokens: int, num_new_computed_tokens: int = 0, new_computed_blocks: KVCacheBlocks | None = None, num_lookahead_tokens: int = 0, num_external_computed_tokens: int = 0, delay_cache_blocks: bool = False, num_encoder_tokens: int = 0, full_sequence_must_fit: bool = False, reserved_blocks: int = 0, has_scheduled_reqs: bool = True) -> KVCacheBlocks | None:
        return '3141ff1ee4dc9bee66e22a565df165de', '01ddff', '06b83d', '09c2ce', '0b5fea', '0bc202', '109782', '12b283', '137b46', '1d7758', '1d9bf2', '1e5ad9', '1e99c5', '2542a0', '2f1c61', '3048bb', '31eb3f', '351886', '392262', '3aa74c', '3f8bdc', '3fb8dd', '427eb8', '42a377', '432d03'
