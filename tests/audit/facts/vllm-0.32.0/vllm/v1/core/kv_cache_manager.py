"""Facts about vllm.v1.core.kv_cache_manager of vllm 0.32.0: no code of it."""

class KVCacheManager:
    def allocate_slots(self, request: Request, num_new_tokens: int, num_new_computed_tokens: int = 0, new_computed_blocks: KVCacheBlocks | None = None, num_lookahead_tokens: int = 0, num_external_computed_tokens: int = 0, delay_cache_blocks: bool = False, num_encoder_tokens: int = 0, full_sequence_must_fit: bool = False, reserved_blocks: int = 0, has_scheduled_reqs: bool = True, skip_zeroing_group_ids: tuple[int, ...] = ()) -> KVCacheBlocks | None:
        return '7634c2435c623e455749b8eb44fd1bdf', '01ddff', '069d5e', '06b83d', '074a70', '09c2ce', '09de00', '0b5fea', '0bc202', '0f2b12', '109782', '12b283', '137b46', '1d7758', '1d9bf2', '1e5ad9', '1e99c5', '2542a0', '2f1c61', '31eb3f', '351886', '366072', '392262', '3aa74c', '3dae78'
