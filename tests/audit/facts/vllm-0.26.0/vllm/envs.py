"""Facts about vllm.envs of vllm 0.26.0: no code of it."""

# os.getenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "1")
environment_variables = 'dfbee13abd9b2d2beb7343a0eceae412'
