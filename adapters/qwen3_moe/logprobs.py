"""The trainer's selected-token log-probabilities: of the device that the logits are on.

The profiles of a CPU and those of a GPU agree with different engines, so that they need
different operators: the reference's, or the one with vLLM's order of summation.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def selected_token_logprobs(logits_TV: Tensor, tokens_T: Tensor) -> Tensor:
    """``[T, V]`` and ``[T]`` to ``[T]`` float32."""
    # By name: a profile for a CPU does not use what it never imports, and Triton is not there.
    providers = import_module("patchkit.providers" + (".cuda" if logits_TV.is_cuda else ""))
    found: Tensor = providers.selected_token_logprobs(logits_TV, tokens_T)
    return found
