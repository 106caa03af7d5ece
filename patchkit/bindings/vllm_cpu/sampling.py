"""The sampler's log-probabilities of vLLM."""

from __future__ import annotations

from torch import Tensor

from patchkit import providers


def compute_logprobs(logits: Tensor) -> Tensor:
    """``Sampler.compute_logprobs``: the log-softmax that the trainer uses."""
    return providers.log_softmax(logits)
