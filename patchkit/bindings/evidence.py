"""Evidence for patches whose absence a small sample need not show.

Each function says whether the operator that a patch replaces gives other bits than the
replacement does, on inputs made for the purpose. Patches name them in ``evidence``.
"""

from __future__ import annotations

import torch

from patchkit import providers
from patchkit.bindings.claim import TREE_CHUNKS


def row_parallel_is_rounded_per_rank() -> bool:
    """One tensor-parallel rank needs no tree; two that round their halves to bf16 do."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 128, generator=generator).bfloat16()
    weight = torch.randn(128, 128, generator=generator).bfloat16()
    tree = providers.linear(x, weight, chunks=TREE_CHUNKS).bfloat16()
    halves = [
        providers.linear(x[:, part], weight[:, part]).bfloat16()
        for part in (slice(64), slice(64, 128))
    ]
    return not torch.equal(tree, halves[0] + halves[1])


def stock_norm_differs() -> bool:
    """The mean of squares in float32, as transformers takes it, over many rows."""
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(20_000, 128, generator=generator)).bfloat16()
    weight = torch.randn(128, generator=generator).bfloat16()
    stock = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return not torch.equal(weight * stock.bfloat16(), providers.rms_norm(x, weight, 1e-6))


def stock_router_differs() -> bool:
    """Softmax, top-k and renormalisation in float32."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(512, 8, generator=generator)
    weights, _ = providers.route(logits, 2, renormalize=True)
    top = torch.softmax(logits, -1).topk(2, -1).values
    return not torch.equal(top / top.sum(-1, keepdim=True), weights)


def stock_grouped_router_differs() -> bool:
    """Sigmoid scores and their renormalisation in float32, as vLLM and transformers take them."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4096, 16, generator=generator)
    bias = torch.zeros(16)
    weights, chosen = providers.route_grouped(
        logits, 4, bias_E=bias, groups=4, kept_groups=2, renormalize=True
    )
    scores = logits.sigmoid().gather(-1, chosen)
    return not torch.equal(scores / scores.sum(-1, keepdim=True), weights)


def combined_per_rank_differs() -> bool:
    """Shared and routed outputs added per rank before the ranks are: another tree with two."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(2, 64, 128, generator=generator)
    routed = torch.randn(2, 64, 128, generator=generator)
    apart = providers.pairwise_tree(shared) + providers.pairwise_tree(routed)
    return not torch.equal(apart, providers.pairwise_tree(shared + routed))
