"""Sums over slots, slices and ranks whose bits depend on none of them.

A tensor-parallel layer adds what its ranks computed, and floating-point addition is
not associative: the bits change with the number of ranks, with the order that the
communication library takes, and with expert parallelism. Here each summand (a bf16
number, rounded once where its slice of K ends) becomes a multiple of one fixed
quantum, :data:`QUANTUM`, and is added in float64. While no more than
:data:`MOST_TERMS` summands below :data:`LIMIT` meet, every partial sum is an integer
multiple of the quantum with at most 53 significant bits, hence **exact**: whoever
adds whatever in whichever order gets the same number. One rounding follows.

What a rank computes alone is a *slice*: a stretch of K of fixed width. K is always cut
into the same slices; a rank holds some of them (tensor parallelism) or all of them for
some experts (expert parallelism). So nothing that is rounded depends on the number of
ranks.

A summand that is too large, infinite or NaN becomes NaN and with it the sum: it
reaches the log-probabilities, and the gate. It is never dropped silently. What the
quantum cuts off is at most 2**-31 per summand; bf16 numbers above 2**-23 lose nothing.

The reference providers do the same with a quantum per row
(:mod:`patchkit.providers.exact_sum`); a fixed one needs no second pass and no
agreement between ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

QUANTUM_BITS = 30
QUANTUM = 2.0**-QUANTUM_BITS
LIMIT = 2.0**15
MOST_TERMS = 2**8

# Adding and subtracting 1.5 * 2**52 quanta rounds to a whole number of them.
_ANCHOR: tl.constexpr = tl.constexpr(1.5 * 2.0 ** (52 - QUANTUM_BITS))
_LIMIT: tl.constexpr = tl.constexpr(LIMIT)


@triton.jit
def _sum_kernel(
    each_ptr,
    out_ptr,
    width,
    stride_slice,
    stride_token,
    stride_slot,
    SLICES: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Output ``[T, width]``, float64 or rounded; one program per token and column block."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    total = tl.zeros([BLOCK], dtype=tl.float64)
    for part in tl.static_range(SLICES):
        for slot in tl.static_range(SLOTS):
            at = each_ptr + part * stride_slice + token * stride_token + slot * stride_slot
            value = tl.load(at + column, mask=mask, other=0.0).to(tl.float32)
            # False for a NaN, too.
            value = tl.where(tl.abs(value) < _LIMIT, value, float("nan"))
            total += (value.to(tl.float64) + _ANCHOR) - _ANCHOR
    dtype = out_ptr.dtype.element_ty
    if dtype != tl.float64:
        total = total.to(tl.float32)
    tl.store(out_ptr + token * width + column, total.to(dtype), mask=mask)


@triton.jit
def _round_kernel(total_ptr, out_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(total_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=at < size)


def _launch(each_STkH: Tensor, dtype: torch.dtype) -> Tensor:
    slices, tokens, slots, width = each_STkH.shape
    if slices * slots > MOST_TERMS or each_STkH.stride(3) != 1:
        raise ValueError(
            f"exact sum of {slices} slices and {slots} slots, stride {each_STkH.stride(3)}: at "
            f"most {MOST_TERMS} summands in contiguous rows can be added exactly"
        )
    out = torch.empty((tokens, width), device=each_STkH.device, dtype=dtype)
    if tokens:
        block = min(1024, triton.next_power_of_2(width))
        _sum_kernel[(tokens, triton.cdiv(width, block))](
            each_STkH, out, width, each_STkH.stride(0), each_STkH.stride(1),
            each_STkH.stride(2), slices, slots, block, num_warps=4,
        )  # fmt: skip
    return out


def partial_sum(each_STkH: Tensor) -> Tensor:
    """What one rank adds to the all-reduce: ``[S, T, k, H]`` bf16 to ``[T, H]`` float64.

    The all-reduce must add in float64; :func:`rounded` ends the sum. No more than
    :data:`MOST_TERMS` summands may meet over all ranks.
    """
    return _launch(each_STkH, torch.float64)


def whole_sum(each_STkH: Tensor) -> Tensor:
    """``rounded(partial_sum(each))``, where one rank holds every summand, in one kernel."""
    return _launch(each_STkH, each_STkH.dtype)


def rounded(total_TH: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A finished float64 sum, rounded to float32 and then to ``dtype``."""
    out = torch.empty(total_TH.shape, device=total_TH.device, dtype=dtype)
    if total_TH.numel():
        total_TH = total_TH.contiguous()
        _round_kernel[(triton.cdiv(total_TH.numel(), 1024),)](
            total_TH, out, total_TH.numel(), 1024, num_warps=4
        )
    return out
