"""Numerical operators that rollout and trainer share.

These are the *reference* providers: plain PyTorch on any device, exact by
construction (see :mod:`patchkit.providers.exact_sum`), differentiable, and the
yardstick for faster ones. Importing this package imports torch; only adapters
import it.

A profile may name an admitted implementation for an operator (``[providers.use]``);
then this package's name for it *is* that implementation, in every process of the run.
"""

from __future__ import annotations

from patchkit.providers._selection import select
from patchkit.providers.activation import sigmoid, silu_mul
from patchkit.providers.attention import attention
from patchkit.providers.exact_sum import ReductionTooLongError, exact_sum, pairwise_tree
from patchkit.providers.experts import experts_chunks
from patchkit.providers.linear import linear, linear_chunks
from patchkit.providers.logprobs import log_softmax, selected_token_logprobs
from patchkit.providers.norm import add_residual, rms_norm
from patchkit.providers.rope import rotate
from patchkit.providers.router import route, route_grouped

__all__ = [
    "ReductionTooLongError",
    "add_residual",
    "attention",
    "exact_sum",
    "experts_chunks",
    "linear",
    "linear_chunks",
    "log_softmax",
    "pairwise_tree",
    "rms_norm",
    "rotate",
    "route",
    "route_grouped",
    "selected_token_logprobs",
    "sigmoid",
    "silu_mul",
]

# What the contract of this run chose; nothing outside of one.
globals().update(select(__all__))
