"""Where each loaded vLLM parameter of Qwen3-MoE sits in the trainer's layout.

Names and shapes are those of ``Qwen3MoeForCausalLM.state_dict()`` in transformers
5 (experts stacked: ``experts.gate_up_proj`` ``[E, 2F, H]``). The protocol is that of
:mod:`patchkit.runtime.weights`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

Piece = tuple[str, Tensor, tuple[int, ...], tuple[int, ...]]


def _rows(name: str, tensor: Tensor, first: int, total: int) -> Piece:
    """A slice of the first dimension."""
    zeros = (0,) * (tensor.dim() - 1)
    return name, tensor, (first, *zeros), (total, *tensor.shape[1:])


def _attention(prefix: str, attention: Any, tp_rank: int, tp_size: int) -> Iterator[Piece]:
    qkv, size = attention.qkv_proj, attention.head_dim
    q, k, v = qkv.weight.split(
        [qkv.num_heads * size, qkv.num_kv_heads * size, qkv.num_kv_heads * size], dim=0
    )
    yield _rows(prefix + "q_proj.weight", q, tp_rank * len(q), qkv.total_num_heads * size)
    # With more ranks than key/value heads, several ranks hold the same head.
    kv_rank = tp_rank // qkv.num_kv_head_replicas
    for name, part in (("k_proj.weight", k), ("v_proj.weight", v)):
        yield _rows(prefix + name, part, kv_rank * len(part), qkv.total_num_kv_heads * size)
    o = attention.o_proj.weight
    yield prefix + "o_proj.weight", o, (0, tp_rank * o.shape[1]), (o.shape[0], o.shape[1] * tp_size)
    for name in ("q_norm", "k_norm"):
        yield _rows(f"{prefix}{name}.weight", getattr(attention, name).weight, 0, size)


def _experts(
    prefix: str, w13: Tensor, w2: Tensor, tp_rank: int, tp_size: int, ep_rank: int, ep_size: int
) -> Iterator[Piece]:
    # With expert parallelism a rank holds whole experts, otherwise a slice of each.
    if ep_size > 1:
        tp_rank, tp_size = 0, 1
    held, double, hidden = w13.shape
    first, total = ep_rank * held, ep_size * held
    width = double // 2
    full = width * tp_size
    shape_13, shape_2 = (total, 2 * full, hidden), (total, hidden, full)
    start = tp_rank * width
    yield prefix + "gate_up_proj", w13[:, :width], (first, start, 0), shape_13
    yield prefix + "gate_up_proj", w13[:, width:], (first, full + start, 0), shape_13
    yield prefix + "down_proj", w2, (first, 0, start), shape_2


def weight_map(
    model: Any,
    *,
    tp_rank: int,
    tp_size: int,
    ep_rank: int = 0,
    ep_size: int = 1,
    **_: int,
) -> Iterator[Piece]:
    """Every piece that one vLLM worker holds.

    Args:
        model: vLLM's ``Qwen3MoeForCausalLM``, loaded.
        tp_rank: Tensor-parallel rank of the worker.
        tp_size: Tensor-parallel size.
        ep_rank: Expert-parallel rank.
        ep_size: Expert-parallel size; 1 when experts are tensor-parallel.

    Yields:
        ``(name, view, offsets, global_shape)``.
    """
    config = model.config
    vocabularies = [("model.embed_tokens.weight", model.model.embed_tokens)]
    if not config.tie_word_embeddings:
        vocabularies.append(("lm_head.weight", model.lm_head))
    for name, layer in vocabularies:
        shard = layer.shard_indices
        held = shard.org_vocab_end_index - shard.org_vocab_start_index
        yield _rows(name, layer.weight[:held], shard.org_vocab_start_index, layer.org_vocab_size)
    yield _rows("model.norm.weight", model.model.norm.weight, 0, config.hidden_size)
    for index, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{index}."
        yield from _attention(prefix + "self_attn.", layer.self_attn, tp_rank, tp_size)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield _rows(
                f"{prefix}{name}.weight", getattr(layer, name).weight, 0, config.hidden_size
            )
        yield _rows(prefix + "mlp.gate.weight", layer.mlp.gate.weight, 0, config.num_experts)
        routed = getattr(layer.mlp.experts, "routed_experts", layer.mlp.experts)
        yield from _experts(
            prefix + "mlp.experts.",
            routed.w13_weight,
            routed.w2_weight,
            tp_rank,
            tp_size,
            ep_rank,
            ep_size,
        )
