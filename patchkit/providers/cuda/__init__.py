"""CUDA operators for the trainer of the ``vllm_bi`` and ``tp_independent`` profiles.

They reproduce, bit for bit, what vLLM computes in batch-invariant mode with the
one patch of :mod:`patchkit_adapters.qwen3_moe.cuda_rollout`, and add what vLLM
has not: a backward. Each is either one of vLLM's own kernels, called, or a
kernel of ours of which ``tests/gpu`` shows on the machine itself that its bits
equal those of vLLM's.

A profile that uses them names this package, and is refused where ``admissions.json`` beside
this file has no record of the GPU, the versions and these sources: ``patchkit admit
patchkit.providers.cuda --write`` makes one there.

Importing this package imports torch and Triton; vLLM is imported by the
operators that call it, when they are first called.

Shapes use one letter per dimension: T tokens, K reduced dimension, N outputs,
H heads (or, in the experts, the hidden width), D head size, E experts, k experts
per token, F intermediate width, V vocabulary, P = T * k token-expert pairs.
"""

from __future__ import annotations

from patchkit.providers.cuda.attention import attention
from patchkit.providers.cuda.experts import experts
from patchkit.providers.cuda.linear import linear
from patchkit.providers.cuda.logprobs import selected_token_logprobs
from patchkit.providers.cuda.norm import add_rms_norm_forward, rms_norm, rms_norm_forward
from patchkit.providers.cuda.packing import Packing
from patchkit.providers.cuda.rope import cos_sin_table, rotate
from patchkit.providers.cuda.router import route
from patchkit.providers.cuda.topology import AnyTopology, RolloutTopology

# Read from the source, by whoever checks a profile without importing torch.
IMPLEMENTS = "vllm.model_executor.layers.batch_invariant"
DEVICE = "cuda"
CASES = "patchkit.bindings.cuda_cases:cases"

__all__ = [
    "AnyTopology",
    "Packing",
    "RolloutTopology",
    "add_rms_norm_forward",
    "attention",
    "cos_sin_table",
    "experts",
    "linear",
    "rms_norm",
    "rms_norm_forward",
    "rotate",
    "route",
    "selected_token_logprobs",
]
