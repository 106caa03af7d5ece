"""Scaled dot-product attention in which every reduction is exact.

A query row's bits depend on its own query and on the keys and values that its
mask allows: not on the other rows, on how a prompt was cut into chunks, on the
padding of the batch or on where the pages of the cache lie.

Agreed roundings: scores float32, softmax weights float32, the weighted sum of
values exact and divided by the exact sum of weights, rounded to float32, then
to the stream's dtype.

Shapes: B sequences, T queries, L keys, H query heads, G key/value heads,
R = H / G query heads per key/value head, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from patchkit.providers.activation import shifted_exp
from patchkit.providers.exact_sum import check_terms, magnitude, preround
from patchkit.providers.linear import OPERAND_BITS

# Weights keep 22 bits and values 15: room for 2**16 keys.
_WEIGHT_BITS = 22
_VALUE_BITS = 15

# Scores held at a time, and keys pre-rounded at a time, in elements. Rows and
# sequences are independent, so these bound memory, and keep short sequences in
# the cache, without a say in any bit.
_BLOCK_ELEMENTS = 1 << 19
_BLOCK_KEYS = 1 << 18


def _grouped(q_BTHD: Tensor, groups: int) -> Tensor:
    """``[B, T, H, D]`` to ``[B, G, R*T, D]``: all queries of one key/value head together."""
    batch, tokens, heads, size = q_BTHD.shape
    per_group = heads // groups
    return (
        q_BTHD.view(batch, tokens, groups, per_group, size)
        .permute(0, 2, 3, 1, 4)
        .reshape(batch, groups, per_group * tokens, size)
    )


def _ungrouped(o_BGMD: Tensor, tokens: int) -> Tensor:
    """Undo :func:`_grouped`."""
    batch, groups, rows, size = o_BGMD.shape
    per_group = rows // tokens
    return (
        o_BGMD.view(batch, groups, per_group, tokens, size)
        .permute(0, 3, 1, 2, 4)
        .reshape(batch, tokens, groups * per_group, size)
    )


def _masked_scores(scores: Tensor, allowed_BTL: Tensor) -> Tensor:
    per_group = scores.shape[2] // allowed_BTL.shape[1]
    allowed = allowed_BTL[:, None].repeat(1, 1, per_group, 1)
    return scores.masked_fill(~allowed, float("-inf"))


def _scaled_values(v_BLGD: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Pre-rounded values in [-1, 1], the power of two taken out per key, and the broken keys.

    A key whose value holds a NaN or an infinity (an unused slot of a cache, or a
    damaged neighbour) becomes zero here, because 0 * NaN is NaN: it must not
    reach a row that is not allowed to see it. ``[B, G, L]`` bool, or None.
    """
    values = v_BLGD.transpose(1, 2).contiguous()
    scale = magnitude(values)
    finite = torch.isfinite(scale)
    broken = None
    if not bool(finite.all()):
        broken = ~finite[..., 0]
        values = values.masked_fill(~finite, 0.0)
        scale = magnitude(values)
    rounded = preround(values, _VALUE_BITS, scale).mul_(scale.reciprocal())
    return rounded, scale[..., 0], broken


def _forward_sequences(
    q_BTHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, allowed_BTL: Tensor, scale: float
) -> Tensor:
    """All queries of some sequences."""
    keys = preround(k_BLGD.transpose(1, 2).contiguous(), OPERAND_BITS)
    values, value_scale, broken = _scaled_values(v_BLGD)
    per_token = q_BTHD.shape[0] * q_BTHD.shape[2] * k_BLGD.shape[1]
    step = max(1, _BLOCK_ELEMENTS // max(1, per_token))
    blocks = [
        _forward_block(
            q_BTHD[:, start : start + step],
            keys,
            values,
            value_scale,
            broken,
            allowed_BTL[:, start : start + step],
            scale,
        )
        for start in range(0, q_BTHD.shape[1], step)
    ]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)


