"""Log-probability of one chosen token per position.

The sums are those of vLLM's ``log_softmax`` (which batch-invariant mode puts under
``aten::_log_softmax``): float32, blocks of 1,024 columns in order. Only the chosen
token's value is written, and the backward recomputes the rest, so that no
float32 ``[T, V]`` tensor outlives a block of rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows that are widened to float32 at a time.
_ROWS = 2048


@triton.jit
def _forward_kernel(
    input_ptr,
    token_ptr,
    logprob_ptr,
    max_ptr,
    log_sum_ptr,
    input_row_stride,
    n_cols,
    BLOCK_SIZE: tl.constexpr,
):
    """vLLM's ``_log_softmax_kernel``, storing one column."""
    row_idx = tl.program_id(0).to(tl.int64)
    row_start_ptr = input_ptr + row_idx * input_row_stride
    max_val = -float("inf")
    for col_offset in range(0, n_cols, BLOCK_SIZE):
        col_idx = col_offset + tl.arange(0, BLOCK_SIZE)
        mask = col_idx < n_cols
        vals = tl.load(row_start_ptr + col_idx, mask=mask, other=-float("inf"))
        max_val = tl.max(tl.maximum(vals, max_val))
    sum_exp = 0.0
    for col_offset in range(0, n_cols, BLOCK_SIZE):
        col_idx = col_offset + tl.arange(0, BLOCK_SIZE)
        mask = col_idx < n_cols
        vals = tl.load(row_start_ptr + col_idx, mask=mask, other=0.0)
        exp_vals = tl.exp(vals - max_val)
        sum_exp += tl.sum(tl.where(mask, exp_vals, 0.0))
    log_sum_exp = tl.log(sum_exp)
    token = tl.load(token_ptr + row_idx).to(tl.int64)
    chosen = tl.load(row_start_ptr + token)
    tl.store(logprob_ptr + row_idx, chosen - max_val - log_sum_exp)
    tl.store(max_ptr + row_idx, max_val)
    tl.store(log_sum_ptr + row_idx, log_sum_exp)


@triton.jit
def _backward_kernel(
    logits_ptr,
    token_ptr,
    max_ptr,
    log_sum_ptr,
    grad_ptr,
    grad_logits_ptr,
    stride,
    n_cols,
    BLOCK_SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = column < n_cols
    token = tl.load(token_ptr + row).to(tl.int64)
    grad = tl.load(grad_ptr + row)
    shift = tl.load(max_ptr + row) + tl.load(log_sum_ptr + row)
    value = tl.load(logits_ptr + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    probability = tl.exp(value - shift)
    grad_value = grad * (tl.where(column == token, 1.0, 0.0) - probability)
    tl.store(
        grad_logits_ptr + row * n_cols + column,
        grad_value.to(grad_logits_ptr.dtype.element_ty),
        mask=mask,
    )


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, tokens_T: Tensor) -> Tensor:  # type: ignore[override]
        rows, width = logits_TV.shape
        if logits_TV.stride(1) != 1:
            logits_TV = logits_TV.contiguous()
        tokens_T = tokens_T.contiguous()
        logprob = torch.empty(rows, dtype=torch.float32, device=logits_TV.device)
        top, log_sum = torch.empty_like(logprob), torch.empty_like(logprob)
        for start in range(0, rows, _ROWS):
            part = slice(start, start + _ROWS)
            # Float32 in memory, as in vLLM: loads of another width reduce in another order.
            wide = logits_TV[part].float().contiguous()
            # The stride of a single row is arbitrary, and Triton compiles for its divisors.
            _forward_kernel[(wide.shape[0],)](
                wide, tokens_T[part], logprob[part], top[part], log_sum[part],
                width, width, BLOCK_SIZE=1024,
            )  # fmt: skip
        ctx.save_for_backward(logits_TV, tokens_T, top, log_sum)
        return logprob

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        logits_TV, tokens_T, top, log_sum = ctx.saved_tensors
        rows, width = logits_TV.shape
        grad = torch.empty((rows, width), dtype=logits_TV.dtype, device=logits_TV.device)
        if rows:
            block = 4096
            _backward_kernel[(rows, triton.cdiv(width, block))](
                logits_TV, tokens_T, top, log_sum, grad_T.float().contiguous(), grad,
                logits_TV.stride(0), width, BLOCK_SIZE=block, num_warps=8,
            )  # fmt: skip
        return grad, None


def selected_token_logprobs(logits_TV: Tensor, tokens_T: Tensor) -> Tensor:
    """Log-probability of each position's token: ``[T, V]`` and ``[T]`` to ``[T]`` float32.

    Args:
        logits_TV: bf16, as the output layer gives them.
        tokens_T: Integer token ids below V; a padding position may hold any of them.
    """
    return _SelectedLogprobs.apply(logits_TV, tokens_T)
