"""Facts about vllm.envs of vllm 0.32.0: no code of it."""

# os.getenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "1")
VLLM_MAX_NUM_BAD_WORDS = int(os.environ.get("VLLM_MAX_NUM_BAD_WORDS", "128"))
environment_variables = 'ec37dac8ca6fc17d0b3d483a82ec7bb1'
