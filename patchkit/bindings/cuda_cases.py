"""The trials by which :mod:`patchkit.providers.cuda` is admitted.

Those operators have other bits than the reference providers. What they promise is to have
the bits of the engine: every reference here is vLLM's own kernel on the same GPU, in the
tile of its batch-invariant mode, while the operators choose theirs by the number of rows.
Where a sum over slices or ranks is exact, the reference adds vLLM's results in whole
numbers of quanta. vLLM has no backward: gradients are compared with those of the same
function in float64.

Shapes use one letter per dimension, as in the operators: T tokens, K reduced dimension,
N outputs, H heads (in the experts: the hidden width), G key/value heads, D head size,
E experts, k experts per token, F intermediate width, V vocabulary, B sequences, S tokens
of the longest one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from patchkit.parity.admission import AdmissionCase
from patchkit.parity.conformance import RouterOperator, RowOperator
from patchkit.providers import cuda
from patchkit.providers.cuda.experts import expert_outputs
from patchkit.providers.cuda.linear import slice_products
from patchkit.providers.cuda.sums import QUANTUM_BITS, partial_sum, rounded

_EPS = 1e-6

# Random numbers drawn per tensor: a prime, so that rows do not repeat in step.
_DRAWN = 16_777_213

# Rows may lie anywhere. Addresses are multiples of 16 bytes, as PyTorch's allocator gives
# them: Triton compiles another kernel for others, which may add in another order.
_LAYOUTS = ("every second column", "every second row")

# FlashAttention and the grouped products round what is between them to bf16, too.
_ROUNDED_BETWEEN = 2.0**-5

# Of K, in the profiles whose bits depend on no topology.
_SLICES = (2, 4)

_BI_TILE = {
    "BLOCK_SIZE_M": 64,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 32,
    "GROUP_SIZE_M": 8,
    "SPLIT_K": 1,
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A decoder's, and how many rows are tried; by default those of Qwen3-30B-A3B.

    Attributes:
        hidden: Width of the residual stream.
        outputs: Of the products. Its rows, not its width, decide what a kernel does.
        heads: Query heads.
        kv_heads: Key/value heads.
        head_size: Width of a head.
        positions: Length of the table of angles.
        theta: Its base.
        experts: Routed experts.
        top_k: Experts per token.
        width: Intermediate width of an expert.
        vocabularies: Rows of output layers.
        rows: Batch sizes of operators whose tile follows the number of rows.
        few_rows: Of the others.
        many_rows: So many that every expert has a full block: its largest tile.
        sequences: Numbers of sequences.
        longest: Tokens of the longest sequence.
    """

    hidden: int = 2048
    outputs: int = 512
    heads: int = 32
    kv_heads: int = 4
    head_size: int = 128
    positions: int = 40_960
    theta: float = 1e6
    experts: int = 128
    top_k: int = 8
    width: int = 768
    vocabularies: tuple[int, ...] = (151_936, 1000)
    rows: tuple[int, ...] = (1, 2, 3, 7, 16, 17, 32, 33, 64, 65, 256, 257)
    few_rows: tuple[int, ...] = (1, 2, 3, 31, 33)
    many_rows: int = 1100
    sequences: tuple[int, ...] = (1, 2, 3, 9)
    longest: int = 300


