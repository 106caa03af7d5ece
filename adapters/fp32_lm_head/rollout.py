"""Replacements for vLLM's output layer; signatures are vLLM's.

Shapes: T tokens, H hidden, V rows of this rank's part of the vocabulary.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from patchkit.errors import PatchkitError
from patchkit.providers import linear

# The longest sum that is exact; a wider layer is a tree over equal slices, and how many
# depends on its width alone.
_LONGEST = 8192


class QuantizedHeadError(PatchkitError):
    """The output layer's weights are not plain numbers.

    Attributes:
        method: vLLM's quantisation method of that layer.
    """

    def __init__(self, method: str) -> None:
        self.method = method
        super().__init__(
            f"fp32_lm_head: the output layer is quantised ({method}), so float32 logits of it "
            "would still not be the trainer's. Expected an unquantised lm_head; leave it out of "
            "the quantisation, or run without this adapter"
        )

    def __reduce__(self) -> Any:
        return type(self), (self.method,)


def apply_head(
    self: Any, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None
) -> Tensor:
    """``LogitsProcessor._apply_head``: ``[T, H]`` to ``[T, V]`` float32."""
    return _float32_logits(lm_head, hidden_states, embedding_bias)


def get_logits(
    self: Any, hidden_states: Tensor, lm_head: Any, embedding_bias: Tensor | None
) -> Tensor | None:
    """``LogitsProcessor._get_logits`` of versions without ``_apply_head``."""
    logits = self._gather_logits(_float32_logits(lm_head, hidden_states, embedding_bias))
    # Ranks that do not sample get nothing; the padding of the vocabulary is no token.
    return None if logits is None else logits[..., : self.org_vocab_size]


def _float32_logits(lm_head: Any, hidden_states: Tensor, bias: Tensor | None) -> Tensor:
    method = type(lm_head.quant_method).__name__
    # What a quantisation that leaves the output layer out gives it is plain, too.
    if method not in ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod"):
        raise QuantizedHeadError(method)
    logits = linear(hidden_states, lm_head.weight, chunks=_slices(hidden_states.shape[-1]))
    return logits if bias is None else logits + bias.float()


def _slices(width: int) -> int:
    slices = 1
    while width > _LONGEST * slices and width % (2 * slices) == 0:
        slices *= 2
    return slices
