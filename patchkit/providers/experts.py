"""Mixture-of-experts feed-forward layer.

Agreed roundings: gate and up projections rounded to the stream's dtype before
the activation, the activation rounded before the down projection; each expert's
output stays float32, is multiplied by its router weight in float32 and added in
ascending expert id; slices of the intermediate dimension are added as a pairwise
tree, whose upper levels are the tensor-parallel ranks; one rounding at the end,
by the caller.

Shapes: T tokens, k experts per token, E experts, P pairs of token and expert,
F intermediate width held here, H hidden width, C slices of F.
"""

from __future__ import annotations

import torch
from torch import Tensor

from patchkit.providers.activation import silu_mul
from patchkit.providers.linear import linear_chunks

# Tokens handled at a time; bounds the [T, k, C, H] block. Rows are independent.
_BLOCK_TOKENS = 1024

# Below this many weight elements per expert, calling an operator costs more than
# what it computes: all experts in use then share one padded batch of products.
_BATCHED_WEIGHTS = 1 << 16
# Padding that the batch may add: rows computed per row needed.
_BATCHED_WASTE = 4


def _feed_forward(x: Tensor, w13: Tensor, w2: Tensor, chunks: int) -> Tensor:
    """One expert, or E experts side by side: ``[..., T, H]`` to ``[C, ..., T, H]``."""
    hidden = linear_chunks(x, w13, 1)[0].to(x.dtype)
    return linear_chunks(silu_mul(hidden), w2, chunks)


def _one_by_one(
    x_PH: Tensor, counts: list[int], w13_EFH: Tensor, w2_EHF: Tensor, chunks: int
) -> Tensor:
    """Each expert on its own rows: ``[P, H]``, grouped by expert, to ``[C, P, H]``."""
    outputs, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            rows = x_PH[start : start + count]
            outputs.append(_feed_forward(rows, w13_EFH[expert], w2_EHF[expert], chunks))
            start += count
    return torch.cat(outputs, dim=1)


def _side_by_side(
    x_PH: Tensor, counts: list[int], w13_EFH: Tensor, w2_EHF: Tensor, chunks: int
) -> Tensor:
    """The same bits as :func:`_one_by_one`, in one batch padded with zero rows."""
    used = [expert for expert, count in enumerate(counts) if count]
    longest = max(counts)
    # Where each row goes in the padded [experts * longest] rows.
    target = torch.tensor(
        [slot * longest + row for slot, expert in enumerate(used) for row in range(counts[expert])],
        device=x_PH.device,
    )
    padded = x_PH.new_zeros(len(used) * longest, x_PH.shape[1]).index_copy(0, target, x_PH)
    if len(used) < len(counts):
        w13_EFH, w2_EHF = w13_EFH[used], w2_EHF[used]
    parts = _feed_forward(padded.view(len(used), longest, -1), w13_EFH, w2_EHF, chunks)
    return parts.flatten(1, 2)[:, target]


def _block(
    x_TH: Tensor, expert_Tk: Tensor, weight_Tk: Tensor, w13_EFH: Tensor, w2_EHF: Tensor, chunks: int
) -> Tensor:
    tokens, top_k = expert_Tk.shape
    # Ascending expert id within each token: the order of the sum below.
    expert_Tk, order = expert_Tk.sort(dim=-1)
    weight_Tk = weight_Tk.gather(-1, order)
    # The same pairs grouped by expert.
    flat_expert, by_expert = expert_Tk.reshape(-1).sort(stable=True)
    counts = torch.bincount(flat_expert, minlength=w13_EFH.shape[0]).tolist()
    in_use = len(counts) - counts.count(0)
    small = w13_EFH[0].numel() <= _BATCHED_WEIGHTS
    batched = small and in_use * max(counts) <= _BATCHED_WASTE * by_expert.numel()
    products = _side_by_side if batched else _one_by_one
    parts = products(x_TH[by_expert // top_k], counts, w13_EFH, w2_EHF, chunks)
    back = torch.empty_like(by_expert)
    back[by_expert] = torch.arange(by_expert.numel(), device=by_expert.device)
    each_CTkH = parts[:, back].view(chunks, tokens, top_k, -1) * weight_Tk[None, :, :, None]
    total = each_CTkH[:, :, 0]
    for slot in range(1, top_k):
        total = total + each_CTkH[:, :, slot]
    return total


def experts_chunks(
    x_TH: Tensor,
    expert_Tk: Tensor,
    weight_Tk: Tensor,
    w13_EFH: Tensor,
    w2_EHF: Tensor,
    *,
    chunks: int,
) -> Tensor:
    """Weighted expert outputs, one partial sum per slice of the intermediate width.

    Args:
        x_TH: ``[T, H]`` tokens, bf16 or float32.
        expert_Tk: ``[T, k]`` integer expert ids, all different within a row.
        weight_Tk: ``[T, k]`` float32 router weights.
        w13_EFH: ``[E, 2F, H]`` gate and up projections, gate first.
        w2_EHF: ``[E, H, F]`` down projections.
        chunks: Slices of F held here.

    Returns:
        ``[C, T, H]`` float32 partial sums, to be added as a pairwise tree.
    """
    if not x_TH.shape[0]:
        return x_TH.new_zeros((chunks, 0, w2_EHF.shape[1]), dtype=torch.float32)
    blocks = [
        _block(
            x_TH[start : start + _BLOCK_TOKENS],
            expert_Tk[start : start + _BLOCK_TOKENS].long(),
            weight_Tk[start : start + _BLOCK_TOKENS],
            w13_EFH,
            w2_EHF,
            chunks,
        )
        for start in range(0, x_TH.shape[0], _BLOCK_TOKENS)
    ]
    return torch.cat(blocks, dim=1)