@dataclass(frozen=True, kw_only=True)
class Cases:
    """Builds the cases of one size, for a device and a format of numbers.

    Attributes:
        sizes: Of the model.
        device: Where everything runs.
        dtype: Of activations and weights.
        whole: Draw small whole multiples of 1/8, whose sums no order rounds: for a dry run
            of the cases where a product's order is not the GPU's.
    """

    sizes: Sizes = Sizes()
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    whole: bool = False

    def all(self) -> Iterator[AdmissionCase]:
        """Every operator, small ones first."""
        yield self.cos_sin_table()
        yield self.rotate()
        for tail in ((self.sizes.hidden,), (self.sizes.kv_heads, self.sizes.head_size)):
            yield self.rms_norm("rms_norm", cuda.rms_norm, tail)
            yield self.rms_norm("rms_norm_forward", cuda.rms_norm_forward, tail)
        yield self.add_rms_norm()
        yield self.route()
        for vocabulary in self.sizes.vocabularies:
            yield self.selected_token_logprobs(vocabulary)
        yield self.linear()
        yield self.linear_of_two_ranks()
        for slices in _SLICES:
            yield self.linear_of_any_rank(slices)
        yield self.attention()
        yield self.experts_of_one_rank()
        yield self.experts_of_two_ranks()
        yield self.experts_of_two_blocks()
        for slices in _SLICES:
            yield self.experts_of_any_rank(slices)
        yield self.experts_of_any_block(max(_SLICES))

    # -- inputs: drawn on the CPU, so that every device gets the same -----------------------

    def _draw(
        self, seed: int, *size: int, scale: float = 1.0, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Large tensors repeat one draw: real widths in a second instead of ten."""
        count, generator = math.prod(size), torch.Generator().manual_seed(seed)
        values = torch.randn(min(count, _DRAWN), generator=generator)
        if self.whole:
            values = (values * 4).round().clamp(-16, 16) / 8
        else:
            values *= scale
        values = values.to(self.device, dtype or self.dtype)
        return values.repeat(-(-count // _DRAWN))[:count].view(size)

    def _integers(self, seed: int, high: int, *size: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, high, size, generator=generator).to(self.device)

    # -- norms -------------------------------------------------------------------------------

    def rms_norm(self, name: str, run: Callable[..., Tensor], tail: tuple[int, ...]) -> Any:
        """Of the residual stream, and of the heads of queries or keys."""

        def reference(x: Tensor, weight: Tensor) -> Tensor:
            from vllm.model_executor.layers.batch_invariant import rms_norm_batch_invariant

            result: Tensor = rms_norm_batch_invariant(x, weight, _EPS)
            return result

        count = max(self.sizes.few_rows)
        return AdmissionCase(
            name=name,
            operator=RowOperator(
                name=f"{name} {list(tail)}",
                run=lambda x, weight: run(x, weight, _EPS),
                inputs={"x": self._draw(1, count, *tail, scale=3.0)},
                weights={"weight": self._draw(2, tail[-1])},
                row_counts=self.sizes.few_rows,
                layouts=_LAYOUTS,
            ),
            reference=_without_backward(reference),
            gradients=_norm64 if run is cuda.rms_norm else None,
        )

    def add_rms_norm(self) -> AdmissionCase:
        """A rounded sum with the residual, and vLLM's norm of it."""

        def reference(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            from vllm.model_executor.layers.batch_invariant import rms_norm_batch_invariant

            summed = x + residual
            return rms_norm_batch_invariant(summed, weight, _EPS), summed

        width, count = self.sizes.hidden, max(self.sizes.few_rows)
        return AdmissionCase(
            name="add_rms_norm_forward",
            operator=RowOperator(
                name=f"add_rms_norm_forward [{width}]",
                run=lambda x, residual, weight: cuda.add_rms_norm_forward(
                    x, residual, weight, _EPS
                ),
                inputs={
                    "x": self._draw(3, count, width),
                    "residual": self._draw(4, count, width, scale=3.0),
                },
                weights={"weight": self._draw(5, width)},
                row_counts=self.sizes.few_rows,
                layouts=_LAYOUTS,
            ),
            reference=_without_backward(reference),
        )

    # -- rotation ----------------------------------------------------------------------------

    def _table(self) -> Tensor:
        sizes = self.sizes
        return cuda.cos_sin_table(
            sizes.head_size, sizes.theta, sizes.positions, torch.device(self.device)
        ).to(self.dtype)

    def cos_sin_table(self) -> AdmissionCase:
        """The rows of positions, against the table of vLLM's class."""
        sizes = self.sizes

        def reference(positions: Tensor) -> Tensor:
            return _engines_table(sizes, self.device).to(self.dtype)[positions]

        count = max(sizes.few_rows)
        return AdmissionCase(
            name="cos_sin_table",
            operator=RowOperator(
                name=f"cos_sin_table [{sizes.positions}, {sizes.head_size}]",
                run=lambda positions: self._table()[positions],
                inputs={"positions": self._integers(6, sizes.positions, count)},
                row_counts=sizes.few_rows,
            ),
            reference=reference,
        )

    def rotate(self) -> AdmissionCase:
        """Of queries; each head turns alone, so that ranks may share them."""
        sizes, table = self.sizes, self._table()

        def run(x: Tensor, positions: Tensor) -> Tensor:
            return cuda.rotate(x, positions, table)

        def reference(x: Tensor, positions: Tensor) -> Tensor:
            import vllm._custom_ops as ops

            turned = x.reshape(len(x), -1).clone()
            keys = x[:, 0].clone()
            ops.rotary_embedding(positions, turned, keys, sizes.head_size, table, True)
            return turned.view(x.shape)

        count = max(sizes.few_rows)
        return AdmissionCase(
            name="rotate",
            operator=RowOperator(
                name=f"rotate [{sizes.heads}, {sizes.head_size}]",
                run=run,
                inputs={
                    "x": self._draw(7, count, sizes.heads, sizes.head_size),
                    "positions": self._integers(8, sizes.positions, count),
                },
                row_counts=sizes.few_rows,
                sharded=lambda ranks, x, positions: torch.cat(
                    [run(part, positions) for part in x.chunk(ranks, dim=1)], dim=1
                ),
                layouts=_LAYOUTS,
            ),
            reference=_without_backward(reference),
            gradients=partial(_rotate64, table=table),
        )

    # -- router, log-probabilities -----------------------------------------------------------

    def route(self) -> AdmissionCase:
        """vLLM's kernel turns a NaN into zero: it shows in what the experts compute."""
        sizes = self.sizes

        def reference(logits: Tensor) -> tuple[Tensor, Tensor]:
            import vllm._custom_ops as ops

            weights = torch.empty((len(logits), sizes.top_k), device=logits.device)
            chosen = torch.empty_like(weights, dtype=torch.int32)
            ops.topk_softmax(weights, chosen, torch.empty_like(chosen), logits, True)
            return weights, chosen

        return AdmissionCase(
            name="route",
            operator=RouterOperator(
                name=f"route [E={sizes.experts}, k={sizes.top_k}]",
                run=lambda logits: cuda.route(logits, sizes.top_k, renormalize=True),
                inputs={"logits": self._draw(9, max(sizes.rows), sizes.experts)},
                row_counts=sizes.rows,
                layouts=_LAYOUTS,
                swallows_nan=True,
                top_k=sizes.top_k,
            ),
            reference=_without_backward(reference),
            gradients=partial(_route64, top_k=sizes.top_k),
        )

    def selected_token_logprobs(self, vocabulary: int) -> AdmissionCase:
        """One value of each row of vLLM's log-softmax."""

        def reference(logits: Tensor, tokens: Tensor) -> Tensor:
            from vllm.model_executor.layers.batch_invariant import log_softmax

            chosen: Tensor = log_softmax(logits.float()).gather(1, tokens[:, None])[:, 0]
            return chosen

        count = max(self.sizes.few_rows)
        return AdmissionCase(
            name="selected_token_logprobs",
            operator=RowOperator(
                name=f"selected_token_logprobs [V={vocabulary}]",
                run=lambda logits, tokens: cuda.selected_token_logprobs(logits, tokens),
                inputs={
                    "logits": self._draw(10, count, vocabulary, scale=4.0),
                    "tokens": self._integers(11, vocabulary, count),
                },
                row_counts=self.sizes.few_rows,
                layouts=_LAYOUTS,
            ),
            reference=_without_backward(reference),
            gradients=_logprobs64,
        )

    # -- products ----------------------------------------------------------------------------

    def _product(
        self, name: str, run: Callable[..., Tensor], reference: Callable[..., Tensor], **more: Any
    ) -> AdmissionCase:
        sizes = self.sizes
        shape = f"[N={sizes.outputs}, K={sizes.hidden}]"
        return AdmissionCase(
            name="linear",
            operator=RowOperator(
                name=f"{name} {shape}",
                run=run,
                inputs={"x": self._draw(12, max(sizes.rows), sizes.hidden)},
                weights={
                    "weight": self._draw(13, sizes.outputs, sizes.hidden, scale=sizes.hidden**-0.5)
                },
                row_counts=sizes.rows,
                layouts=_LAYOUTS,
                **more,
            ),
            reference=_without_backward(reference),
            gradients=lambda x, weight: (x.double() @ weight.double().t()).to(x.dtype),
        )

    def linear(self) -> AdmissionCase:
        """A column-parallel layer: a rank has some of the outputs."""
        return self._product(
            "linear",
            lambda x, weight: cuda.linear(x, weight),
            _engines_product,
            sharded=lambda ranks, x, weight: torch.cat(
                [cuda.linear(x, part) for part in weight.chunk(ranks)], dim=-1
            ),
        )

    def linear_of_two_ranks(self) -> AdmissionCase:
        """A row-parallel layer as two ranks and an all-reduce compute it."""

        def reference(x: Tensor, weight: Tensor) -> Tensor:
            first, second = _slices(x, weight, 2)
            return first + second

        return self._product(
            "linear of two ranks", lambda x, weight: cuda.linear(x, weight, slices=2), reference
        )

    def linear_of_any_rank(self, slices: int) -> AdmissionCase:
        """A row-parallel layer whose slices are added exactly."""

        def sharded(ranks: int, x: Tensor, weight: Tensor) -> Tensor:
            total = None
            for a, b in zip(x.chunk(ranks, dim=1), weight.chunk(ranks, dim=1), strict=True):
                part = partial_sum(slice_products(a, b, slices=slices // ranks))
                total = part if total is None else part + total
            assert total is not None
            return rounded(total, x.dtype)

        return self._product(
            f"linear of any rank, {slices} slices",
            lambda x, weight: cuda.linear(x, weight, slices=slices, exact=True),
            lambda x, weight: _exact_sum(_slices(x, weight, slices)).to(x.dtype),
            sharded=sharded,
            ranks=_divisors(slices),
        )

    # -- attention ---------------------------------------------------------------------------

    def attention(self) -> AdmissionCase:
        """A row is a sequence, of a length of its own; the engine reads it from pages.

        The last block of a sequence's values may hold some of the next one's, times zero.
        """
        sizes = self.sizes
        count, longest = max(sizes.sequences), sizes.longest
        scale = sizes.head_size**-0.5

        def run(q: Tensor, k: Tensor, v: Tensor, length: Tensor) -> Tensor:
            if not len(q):  # nobody asks for no sequence
                return torch.empty_like(q)
            position = torch.arange(longest, device=q.device).expand(len(q), longest)
            packing = cuda.Packing.of(position, position < length[:, None])
            queries, keys, values = (packing.gather(x.flatten(0, 1)) for x in (q, k, v))
            attended = cuda.attention(queries, keys, values, packing, scale=scale)
            return packing.scatter(attended, len(q) * longest).view(q.shape)

        def heads(seed: int, number: int) -> Tensor:
            return self._draw(seed, count, longest, number, sizes.head_size)

        # Of every kind of length: one token, a page less one, a page, a page and one, many.
        length = [1, longest, 15, 16, 17, longest // 2, 2, longest - 1, 129]
        lengths = torch.tensor([min(longest, length[i % 9]) for i in range(count)])
        return AdmissionCase(
            name="attention",
            operator=RowOperator(
                name=f"attention [S={longest}, H={sizes.heads}, G={sizes.kv_heads}, "
                f"D={sizes.head_size}]",
                run=run,
                inputs={
                    "q": heads(14, sizes.heads),
                    "k": heads(15, sizes.kv_heads),
                    "v": heads(16, sizes.kv_heads),
                    "length": lengths.to(self.device),
                },
                row_counts=sizes.sequences,
                spreads_nan=True,
                layouts=_LAYOUTS,
            ),
            reference=_without_backward(partial(_paged_attention, scale=scale)),
            gradients=partial(_attention64, scale=scale),
            gradients_within=_ROUNDED_BETWEEN,
        )

    # -- experts -----------------------------------------------------------------------------

    def _experts(
        self,
        name: str,
        topology: cuda.RolloutTopology | cuda.AnyTopology,
        reference: Callable[..., Tensor],
        rows: tuple[int, ...],
        **more: Any,
    ) -> AdmissionCase:
        """Their inputs come contiguous from the norm and the router."""
        sizes, count = self.sizes, max(rows)
        noise = torch.rand(count, sizes.experts, generator=torch.Generator().manual_seed(17))
        chosen = noise.argsort(-1)[:, : sizes.top_k].to(torch.int32)
        weight = self._draw(18, count, sizes.top_k, dtype=torch.float32)

        def run(x: Tensor, expert: Tensor, weight: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
            if not len(x):  # nobody asks for no token
                return torch.empty_like(x)
            return cuda.experts(x, expert, weight, w13, w2, topology)

        return AdmissionCase(
            name="experts",
            operator=RowOperator(
                name=f"experts of {name} [E={sizes.experts}, k={sizes.top_k}, "
                f"H={sizes.hidden}, F={sizes.width}]",
                run=run,
                inputs={
                    "x": self._draw(19, count, sizes.hidden),
                    "expert": chosen.to(self.device),
                    "weight": weight if self.whole else weight.softmax(-1),
                },
                weights={
                    "w13": self._draw(
                        20, sizes.experts, 2 * sizes.width, sizes.hidden, scale=sizes.hidden**-0.5
                    ),
                    "w2": self._draw(
                        21, sizes.experts, sizes.hidden, sizes.width, scale=sizes.width**-0.5
                    ),
                },
                row_counts=rows,
                layouts=(),
                **more,
            ),
            reference=_without_backward(reference),
            gradients=_experts64,
            gradients_within=_ROUNDED_BETWEEN,
        )

    def experts_of_one_rank(self) -> AdmissionCase:
        """vLLM's layer, in its tile."""
        rows = (*self.sizes.few_rows, self.sizes.rows[-1], self.sizes.many_rows)
        return self._experts("one rank", cuda.RolloutTopology(), _engines_experts, rows)

    def experts_of_two_ranks(self) -> AdmissionCase:
        """Every expert's width shared by two ranks, and an all-reduce."""

        def reference(x: Tensor, expert: Tensor, weight: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
            first, second = (
                _engines_experts(x, expert, weight, *part) for part in _widths(w13, w2, 2)
            )
            return first + second

        topology = cuda.RolloutTopology(tensor_parallel=2)
        return self._experts("two ranks", topology, reference, self.sizes.few_rows)

    def experts_of_two_blocks(self) -> AdmissionCase:
        """Half of the experts on either rank, and an all-reduce."""

        def reference(x: Tensor, expert: Tensor, weight: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
            first, second = (
                _engines_experts(x, expert, weight, w13[own], w2[own], held=held)
                for own, held in _blocks(len(w13), 2, x.device)
            )
            return first + second

        topology = cuda.RolloutTopology(tensor_parallel=2, expert_parallel=True)
        return self._experts("two blocks", topology, reference, self.sizes.few_rows)

    def experts_of_any_rank(self, slices: int) -> AdmissionCase:
        """Every expert's width in slices that are added exactly, over ranks, too."""

        def sharded(
            ranks: int, x: Tensor, expert: Tensor, weight: Tensor, w13: Tensor, w2: Tensor
        ) -> Tensor:
            parts = [
                expert_outputs(x, expert, weight, *part, slices=slices // ranks)[0]
                for part in _widths(w13, w2, ranks)
            ]
            return _over_ranks(parts, x.dtype)

        return self._experts(
            f"any rank, {slices} slices",
            cuda.AnyTopology(slices=slices),
            partial(_exact_experts, slices=slices),
            (*self.sizes.few_rows, self.sizes.many_rows),
            sharded=sharded,
            ranks=_divisors(slices),
        )

    def experts_of_any_block(self, slices: int) -> AdmissionCase:
        """The same where ranks hold whole experts."""

        def sharded(
            ranks: int, x: Tensor, expert: Tensor, weight: Tensor, w13: Tensor, w2: Tensor
        ) -> Tensor:
            parts = [
                expert_outputs(
                    x, expert, weight, w13[own], w2[own],
                    slices=slices, experts=len(w13), expert_map=held,
                )[0]
                for own, held in _blocks(len(w13), ranks, x.device)
            ]  # fmt: skip
            return _over_ranks(parts, x.dtype)

        return self._experts(
            f"any block, {slices} slices",
            cuda.AnyTopology(slices=slices),
            partial(_exact_experts, slices=slices),
            self.sizes.few_rows[-1:],
            sharded=sharded,
            ranks=(2, 4),
        )


def cases() -> Iterator[AdmissionCase]:
    """Those of the GPU that this runs on."""
    return Cases().all()


# -- the engine's own kernels ----------------------------------------------------------------


def _without_backward(reference: Callable[..., Any]) -> Callable[..., Any]:
    return torch.no_grad()(reference)


def _engines_product(x: Tensor, weight: Tensor) -> Tensor:
    from vllm.model_executor.layers.batch_invariant import matmul_persistent

    product: Tensor = matmul_persistent(x.contiguous(), weight.contiguous().t())
    return product


def _slices(x: Tensor, weight: Tensor, slices: int) -> list[Tensor]:
    """What each of so many ranks computes of a row-parallel product."""
    pairs = zip(x.chunk(slices, dim=1), weight.chunk(slices, dim=1), strict=True)
    return [_engines_product(a, b) for a, b in pairs]


def _engines_table(sizes: Sizes, device: str) -> Tensor:
    """By the methods of vLLM's class; an object of it needs a configured engine."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

    class Bare:
        rotary_dim = sizes.head_size
        max_position_embeddings = sizes.positions
        base = sizes.theta
        _compute_inv_freq = RotaryEmbeddingBase._compute_inv_freq

    with torch.device(device):
        table: Tensor = RotaryEmbeddingBase._compute_cos_sin_cache(Bare())
    return table.to(torch.bfloat16)


def _paged_attention(q: Tensor, k: Tensor, v: Tensor, length: Tensor, *, scale: float) -> Tensor:
    """vLLM's call in the rollout: keys and values in pages of 16 tokens, in any order."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    page, (count, longest) = 16, q.shape[:2]
    pages = -(-longest // page)
    order = torch.randperm(count * pages, generator=torch.Generator().manual_seed(22))
    table = order.view(count, pages).to(q.device, torch.int32)

    def cache(x: Tensor) -> Tensor:
        padded = x.new_zeros((count, pages * page, *x.shape[2:]))
        padded[:, :longest] = x
        paged = torch.empty_like(padded).view(count * pages, page, *x.shape[2:])
        paged[order.to(x.device)] = padded.view(paged.shape)
        return paged

    real = torch.arange(longest, device=q.device) < length[:, None]
    starts = torch.zeros(count + 1, dtype=torch.int32, device=q.device)
    starts[1:] = length.cumsum(0)
    attended = torch.zeros_like(q)
    attended[real] = flash_attn_varlen_func(
        q[real],
        cache(k),
        cache(v),
        max_seqlen_q=int(length.max()),
        cu_seqlens_q=starts,
        max_seqlen_k=int(length.max()),
        seqused_k=length.to(torch.int32),
        softmax_scale=scale,
        causal=True,
        block_table=table,
        num_splits=1,
        fa_version=3,
    )
    return attended


def _engines_experts(
    x: Tensor,
    expert: Tensor,
    weight: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    held: Tensor | None = None,
) -> Tensor:
    """vLLM's layer in its batch-invariant tile; ``held`` maps global to local experts."""
    from vllm.model_executor.layers.fused_moe import override_config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    with override_config(dict(_BI_TILE)):
        result: Tensor = fused_experts(
            x, w13, w2, weight, expert,
            global_num_experts=len(w13) if held is None else len(held), expert_map=held,
        )  # fmt: skip
    return result


def _widths(w13: Tensor, w2: Tensor, parts: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Weights of ranks that share every expert's width."""
    gate, up = w13.chunk(2, dim=1)
    for g, u, down in zip(
        gate.chunk(parts, dim=1), up.chunk(parts, dim=1), w2.chunk(parts, dim=2), strict=True
    ):
        yield torch.cat([g, u], dim=1), down.contiguous()


def _blocks(experts: int, ranks: int, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """Experts of each rank, and the map from all experts to its own."""
    size = experts // ranks
    for rank in range(ranks):
        own = slice(rank * size, (rank + 1) * size)
        held = torch.full((experts,), -1, dtype=torch.int32, device=device)
        held[own] = torch.arange(size, dtype=torch.int32, device=device)
        yield own, held


def _exact_experts(
    x: Tensor, expert: Tensor, weight: Tensor, w13: Tensor, w2: Tensor, *, slices: int
) -> Tensor:
    """vLLM's layer for every slice and for every slot alone, and their exact sum."""
    parts = [
        _engines_experts(
            x, expert[:, slot, None].contiguous(), weight[:, slot, None].contiguous(), *part
        )
        for part in _widths(w13, w2, slices)
        for slot in range(expert.shape[1])
    ]
    return _exact_sum(parts).to(x.dtype)


# -- exact sums ------------------------------------------------------------------------------


def _exact_sum(parts: list[Tensor]) -> Tensor:
    """By its definition: whole numbers of quanta, added as integers, rounded to float32."""
    quanta = sum(torch.round(part.double() * 2.0**QUANTUM_BITS).to(torch.int64) for part in parts)
    assert isinstance(quanta, Tensor)
    return (quanta.double() * 2.0**-QUANTUM_BITS).float()


def _over_ranks(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """What an all-reduce does with the ranks' slices, the last rank first."""
    total = partial_sum(parts[-1])
    for part in parts[-2::-1]:
        total = total + partial_sum(part)
    return rounded(total, dtype)


def _divisors(slices: int) -> tuple[int, ...]:
    return tuple(ranks for ranks in (1, 2, 4, 8) if slices % ranks == 0)


# -- the same functions in float64, for their gradients ----------------------------------------


def _norm64(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPS) * weight.double()
    return normed.to(x.dtype)


def _rotate64(x: Tensor, positions: Tensor, *, table: Tensor) -> Tensor:
    cos, sin = table[positions].double()[:, None].chunk(2, -1)
    first, second = x.double().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def _route64(logits: Tensor, *, top_k: int) -> Tensor:
    """Weights of the experts that the operator chooses, among equals, too."""
    with torch.no_grad():
        _, chosen = cuda.route(logits, top_k, renormalize=True)
    return logits.double().gather(1, chosen.long()).softmax(-1).float()


def _logprobs64(logits: Tensor, tokens: Tensor) -> Tensor:
    wide = torch.log_softmax(logits.double(), -1)
    return wide.gather(1, tokens[:, None])[:, 0].float()


def _attention64(q: Tensor, k: Tensor, v: Tensor, length: Tensor, *, scale: float) -> Tensor:
    groups = q.shape[2] // k.shape[2]
    longest = q.shape[1]
    wide = q.double().transpose(1, 2)
    keys, values = (x.double().transpose(1, 2).repeat_interleave(groups, dim=1) for x in (k, v))
    seen = torch.ones(longest, longest, dtype=torch.bool, device=q.device).tril()
    scores = (wide @ keys.transpose(2, 3) * scale).masked_fill(~seen, -torch.inf)
    real = torch.arange(longest, device=q.device) < length[:, None]
    attended = (scores.softmax(-1) @ values).transpose(1, 2) * real[:, :, None, None]
    return attended.to(q.dtype)


def _experts64(x: Tensor, expert: Tensor, weight: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    ups, downs = w13.unbind(), w2.unbind()
    for number in expert.unique().tolist():
        token, slot = (expert == number).nonzero(as_tuple=True)
        gate, up = (x[token].double() @ ups[number].double().t()).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * up
        output = hidden @ downs[number].double().t() * weight[token, slot, None].double()
        total = total.index_add(0, token, output)
    return total.to(x.dtype)
