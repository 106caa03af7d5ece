"""Facts about vllm.v1.core.sched.scheduler of vllm 0.32.0: no code of it."""

class Scheduler:
    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, structured_output_manager: StructuredOutputManager, block_size: int, hash_block_size: int | None = None, mm_registry: MultiModalRegistry = MULTIMODAL_REGISTRY, include_finished_set: bool = False, log_stats: bool = False) -> None:
        return 'c809f610136c4114d3cdd47c9b6d7738', '008e61', '023fa8', '02de29', '03234c', '04384b', '07926f', '07e4e8', '09f0be', '0a55b0', '0aabc2', '0ada23', '10aae5', '110815', '11ad5c', '11e648', '13cf01', '14a711', '153dec', '15a71d', '160beb', '169f61', '16f562', '18a409', '192201'
