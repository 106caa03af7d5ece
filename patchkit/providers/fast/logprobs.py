"""Log-probabilities of one token per position, a few rows at a time.

The reference makes several passes over the whole ``[T, V]`` and writes a result of that
size of which ``[T]`` is picked. A row's bits depend on that row alone, so rows may be
taken in blocks that stay in the processor's cache through all passes, and the selected
logit can be picked before the subtraction. The same numbers are subtracted, exponentiated
and added: the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from patchkit.providers.activation import exp_sum

# Elements of one block; has no say in any bit.
_BLOCK_ELEMENTS = 1 << 19


def _blocks(logits: Tensor) -> Iterator[slice]:
    rows = max(1, _BLOCK_ELEMENTS // max(1, logits.shape[-1]))
    return (slice(start, start + rows) for start in range(0, logits.shape[0], rows))


class _Selected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor) -> Tensor:
        result = torch.empty(logits.shape[0], 1, dtype=torch.float32, device=logits.device)
        top, total = torch.empty_like(result), torch.empty_like(result)
        for rows in _blocks(logits):
            z = logits[rows].float()
            top[rows] = z.amax(-1, keepdim=True)
            chosen = z.gather(-1, tokens[rows, None]) - top[rows]
            total[rows] = torch.log(exp_sum(z - top[rows])).float()
            result[rows] = chosen - total[rows]
        ctx.save_for_backward(logits, tokens, top, total)
        return result[:, 0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        logits, tokens, top, total = ctx.saved_tensors
        result = torch.empty_like(logits)
        for rows in _blocks(logits):
            shifted = (logits[rows].float() - top[rows]).sub_(total[rows])
            spread = torch.exp_(shifted).mul_(-grad[rows, None])
            spread.scatter_add_(-1, tokens[rows, None], grad[rows, None])
            result[rows] = spread
        return result, None


def selected_token_logprobs(logits_TV: Tensor, tokens_T: Tensor) -> Tensor:
    """Log-probability of each position's token: ``[T, V]`` and ``[T]`` to ``[T]`` float32."""
    return _Selected.apply(logits_TV, tokens_T)
