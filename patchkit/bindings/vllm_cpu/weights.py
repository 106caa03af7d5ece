"""Where each loaded vLLM parameter sits in the trainer's layout, for any decoder.

vLLM's modules say themselves how they were cut: this walks the loaded model and
maps each layer by its class. Names and shapes are those of the transformers
model's ``state_dict()`` (experts stacked: ``experts.gate_up_proj`` ``[E, 2F, H]``).
A parameter of a class that is not known here is an error, never left out. The
protocol is that of :mod:`patchkit.runtime.weights`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from patchkit.bindings.claim import UncoveredLayerError

Piece = tuple[str, Tensor, tuple[int, ...], tuple[int, ...]]

# Checkpoint names of what vLLM merges, where the model does not say it itself.
_MERGED: Mapping[str, Sequence[str]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a worker stands."""

    tp_rank: int
    tp_size: int
    ep_rank: int
    ep_size: int


def _rows(name: str, tensor: Tensor, first: int, total: int) -> Piece:
    """A slice of the first dimension."""
    zeros = (0,) * (tensor.dim() - 1)
    return name, tensor, (first, *zeros), (total, *tensor.shape[1:])


def _whole(name: str, tensor: Tensor) -> Piece:
    return _rows(name, tensor, 0, len(tensor))


def as_stored(name: str, tensor: Tensor) -> Tensor:
    """A matrix that vLLM widened to float32 when it loaded it, as the bf16 that it was.

    A view: the upper half of every float32. The lower halves must be zero.
    """
    if tensor.dtype != torch.float32:
        return tensor
    halves = tensor.detach().view(torch.int16).unflatten(-1, (-1, 2))
    if bool(halves[..., 0].any()):
        raise UncoveredLayerError(
            name, {"dtype": ("float32 with more digits than bf16 has", "bf16, widened or not")}
        )
    return tensor.view(torch.bfloat16).unflatten(-1, (-1, 2))[..., 1]


def _qkv(prefix: str, names: Sequence[str], layer: Any, place: _Place) -> Iterator[Piece]:
    sizes = [
        layer.num_heads * layer.head_size,
        layer.num_kv_heads * layer.head_size,
        layer.num_kv_heads * getattr(layer, "v_head_size", layer.head_size),
    ]
    # With more ranks than key/value heads, several ranks hold the same head.
    kv_rank = place.tp_rank // layer.num_kv_head_replicas
    heads = (layer.total_num_heads // layer.num_heads, place.tp_rank)
    kv_heads = (layer.total_num_kv_heads // layer.num_kv_heads, kv_rank)
    for kind, tensor in layer.named_parameters(recurse=False):
        parts = tensor.split(sizes, dim=0)
        for name, part, (shares, rank) in zip(
            names, parts, (heads, kv_heads, kv_heads), strict=True
        ):
            yield _rows(f"{prefix}{name}.{kind}", part, rank * len(part), shares * len(part))


def _merged(prefix: str, names: Sequence[str], layer: Any, place: _Place) -> Iterator[Piece]:
    sizes = [size // place.tp_size for size in layer.output_sizes]
    for kind, tensor in layer.named_parameters(recurse=False):
        for name, part in zip(names, tensor.split(sizes, dim=0), strict=True):
            total = place.tp_size * len(part)
            yield _rows(f"{prefix}{name}.{kind}", part, place.tp_rank * len(part), total)


def _experts(prefix: str, layer: Any, place: _Place) -> Iterator[Piece]:
    w13, w2 = layer.w13_weight, layer.w2_weight
    tp_rank, tp_size = place.tp_rank, place.tp_size
    # With expert parallelism a rank holds whole experts, otherwise a slice of each.
    if place.ep_size > 1:
        tp_rank, tp_size = 0, 1
    held, double, hidden = w13.shape
    first, total = place.ep_rank * held, place.ep_size * held
    width = double // 2
    full = width * tp_size
    shape_13, shape_2 = (total, 2 * full, hidden), (total, hidden, full)
    start = tp_rank * width
    yield prefix + "gate_up_proj", w13[:, :width], (first, start, 0), shape_13
    yield prefix + "gate_up_proj", w13[:, width:], (first, full + start, 0), shape_13
    yield prefix + "down_proj", w2, (first, 0, start), shape_2


def _pieces(
    name: str,
    layer: Any,
    own: Mapping[str, Tensor],
    merged: Mapping[str, Sequence[str]],
    place: _Place,
) -> Iterable[Piece]:
    """The pieces of one layer's own parameters, ``own`` by name."""
    from vllm.model_executor.layers import layernorm, linear, vocab_parallel_embedding

    last = name.rpartition(".")[2]
    parent = name[: len(name) - len(last)]
    if isinstance(layer, linear.QKVParallelLinear):
        return _qkv(parent, merged[last], layer, place)
    if isinstance(layer, linear.MergedColumnParallelLinear):
        return _merged(parent, merged[last], layer, place)
    if isinstance(layer, linear.RowParallelLinear) and set(own) == {"weight"}:
        outputs, inputs = layer.weight.shape
        offsets, shape = (0, place.tp_rank * inputs), (outputs, inputs * place.tp_size)
        return [(name + ".weight", layer.weight, offsets, shape)]
    if isinstance(layer, linear.ReplicatedLinear):
        return [
            _whole(f"{name}.{kind}", as_stored(f"{name}.{kind}", t) if kind == "weight" else t)
            for kind, t in own.items()
        ]
    if isinstance(layer, vocab_parallel_embedding.VocabParallelEmbedding):
        shard = layer.shard_indices
        held = shard.org_vocab_end_index - shard.org_vocab_start_index
        first, total = shard.org_vocab_start_index, layer.org_vocab_size
        return [_rows(name + ".weight", layer.weight[:held], first, total)]
    if isinstance(layer, layernorm.RMSNorm):
        return [_whole(name + ".weight", layer.weight)]
    if set(own) == {"w13_weight", "w2_weight"}:
        return _experts(name.removesuffix("routed_experts").rstrip(".") + ".", layer, place)
    raise UncoveredLayerError(
        type(layer).__name__,
        {name: (f"parameters {sorted(own)}", "a layer that this weight map knows")},
    )


def _names(model: Any) -> dict[int, tuple[str, Any]]:
    """Each module once, under its shortest name: vLLM keeps some in two places."""
    found: dict[int, tuple[str, Any]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        known = found.get(id(module))
        if known is None or name.count(".") < known[0].count("."):
            found[id(module)] = (name, module)
    return found


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
        model: vLLM's causal model, loaded.
        tp_rank: Tensor-parallel rank of the worker.
        tp_size: Tensor-parallel size.
        ep_rank: Expert-parallel rank.
        ep_size: Expert-parallel size; 1 when experts are tensor-parallel.

    Yields:
        ``(name, view, offsets, global_shape)``.

    Raises:
        UncoveredLayerError: A layer with parameters that this map does not know.
    """
    place = _Place(tp_rank=tp_rank, tp_size=tp_size, ep_rank=ep_rank, ep_size=ep_size)
    merged = {**_MERGED, **getattr(model, "packed_modules_mapping", {})}
    seen: set[int] = set()
    for name, layer in _names(model).values():
        # A tied output layer holds the embedding's parameter, experts their gate's bias:
        # they have been given.
        own = {n: t for n, t in layer.named_parameters(recurse=False) if id(t) not in seen}
        if own:
            yield from _pieces(name, layer, own, merged, place)
        seen.update(map(id, own.values()))
