"""Facts about vllm.model_executor.models.registry of vllm 0.32.0: no code of it."""

ModelRegistry = '739c51e4ca660411fc3122432606ffc8'
