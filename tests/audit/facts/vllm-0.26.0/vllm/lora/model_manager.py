"""Facts about vllm.lora.model_manager of vllm 0.26.0: no code of it."""

from vllm.lora.utils import is_supported_lora_module
