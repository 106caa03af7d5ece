"""Facts about vllm of vllm 0.26.0: no code of it."""

