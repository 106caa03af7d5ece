"""Facts about vllm.v1.attention.backends.utils of vllm 0.26.0: no code of it."""

def set_kv_cache_layout(cache_layout: KVCacheLayoutType | None):
    return 'fc07ba5bb38ebe9e2d18a3fde19f3bc4', '1ce388', '2ef206', '3fabb1', '494896', '630906', '7aef5a', '7f41e6', 'aced32', 'cb36a5', 'efa98e', 'efda7a', 'f23349'
