"""Facts about vllm of vllm 0.32.0: no code of it."""

