"""The operators on a decoder's forward path, as the conformance kit wants them.

Device, dtype and the implementation are parameters: the reference providers
here, anything with the same functions elsewhere. An adapter gives the shape.

Shapes: T tokens, E experts, k experts per token; the rest as in the providers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from patchkit import providers
from patchkit.bindings.claim import TREE_CHUNKS
from patchkit.bindings.vllm_cpu import attention as paged
from patchkit.parity.conformance import (
    AttentionOperator,
    PagedOperator,
    RouterOperator,
    RowOperator,
)

_EPS = 1e-6
_ROPE_BASE = 1e6

# Random numbers drawn per tensor: a prime, so that rows do not repeat in step.
_DRAWN = 16_777_213


Operator = RowOperator | AttentionOperator | PagedOperator


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a model that its operators see; 0 where it has no such layer.

    Attributes:
        hidden: Width of the residual stream.
        vocabulary: Rows of the output layer.
        heads: Query heads.
        kv_heads: Key/value heads.
        head_size: Width of a head.
        max_position: ``max_position_embeddings``.
        qk_norm: Whether queries and keys are normed.
        dense_width: Intermediate width of dense feed-forward layers.
        moe_width: Intermediate width of an expert.
        experts: Routed experts.
        top_k: Experts per token.
        shared_width: Intermediate width of shared experts.
        groups: Groups of experts of a sigmoid router; 0 for a softmax router.
        kept_groups: Groups that experts are chosen from.
        rotary_dim: Elements of a head that are rotated; all if 0.
        qkv_bias: Whether the projections of queries, keys and values have a bias.
    """

    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_size: int
    max_position: int
    qk_norm: bool = True
    dense_width: int = 0
    moe_width: int = 0
    experts: int = 0
    top_k: int = 0
    shared_width: int = 0
    groups: int = 0
    kept_groups: int = 0
    rotary_dim: int = 0
    qkv_bias: bool = False


