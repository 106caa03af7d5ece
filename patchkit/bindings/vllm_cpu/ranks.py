"""Combining what tensor-parallel ranks hold: the upper levels of one pairwise tree."""

from __future__ import annotations

from torch import Tensor

from patchkit import providers


def tree_over_ranks(partial: Tensor) -> Tensor:
    """Combine float32 partial sums of all tensor-parallel ranks, in rank order."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return partial
    return providers.pairwise_tree(group.all_gather(partial.contiguous()[None], dim=0))
