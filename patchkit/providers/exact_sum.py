"""Sums whose bits cannot depend on the order in which they are added.

Floating-point addition is not associative, so a sum's bits depend on its order:
on the batch's shape, the thread count, the BLAS library, the tensor-parallel
size. The reference providers avoid the question instead of fixing an order:

1. *Pre-round*: every summand becomes a multiple of one quantum (a power of two
   taken from the largest magnitude of the row itself).
2. Add in float64. When ``terms * 2**bits <= 2**53``, every partial sum is an
   integer multiple of the quantum with at most 53 significant bits, hence
   **exact**: any order, any blocking, any thread count, fused multiply-add or
   not, gives the same number.
3. Round once to the output's dtype.

The row's quantum depends on that row only, so the result is also independent
of its neighbours in the batch and of padding with zeros. Pre-rounding costs at
most ``2**-bits`` of the row's largest magnitude, far below what the bf16
operands themselves carry. The idea is that of reproducible summation by
pre-rounding (Demmel and Nguyen, "Fast Reproducible Floating-Point Summation",
2013) and of error-free matrix multiplication (Ozaki et al., 2012).

Shapes use one letter per dimension: T tokens, K reduced dimension, N outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

# float64 holds every integer up to 2**53 exactly.
EXACT_BITS = 53


class ReductionTooLongError(ValueError):
    """A reduction has more terms than its pre-rounding leaves room for.

    Attributes:
        operator: The provider.
        terms: Terms asked for.
        limit: The most it can add exactly.
    """

    def __init__(self, operator: str, terms: int, limit: int) -> None:
        self.operator, self.terms, self.limit = operator, terms, limit
        super().__init__(
            f"{operator}: {terms} terms in one exact reduction, at most {limit} are possible; "
            "split the reduction into more chunks, or leave this shape to another provider"
        )


_LONG_ROW = 64
_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# Exponent bits of a float64, and what stands in for the magnitude of zero: any
# power of two would do, a tiny one takes no precision from what it is mixed with.
_EXPONENT = 0x7FF0000000000000
_ZERO_MAGNITUDE = 2.0**-960


def magnitude(x: Tensor) -> Tensor:
    """Smallest power of two that is above every ``|x|`` of the last dimension.

    Args:
        x: ``[..., K]``, bf16, float16, float32, or float64 within the range of
            float32. K is at least 1.

    Returns:
        ``[..., 1]`` float64; tiny for an all-zero row; infinite where the row
        holds a NaN or an infinity, which :func:`preround` turns into NaN, so that
        the damage shows in that row and only there.
    """
    # The bit patterns of floats without a sign are ordered as the floats are, with
    # NaN on top; integers have the faster maximum, narrow ones over long rows only.
    if x.element_size() == 2 and x.shape[-1] < _LONG_ROW:
        x = x.float()
    pattern = x.detach().abs().view(_INTEGER[x.element_size()])
    top = pattern.amax(-1, keepdim=True).view(x.dtype).double()
    # 2**floor(log2(top)), read off the bits: no pow, whose accuracy is a library's.
    power = (top.view(torch.int64) & _EXPONENT).view(torch.float64)
    return power.mul_(2.0).clamp_min_(_ZERO_MAGNITUDE)


def preround(x: Tensor, bits: int, scale: Tensor | None = None) -> Tensor:
    """Round every element to a multiple of ``scale * 2**-bits``, as float64.

    Args:
        x: ``[..., K]``.
        bits: Bits kept below the row's magnitude.
        scale: Power of two at least as large as every ``|x|`` of the row;
            ``magnitude(x)`` when left out.

    Adding and subtracting ``1.5 * 2**52`` quanta rounds to the nearest quantum
    (ties to even) with IEEE additions alone.
    """
    if scale is None:
        scale = magnitude(x)
    anchor = scale * (1.5 * 2.0 ** (52 - bits))
    return x.to(torch.float64, copy=True).add_(anchor).sub_(anchor)


def check_terms(operator: str, terms: int, bits: int) -> None:
    """Raise unless ``terms`` products of ``bits`` bits add up exactly."""
    limit = 1 << (EXACT_BITS - bits)
    if terms > limit:
        raise ReductionTooLongError(operator, terms, limit)


def exact_sum(x: Tensor, *, bits: int = 32, scale: Tensor | None = None) -> Tensor:
    """Order-independent sum over the last dimension: ``[..., K]`` to ``[..., 1]`` float64.

    ``bits=32`` allows 2**21 terms, more than any vocabulary in use.
    """
    check_terms("exact_sum", x.shape[-1], bits)
    return preround(x, bits, scale).sum(-1, keepdim=True)


def pairwise_tree(parts: Tensor) -> Tensor:
    """Add ``[C, ...]`` over the first dimension, neighbours first.

    With C chunks spread evenly over R ranks (both powers of two), the lower
    levels are what each rank computes alone and the upper levels combine the
    ranks: the same additions whatever R is, hence the same bits. The order is
    that of "tree-based invariant kernels" (arXiv 2511.17826).
    """
    while parts.shape[0] > 1:
        half = parts.shape[0] // 2
        paired = parts[0 : 2 * half : 2] + parts[1 : 2 * half : 2]
        parts = torch.cat([paired, parts[2 * half :]]) if parts.shape[0] % 2 else paired
    return parts[0]
