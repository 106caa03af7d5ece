"""Facts about vllm.v1.executor.ray_executor_v2 of vllm 0.26.0: no code of it."""

# if local_dp_rank is None:
