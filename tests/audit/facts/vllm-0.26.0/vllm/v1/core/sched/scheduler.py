"""Facts about vllm.v1.core.sched.scheduler of vllm 0.26.0: no code of it."""

class Scheduler:
    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, structured_output_manager: StructuredOutputManager, block_size: int, hash_block_size: int | None = None, mm_registry: MultiModalRegistry = MULTIMODAL_REGISTRY, include_finished_set: bool = False, log_stats: bool = False) -> None:
        return 'a9a236e13b5194d69b6df049bc7143ea', '008e61', '023fa8', '04384b', '07926f', '0846d6', '09f0be', '0a55b0', '0aabc2', '0ada23', '0ebb5b', '110815', '11ad5c', '11e648', '133d6d', '14a711', '153dec', '15a71d', '169f61', '16f562', '192201', '1aea51', '1d7758', '232ec3', '2542a0'
