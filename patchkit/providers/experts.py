"""Mixture-of-experts feed-forward layer.

Agreed roundings: gate and up projections rounded to the stream's dtype before
the activation, the activation rounded before the down projection; each expert's
output stays float32, is multiplied by its router weight in float32 and added in
ascending expert id; slices of the intermediate dimension are added as a pairwise
tree, whose upper levels are the tensor-parallel ranks; one rounding at the end,
by the caller.

Shapes: T tokens, k experts per token, E experts, F intermediate width held here,
H hidden width, C slices of F.
"""

from __future__ import annotations

import torch
from torch import Tensor

from patchkit.providers.activation import silu_mul
from patchkit.providers.linear import linear, linear_chunks

# Tokens handled at a time; bounds the [T, k, C, H] block. Rows are independent.
_BLOCK_TOKENS = 1024


def _block(
    x_TH: Tensor, expert_Tk: Tensor, weight_Tk: Tensor, w13_EFH: Tensor, w2_EHF: Tensor, chunks: int
) -> Tensor:
    tokens, top_k = expert_Tk.shape
    # Ascending expert id within each token: the order of the sum below.
    expert_Tk, order = expert_Tk.sort(dim=-1)
    weight_Tk = weight_Tk.gather(-1, order)
    # The same pairs grouped by expert: one matrix product each.
    flat_expert, by_expert = expert_Tk.reshape(-1).sort(stable=True)
    counts = torch.bincount(flat_expert, minlength=w13_EFH.shape[0]).tolist()
    outputs, start = [], 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        pairs = by_expert[start : start + count]
        start += count
        hidden = linear(x_TH[pairs // top_k], w13_EFH[expert]).to(x_TH.dtype)
        outputs.append(linear_chunks(silu_mul(hidden), w2_EHF[expert], chunks))
    stacked = torch.cat(outputs, dim=1)
    back = torch.empty_like(by_expert)
    back[by_expert] = torch.arange(by_expert.numel(), device=by_expert.device)
    each_CTkH = stacked[:, back].view(chunks, tokens, top_k, -1) * weight_Tk[None, :, :, None]
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
            w13_EFH, w2_EHF, chunks,
        )
        for start in range(0, x_TH.shape[0], _BLOCK_TOKENS)
    ]
    return torch.cat(blocks, dim=1)