class _Random:
    """Reproducible tensors; drawn on the CPU, so that every device gets the same."""

    def __init__(self, seed: int, device: str | torch.device, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._device, self._dtype = device, dtype

    def normal(self, *size: int, std: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Large tensors repeat one draw: real widths in a second instead of ten."""
        count = math.prod(size)
        values = torch.randn(min(count, _DRAWN), generator=self._generator) * std
        values = values.to(self._device, dtype or self._dtype)
        return values.repeat(-(-count // _DRAWN) or 1)[:count].view(size)

    def spread(self, *size: int) -> Tensor:
        """Rows of very different magnitude, as hidden states have."""
        scale = torch.randn(size[0], *[1] * (len(size) - 1), generator=self._generator).exp()
        return (self.normal(*size, dtype=torch.float32).cpu() * scale).to(self._device, self._dtype)

    def integers(self, high: int, *size: int) -> Tensor:
        return torch.randint(0, high, size, generator=self._generator).to(self._device)

    def choices(self, rows: int, high: int, count: int) -> Tensor:
        """``count`` different integers in every row."""
        noise = torch.rand(rows, high, generator=self._generator)
        return noise.argsort(-1)[:, :count].to(self._device)


@dataclass(frozen=True, kw_only=True)
class Operators:
    """Builds the operators of one shape.

    Attributes:
        shape: Sizes of the model.
        row_counts: Batch sizes to try.
        device: Where everything runs.
        dtype: Of the residual stream and the weights.
        provider: A namespace with the functions of :mod:`patchkit.providers`.
        chunks: Slices of K in row-parallel layers.
    """

    shape: Shape
    row_counts: tuple[int, ...]
    device: str | torch.device = "cpu"
    dtype: torch.dtype = torch.bfloat16
    provider: Any = providers
    chunks: int = TREE_CHUNKS

    def _random(self, seed: int) -> _Random:
        return _Random(seed, self.device, self.dtype)

    @property
    def _rows(self) -> int:
        return max(self.row_counts)

    def linear(self, name: str, outputs: int, inputs: int, *, bias: bool = False) -> RowOperator:
        """A column-parallel layer: each rank has its share of the outputs."""
        random, linear = self._random(1), self.provider.linear

        def run(x: Tensor, weight: Tensor, **bias: Tensor) -> Tensor:
            product: Tensor = linear(x, weight, **bias)
            return product

        def sharded(ranks: int, x: Tensor, weight: Tensor, **bias: Tensor) -> Tensor:
            parts = [{"weight": part} for part in weight.chunk(ranks)]
            for key, whole in bias.items():
                for part, own in zip(parts, whole.chunk(ranks), strict=True):
                    part[key] = own
            return torch.cat([run(x, **part) for part in parts], dim=-1)

        inputs_, weights = (
            {"x": random.spread(self._rows, inputs)},
            {"weight": random.normal(outputs, inputs, std=inputs**-0.5)},
        )
        if bias:
            weights["bias"] = random.normal(outputs)
        return RowOperator(
            name=f"{name} linear [N={outputs}, K={inputs}{', bias' if bias else ''}]",
            run=run,
            inputs=inputs_,
            weights=weights,
            row_counts=self.row_counts,
            sharded=sharded,
        )

    def row_parallel(
        self, name: str, outputs: int, inputs: int, chunks: int | None = None
    ) -> RowOperator:
        """A row-parallel layer: each rank has its share of the inputs."""
        chunks = self.chunks if chunks is None else chunks
        random, provider = self._random(2), self.provider

        def sharded(ranks: int, x: Tensor, weight: Tensor) -> Tensor:
            pairs = zip(x.chunk(ranks, dim=-1), weight.chunk(ranks, dim=-1), strict=True)
            parts = [provider.linear(a, b, chunks=chunks // ranks) for a, b in pairs]
            return provider.pairwise_tree(torch.stack(parts))

        return RowOperator(
            name=f"{name} linear [N={outputs}, K={inputs} in {chunks} chunks]",
            run=lambda x, weight: provider.linear(x, weight, chunks=chunks),
            inputs={"x": random.spread(self._rows, inputs)},
            weights={"weight": random.normal(outputs, inputs, std=inputs**-0.5)},
            row_counts=self.row_counts,
            sharded=sharded,
            ranks=tuple(ranks for ranks in (1, 2, 4) if chunks % ranks == 0),
        )

    def embedding(self) -> RowOperator:
        """Vocabulary-parallel lookup: a rank contributes zeros for other ranks' tokens."""
        shape, random = self.shape, self._random(3)

        def sharded(ranks: int, ids: Tensor, weight: Tensor) -> Tensor:
            total, first = None, 0
            for part in weight.chunk(ranks):
                mine = (ids >= first) & (ids < first + len(part))
                rows = torch.nn.functional.embedding((ids - first) * mine, part)
                rows = rows.masked_fill(~mine[:, None], 0.0)
                total = rows if total is None else total + rows
                first += len(part)
            assert total is not None
            return total

        return RowOperator(
            name=f"embedding [V={shape.vocabulary}, K={shape.hidden}]",
            run=lambda ids, weight: torch.nn.functional.embedding(ids, weight),
            inputs={"ids": random.integers(shape.vocabulary, self._rows)},
            weights={"weight": random.normal(shape.vocabulary, shape.hidden, std=0.02)},
            row_counts=self.row_counts,
            sharded=sharded,
        )

    def rms_norm(self, width: int) -> RowOperator:
        random = self._random(4)
        return RowOperator(
            name=f"rms_norm [K={width}]",
            run=lambda x, weight: self.provider.rms_norm(x, weight, _EPS),
            inputs={"x": random.spread(self._rows, width)},
            weights={"weight": random.normal(width)},
            row_counts=self.row_counts,
        )

    def rms_norm_with_residual(self, width: int) -> RowOperator:
        random = self._random(5)

        def run(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            summed = self.provider.add_residual(x, residual)
            return self.provider.rms_norm(summed, weight, _EPS), summed

        return RowOperator(
            name=f"rms_norm with residual [K={width}]",
            run=run,
            inputs={
                "x": random.spread(self._rows, width),
                "residual": random.spread(self._rows, width),
            },
            weights={"weight": random.normal(width)},
            row_counts=self.row_counts,
        )

    def rotate(self) -> RowOperator:
        shape, random = self.shape, self._random(6)

        def run(x: Tensor, positions: Tensor) -> Tensor:
            partial = {"rotary_dim": shape.rotary_dim} if shape.rotary_dim else {}
            return self.provider.rotate(
                x, positions, base=_ROPE_BASE, max_position=shape.max_position, **partial
            )

        return RowOperator(
            name=f"rotate [H={shape.heads}, D={shape.rotary_dim or shape.head_size} of "
            f"{shape.head_size}]",
            run=run,
            inputs={
                "x": random.spread(self._rows, shape.heads, shape.head_size),
                "positions": random.integers(shape.max_position, self._rows),
            },
            row_counts=self.row_counts,
            sharded=lambda ranks, x, positions: torch.cat(
                [run(part, positions) for part in x.chunk(ranks, dim=1)], dim=1
            ),
        )

    def route(self) -> RouterOperator:
        shape, random = self.shape, self._random(7)
        return RouterOperator(
            name=f"route [E={shape.experts}, k={shape.top_k}]",
            run=lambda logits: self.provider.route(logits, shape.top_k, renormalize=True),
            inputs={"logits": random.normal(self._rows, shape.experts, dtype=torch.float32)},
            row_counts=self.row_counts,
            top_k=shape.top_k,
        )

    def route_grouped(self) -> RowOperator:
        """The sigmoid router with a correction bias, within groups."""
        shape, random = self.shape, self._random(15)
        return RowOperator(
            name=f"route_grouped [E={shape.experts}, k={shape.top_k}, "
            f"{shape.kept_groups} of {shape.groups} groups]",
            run=lambda logits, bias: self.provider.route_grouped(
                logits,
                shape.top_k,
                bias_E=bias,
                groups=shape.groups,
                kept_groups=shape.kept_groups,
                renormalize=True,
            ),
            inputs={"logits": random.normal(self._rows, shape.experts, dtype=torch.float32)},
            weights={"bias": random.normal(shape.experts, std=0.2, dtype=torch.float32)},
            row_counts=self.row_counts,
        )

    def experts(self) -> RowOperator:
        """The feed-forward layer, its intermediate width shared by the ranks."""
        shape, random, provider = self.shape, self._random(8), self.provider

        def run(
            x: Tensor, expert: Tensor, weight: Tensor, w13: Tensor, w2: Tensor, ranks: int = 1
        ) -> Tensor:
            parts = provider.experts_chunks(x, expert, weight, w13, w2, chunks=self.chunks // ranks)
            return provider.pairwise_tree(parts)

        def sharded(
            ranks: int, x: Tensor, expert: Tensor, weight: Tensor, w13: Tensor, w2: Tensor
        ) -> Tensor:
            gate, up = w13.chunk(2, dim=1)
            shares = zip(
                gate.chunk(ranks, dim=1),
                up.chunk(ranks, dim=1),
                w2.chunk(ranks, dim=2),
                strict=True,
            )
            parts = [
                run(x, expert, weight, torch.cat([g, u], dim=1), down, ranks)
                for g, u, down in shares
            ]
            return provider.pairwise_tree(torch.stack(parts))

        hidden, width = shape.hidden, shape.moe_width
        weights = torch.rand(self._rows, shape.top_k, generator=torch.Generator().manual_seed(9))
        return RowOperator(
            name=f"experts [E={shape.experts}, k={shape.top_k}, H={hidden}, F={width}]",
            run=run,
            inputs={
                "x": random.spread(self._rows, hidden),
                "expert": random.choices(self._rows, shape.experts, shape.top_k),
                "weight": (weights / weights.sum(-1, keepdim=True)).to(self.device),
            },
            weights={
                "w13": random.normal(shape.experts, 2 * width, hidden, std=hidden**-0.5),
                "w2": random.normal(shape.experts, hidden, width, std=width**-0.5),
            },
            row_counts=self.row_counts,
            sharded=sharded,
        )

    def silu_mul(self, width: int) -> RowOperator:
        random = self._random(10)
        return RowOperator(
            name=f"silu_mul [F={width}]",
            run=lambda gate_up: self.provider.silu_mul(gate_up),
            inputs={"gate_up": random.spread(self._rows, 2 * width)},
            row_counts=self.row_counts,
        )

    def log_softmax(self) -> RowOperator:
        random, size = self._random(11), self.shape.vocabulary
        return RowOperator(
            name=f"log_softmax [V={size}]",
            run=lambda logits: self.provider.log_softmax(logits),
            inputs={"logits": random.normal(self._rows, size, std=3.0, dtype=torch.float32)},
            row_counts=self.row_counts,
        )

    def selected_token_logprobs(self) -> RowOperator:
        random, size = self._random(12), self.shape.vocabulary
        return RowOperator(
            name=f"selected_token_logprobs [V={size}]",
            run=lambda logits, tokens: self.provider.selected_token_logprobs(logits, tokens),
            inputs={
                "logits": random.normal(self._rows, size, std=3.0, dtype=torch.float32),
                "tokens": random.integers(size, self._rows),
            },
            row_counts=self.row_counts,
        )

    def _heads(self, random: _Random, length: int) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.shape
        return (
            random.spread(length, shape.heads, shape.head_size),
            random.spread(length, shape.kv_heads, shape.head_size),
            random.spread(length, shape.kv_heads, shape.head_size),
        )

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
        return self.provider.attention(query, key, value, allowed, scale=self.shape.head_size**-0.5)

    def attention(self, length: int) -> AttentionOperator:
        query, key, value = self._heads(self._random(13), length)
        return AttentionOperator(
            name=f"attention [S={length}, H={query.shape[1]}, G={key.shape[1]}, D={key.shape[2]}]",
            run=self._attend,
            query=query,
            key=key,
            value=value,
        )

    def paged_attention(self, lengths: tuple[int, ...]) -> PagedOperator:
        """The rollout's attention over vLLM's cache against the trainer's."""
        random, shape = self._random(14), self.shape
        requests = [self._heads(random, length) for length in lengths]
        layer = SimpleNamespace(
            scale=shape.head_size**-0.5, attn_type="decoder", sliding_window=-1,
            logits_soft_cap=0, alibi_slopes=None, sinks=None, is_fp8_kv_cache=False,
        )  # fmt: skip

        def cache(blocks: int, block_size: int) -> Tensor:
            size = (blocks, shape.kv_heads, block_size, 2 * shape.head_size)
            return torch.empty(size, dtype=self.dtype, device=self.device)

        def write(kv_cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
            paged.kv_cache_update(layer, None, key, value, kv_cache, slots)  # type: ignore[arg-type]

        def read(
            query: Tensor, kv_cache: Tensor, table: Tensor, lengths: Tensor, starts: Tensor
        ) -> Tensor:
            metadata = SimpleNamespace(
                causal=True, query_start_loc=starts, seq_lens=lengths, block_table=table
            )
            # vLLM hands over a buffer that is wider than the step's tokens may need.
            output = torch.full_like(query, torch.nan)
            # The new keys and values are in the cache already.
            unread: Any = None
            return paged.attention_forward(
                layer, None, query, unread, unread, kv_cache, metadata, output
            )

        query, key, value = zip(*requests, strict=True)
        return PagedOperator(
            name=f"paged attention [S={list(lengths)}, H={shape.heads}, D={shape.head_size}]",
            cache=cache,
            write=write,
            read=read,
            dense=self._attend,
            query=query,
            key=key,
            value=value,
        )

    def all(self, *, context: int, requests: tuple[int, ...]) -> Iterator[Operator]:
        """Every operator on the forward path."""
        shape = self.shape
        attention_width = shape.heads * shape.head_size
        kv_width = shape.kv_heads * shape.head_size
        yield self.embedding()
        yield self.rms_norm(shape.hidden)
        yield self.rms_norm_with_residual(shape.hidden)
        qkv_width = attention_width + 2 * kv_width
        yield self.linear("qkv", qkv_width, shape.hidden, bias=shape.qkv_bias)
        if shape.qk_norm:
            yield self.rms_norm(shape.head_size)
        yield self.rotate()
        yield self.attention(context)
        yield self.paged_attention(requests)
        yield self.row_parallel("output", shape.hidden, attention_width)
        if shape.dense_width:
            yield self.linear("gate and up", 2 * shape.dense_width, shape.hidden)
            yield self.silu_mul(shape.dense_width)
            yield self.row_parallel("down", shape.hidden, shape.dense_width)
        if shape.experts:
            yield self.linear("router", shape.experts, shape.hidden)
            yield self.route_grouped() if shape.groups else self.route()
            yield self.experts()
            yield self.silu_mul(shape.moe_width)
        if shape.shared_width:
            yield self.linear("shared gate and up", 2 * shape.shared_width, shape.hidden)
            yield self.row_parallel("shared down", shape.hidden, shape.shared_width)
        yield self.linear("lm_head", shape.vocabulary, shape.hidden)
        yield self.log_softmax()
        yield self.selected_token_logprobs()
