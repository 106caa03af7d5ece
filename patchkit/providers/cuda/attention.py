"""Causal attention over packed sequences: vLLM's FlashAttention 3 with one split.

With ``num_splits=1`` a query's bits depend on its own sequence only: packed and
contiguous here, paged in the rollout, chunked or served from the prefix cache.
vLLM ships FlashAttention 3 without a backward; PyTorch's FlashAttention 2
backward takes its place, fed with FlashAttention 3's output and log-sum-exp, from
which it recomputes the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from patchkit.providers.cuda.packing import Packing


def attention_forward(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, packing: Packing, scale: float
) -> tuple[Tensor, Tensor]:
    """Output ``[T, H, D]`` bf16 and log-sum-exp ``[H, T]`` float32, without autograd."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        q_THD,
        k_TGD,
        v_TGD,
        max_seqlen_q=packing.longest,
        cu_seqlens_q=packing.starts,
        max_seqlen_k=packing.longest,
        cu_seqlens_k=packing.starts,
        softmax_scale=scale,
        causal=True,
        return_softmax_lse=True,
        num_splits=1,
        fa_version=3,
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, packing: Packing, scale: float
    ) -> Tensor:
        out, lse = attention_forward(q_THD, k_TGD, v_TGD, packing, scale)
        ctx.save_for_backward(q_THD, k_TGD, v_TGD, out, lse)
        ctx.packing, ctx.scale = packing, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        packing = ctx.packing
        # Philox seed and offset of a dropout that does not happen.
        unused = torch.zeros(2, dtype=torch.int64, device=q.device)
        grads = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), q, k, v, out, lse, packing.starts, packing.starts,
            packing.longest, packing.longest, 0.0, True, unused, unused, scale=ctx.scale,
        )  # fmt: skip
        return (*grads, None, None)


def attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, packing: Packing, *, scale: float
) -> Tensor:
    """Causal attention of every token to its own sequence.

    Args:
        q_THD: ``[T, H, D]`` bf16, only real tokens, contiguous.
        k_TGD: ``[T, G, D]``; G divides H.
        v_TGD: ``[T, G, D]``.
        packing: Where the sequences begin.
        scale: Factor on the scores, usually ``D ** -0.5``.

    Returns:
        ``[T, H, D]`` bf16.
    """
    return _Attention.apply(q_THD, k_TGD, v_TGD, packing, scale)
