"""Attention over vLLM's paged cache.

The cache is [blocks, kv heads, block, 2 * head size]. vLLM's kernels store keys
in a layout that depends on the processor; here the last dimension simply holds
the key, then the value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from patchkit import providers
from patchkit.bindings.claim import plain, refuse_unless

# Elements of one padded batch of single-token queries; bounds memory only.
_DECODE_ELEMENTS = 1 << 22


def kv_cache_update(
    self: Any,
    layer: torch.nn.Module,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """``CPUAttentionBackendImpl.do_kv_cache_update``: write keys and values to their slots."""
    count = slot_mapping.shape[0]
    used = slot_mapping >= 0
    slots = slot_mapping[used].long()
    block_size = kv_cache.shape[2]
    entry = torch.cat([key[:count], value[:count]], dim=-1)[used]
    kv_cache[slots // block_size, :, slots % block_size] = entry


def _pages(kv_cache: Tensor, block_table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values of some sequences: two ``[B, L, G, D]``, L a multiple of the block."""
    block_size = kv_cache.shape[2]
    # A shorter sequence's row ends in whatever the table held before; it is masked.
    blocks = block_table[:, : -(-length // block_size)].clamp_min(0)
    # index_select copies whole blocks: twice as fast as kv_cache[blocks].
    entries = kv_cache.index_select(0, blocks.flatten()).view(*blocks.shape, *kv_cache.shape[1:])
    key, value = entries.permute(0, 1, 3, 2, 4).flatten(1, 2).chunk(2, dim=-1)
    return key, value


def attention_forward(
    self: Any,
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    attn_metadata: Any,
    output: Tensor,
    output_scale: Tensor | None = None,
    output_block_scale: Tensor | None = None,
) -> Tensor:
    """``CPUAttentionBackendImpl.forward``: every query against its own cached context."""
    refuse_unless(
        self,
        attn_type=(plain(self.attn_type), "decoder"),
        sliding_window=(self.sliding_window, -1),
        logits_soft_cap=(self.logits_soft_cap, 0),
        alibi_slopes=(self.alibi_slopes is None, True),
        sinks=(self.sinks is None, True),
        is_fp8_kv_cache=(self.is_fp8_kv_cache, False),
        output_scale=(output_scale is None and output_block_scale is None, True),
    )
    if attn_metadata is None:  # profiling run: there is no cache yet
        return output
    refuse_unless(self, causal=(bool(attn_metadata.causal), True))
    starts = attn_metadata.query_start_loc
    lengths = attn_metadata.seq_lens
    query_lengths = (starts[1:] - starts[:-1]).tolist()
    context_lengths = lengths.tolist()
    table = attn_metadata.block_table

    def attend(requests: list[int], rows: Tensor, tokens: int) -> None:
        longest = max(context_lengths[r] for r in requests)
        keys, values = _pages(kv_cache, table[requests], longest)
        context = lengths[requests][:, None, None]
        # Position of each query within its sequence: the last `tokens` of it.
        position = context - tokens + torch.arange(tokens)[None, :, None]
        allowed = torch.arange(keys.shape[1])[None, None, :] <= position
        found = providers.attention(
            query[rows].view(len(requests), tokens, *query.shape[1:]),
            keys,
            values,
            allowed,
            scale=self.scale,
        )
        output[rows] = found.view(-1, *query.shape[1:]).view(-1, *output.shape[1:])

    decodes = [r for r, tokens in enumerate(query_lengths) if tokens == 1]
    per_context = query.shape[1] * query.shape[2]
    while decodes:
        longest = max(context_lengths[r] for r in decodes)
        batch = max(1, _DECODE_ELEMENTS // (longest * per_context))
        attend(decodes[:batch], starts[decodes[:batch]].long(), 1)
        decodes = decodes[batch:]
    for request, tokens in enumerate(query_lengths):
        if tokens > 1:
            start = int(starts[request])
            attend([request], torch.arange(start, start + tokens), tokens)
    return output
