"""Facts about vllm.v1.executor.ray_executor_v2 of vllm 0.32.0: no code of it."""