def _forward_block(
    q_BTHD: Tensor,
    keys_BGLD: Tensor,
    values_BGLD: Tensor,
    value_scale_BGL: Tensor,
    broken_BGL: Tensor | None,
    allowed_BTL: Tensor,
    scale: float,
) -> Tensor:
    """One block of query rows against pre-rounded keys and values."""
    groups = keys_BGLD.shape[1]
    queries = preround(_grouped(q_BTHD, groups), OPERAND_BITS)
    scores = torch.matmul(queries, keys_BGLD.transpose(-1, -2)).add_(0.0).float() * scale
    scores = _masked_scores(scores, allowed_BTL)
    # A row that may attend to nothing (padding) yields zeros, not NaN.
    empty = scores.amax(-1, keepdim=True) == float("-inf")
    weights, total = shifted_exp(scores.masked_fill(empty, 0.0))
    # Values were scaled per key to at most 1; the scale moves into the weight,
    # so that the quantum of a row depends on the keys it attends to, no others.
    scaled = weights.double() * value_scale_BGL[:, :, None, :]
    summed = torch.matmul(preround(scaled, _WEIGHT_BITS, magnitude(scaled)), values_BGLD)
    out = summed.add_(0.0).div_(total).masked_fill_(empty, 0.0)
    if broken_BGL is not None:
        seen = torch.matmul(allowed_BTL[:, None].float(), broken_BGL[..., None].float()) > 0
        out.masked_fill_(seen.repeat(1, 1, q_BTHD.shape[2] // groups, 1), torch.nan)
    return _ungrouped(out.float(), q_BTHD.shape[1]).to(q_BTHD.dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q_BTHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, allowed_BTL: Tensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(q_BTHD, k_BLGD, v_BLGD, allowed_BTL)
        ctx.scale = scale
        check_terms("attention", k_BLGD.shape[1], _WEIGHT_BITS + _VALUE_BITS)
        check_terms("attention (head size)", k_BLGD.shape[-1], 2 * OPERAND_BITS)
        if not q_BTHD.numel():
            return torch.empty_like(q_BTHD)
        step = max(1, _BLOCK_KEYS // max(1, k_BLGD[0].numel()))
        parts = [
            _forward_sequences(
                q_BTHD[start : start + step],
                k_BLGD[start : start + step],
                v_BLGD[start : start + step],
                allowed_BTL[start : start + step],
                scale,
            )
            for start in range(0, q_BTHD.shape[0], step)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad_BTHD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_BTHD, k_BLGD, v_BLGD, allowed_BTL = ctx.saved_tensors
        tokens, groups = q_BTHD.shape[1], k_BLGD.shape[2]
        if not q_BTHD.numel():
            return q_BTHD, torch.zeros_like(k_BLGD), torch.zeros_like(v_BLGD), None, None
        # What nobody attends to may be uninitialised memory, and 0 * NaN is NaN.
        unused = ~allowed_BTL.any(1)
        q = _grouped(q_BTHD, groups).float()
        k = k_BLGD.masked_fill(unused[:, :, None, None], 0.0).transpose(1, 2).float()
        v = v_BLGD.masked_fill(unused[:, :, None, None], 0.0).transpose(1, 2).float()
        grad = _grouped(grad_BTHD, groups).float()
        scores = _masked_scores(torch.matmul(q, k.transpose(-1, -2)) * ctx.scale, allowed_BTL)
        empty = scores.amax(-1, keepdim=True) == float("-inf")
        weights = torch.softmax(scores, dim=-1).masked_fill(empty, 0.0)
        grad_v = torch.matmul(weights.transpose(-1, -2), grad)
        grad_weights = torch.matmul(grad, v.transpose(-1, -2))
        inner = (grad_weights * weights).sum(-1, keepdim=True)
        grad_scores = weights * (grad_weights - inner) * ctx.scale
        grad_q = _ungrouped(torch.matmul(grad_scores, k), tokens)
        grad_k = torch.matmul(grad_scores.transpose(-1, -2), q)
        return (
            grad_q.to(q_BTHD.dtype),
            grad_k.transpose(1, 2).to(k_BLGD.dtype),
            grad_v.transpose(1, 2).to(v_BLGD.dtype),
            None,
            None,
        )


def attention(
    q_BTHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, allowed_BTL: Tensor, *, scale: float
) -> Tensor:
    """Attention of every query to the keys that its mask allows.

    Args:
        q_BTHD: ``[B, T, H, D]`` queries, bf16 or float32.
        k_BLGD: ``[B, L, G, D]`` keys; G divides H.
        v_BLGD: ``[B, L, G, D]`` values.
        allowed_BTL: ``[B, T, L]`` bool, True where the query may look.
        scale: Factor on the scores, usually ``D ** -0.5``.

    Returns:
        ``[B, T, H, D]`` in the dtype of the queries.

    Raises:
        ReductionTooLongError: More than 65,536 keys.
    """
    return _Attention.apply(q_BTHD, k_BLGD, v_BLGD, allowed_BTL, scale)
