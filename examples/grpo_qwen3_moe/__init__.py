"""GRPO on a toy task: Ray actors around a real vLLM engine and a real FSDP2 trainer group."""
