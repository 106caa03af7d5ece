"""Where each loaded vLLM parameter of Qwen3-MoE sits in the trainer's layout."""

from __future__ import annotations

from patchkit.bindings.vllm_cpu.weights import weight_map

__all__ = ["weight_map"]
