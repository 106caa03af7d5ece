"""Attention over a paged cache: where a page lies and what else is in it must not matter.

The kit plays a small scheduler: it gives requests their blocks, writes keys and
values to slots, asks for the queries of each step, and compares every row with
dense attention over that request alone.

Shapes: T tokens of a step, S tokens of a request, H query heads, G key/value
heads, D head size.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from patchkit.parity.conformance.attention import causal_mask
from patchkit.parity.conformance.cases import NEIGHBOURS, SPLITS, THREAD_COUNTS, cuts
from patchkit.parity.conformance.trial import Check, Skipped, Trial, threads


@dataclass(frozen=True, kw_only=True)
class PagedOperator:
    """Paged attention, the dense attention it must equal, and some requests.

    Attributes:
        name: Shown in findings; include the shape.
        cache: ``cache(blocks, block_size)``: an empty cache.
        write: ``write(cache, key [T, G, D], value, slots [T])``.
        read: ``read(query [T, H, D], cache, table [R, blocks], lengths [R],
            starts [R + 1])`` to ``[T, H, D]``: the last queries of R requests that
            have ``lengths`` tokens in the cache.
        dense: Attention as in :class:`AttentionOperator`, the other side's.
        query: ``[S, H, D]`` per request.
        key: ``[S, G, D]`` per request.
        value: ``[S, G, D]`` per request.
        block_sizes: Tokens per block.
    """

    name: str
    cache: Callable[[int, int], Tensor]
    write: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    read: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    dense: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    query: tuple[Tensor, ...]
    key: tuple[Tensor, ...]
    value: tuple[Tensor, ...]
    block_sizes: tuple[int, ...] = (16, 32)

    @property
    def device(self) -> torch.device:
        return self.query[0].device

    @cached_property
    def expected(self) -> Tensor:
        """Every request alone, dense, in one call; request after request."""
        with torch.no_grad():
            return torch.cat(
                [
                    self.dense(
                        q[None], k[None], v[None], causal_mask(len(q), len(q), q.device)[None]
                    )[0]
                    for q, k, v in zip(self.query, self.key, self.value, strict=True)
                ]
            )

    def checks(self) -> dict[str, Check]:
        return {
            "block order": self.block_orders,
            "unused slots": self.unused_slots,
            "chunked prefill": self.chunks,
            "decode": self.decodes,
            "mixed batch": self.mixed,
            "cached prompt": self.cached_prompts,
            "threads": self.thread_counts,
        }

    def _play(
        self,
        step_sizes: list[tuple[int, ...]],
        *,
        block_size: int = 16,
        order: str = "shuffled",
        filling: float = torch.nan,
    ) -> Tensor:
        """Run all requests to their end; ``step_sizes`` cuts each of them in its own way."""
        game = _Game(self, block_size=block_size, order=order, filling=filling)
        pending = [cuts(len(q), sizes) for q, sizes in zip(self.query, step_sizes, strict=True)]
        while any(pending):
            game.step({i: pieces.pop(0) for i, pieces in enumerate(pending) if pieces})
        return torch.cat(game.rows)

    def _threaded(self, number: int) -> Tensor:
        with threads(number):
            return self._play(self._whole())

    def _last_again(self, tokens: int) -> Tensor:
        """Ask for the last rows of prompts that are in the cache already."""
        game = _Game(self)
        game.step({i: slice(0, len(q)) for i, q in enumerate(self.query)})
        last = {i: slice(max(0, len(q) - tokens), len(q)) for i, q in enumerate(self.query)}
        return game.ask(last)

    def _whole(self) -> list[tuple[int, ...]]:
        return [(len(q),) for q in self.query]

    def block_orders(self) -> Iterator[Trial]:
        for size in self.block_sizes:
            for order in ("ascending", "descending", "shuffled"):
                yield Trial(
                    case=f"block size {size}, {order}",
                    found=partial(self._play, self._whole(), block_size=size, order=order),
                    expected=self.expected,
                )

    def unused_slots(self) -> Iterator[Trial]:
        for case, filling in NEIGHBOURS.items():
            small_steps: list[tuple[int, ...]] = [(5, 1, 1)] * len(self.query)
            for sizes in (self._whole(), small_steps):
                yield Trial(
                    case=f"{case}, steps {sizes[0]}",
                    found=partial(self._play, sizes, filling=filling),
                    expected=self.expected,
                )

    def chunks(self) -> Iterator[Trial]:
        for case, sizes in SPLITS.items():
            for block_size in self.block_sizes:
                yield Trial(
                    case=f"{case}, block size {block_size}",
                    found=partial(self._play, [sizes] * len(self.query), block_size=block_size),
                    expected=self.expected,
                )

    def decodes(self) -> Iterator[Trial]:
        yield Trial(
            case="one token at a time from the first",
            found=partial(self._play, [(1,)] * len(self.query)),
            expected=self.expected,
        )

    def mixed(self) -> Iterator[Trial]:
        """Prefills, chunks and decodes of different requests in one step."""
        patterns = [(len(self.query[0]),), (1,), (7, 1), (31, 2, 1), (2, 1, 33)]
        for turn in range(len(patterns)):
            sizes = [patterns[(turn + i) % len(patterns)] for i in range(len(self.query))]
            yield Trial(
                case=f"steps {sizes}",
                found=partial(self._play, sizes),
                expected=self.expected,
            )

    def cached_prompts(self) -> Iterator[Trial]:
        """The whole prompt is in the cache; only its last tokens are asked for again."""
        for tokens in (1, 2, 5):
            rows: list[int] = []
            start = 0
            for q in self.query:
                rows += range(start + max(0, len(q) - tokens), start + len(q))
                start += len(q)
            yield Trial(
                case=f"last {tokens}",
                found=partial(self._last_again, tokens),
                expected=self.expected[rows],
                rows=tuple(rows),
            )

    def thread_counts(self) -> Iterator[Trial | Skipped]:
        if self.device.type != "cpu":
            yield Skipped(f"the operator runs on {self.device.type}")
            return
        for number in THREAD_COUNTS:
            yield Trial(
                case=f"{number} threads",
                found=partial(self._threaded, number),
                expected=self.expected,
            )


@dataclass
class _Game:
    """One cache and the requests in it."""

    operator: PagedOperator
    block_size: int = 16
    order: str = "shuffled"
    filling: float = torch.nan
    rows: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        op = self.operator
        need = [-(-len(q) // self.block_size) for q in op.query]
        # A few blocks belong to nobody.
        blocks = list(range(sum(need) + 3))
        if self.order == "descending":
            blocks.reverse()
        elif self.order == "shuffled":
            random.Random(5).shuffle(blocks)
        self.cache = op.cache(len(blocks), self.block_size).fill_(self.filling)
        self.table = torch.zeros(len(need), max(need), dtype=torch.int32, device=op.device)
        for i, count in enumerate(need):
            self.table[i, :count] = torch.tensor(blocks[:count], dtype=torch.int32)
            blocks = blocks[count:]
        self.rows = [q.new_empty((0, *q.shape[1:])) for q in op.query]

    def step(self, pieces: dict[int, slice]) -> None:
        """Write the tokens of ``pieces`` (request to span) and ask for their rows."""
        op = self.operator
        slots = torch.cat(
            [
                self.table[i].long()[position // self.block_size] * self.block_size
                + position % self.block_size
                for i, piece in pieces.items()
                for position in [torch.arange(piece.start, piece.stop, device=op.device)]
            ]
        )
        key = torch.cat([op.key[i][piece] for i, piece in pieces.items()])
        value = torch.cat([op.value[i][piece] for i, piece in pieces.items()])
        op.write(self.cache, key, value, slots)
        found = self.ask(pieces)
        start = 0
        for i, piece in pieces.items():
            count = piece.stop - piece.start
            self.rows[i] = torch.cat([self.rows[i], found[start : start + count]])
            start += count

    def ask(self, pieces: dict[int, slice]) -> Tensor:
        """Rows of the queries of ``pieces``, each the last of what its request has so far."""
        op = self.operator
        requests = list(pieces)
        counts = [piece.stop - piece.start for piece in pieces.values()]
        starts = torch.tensor([0, *counts], device=op.device).cumsum(0).int()
        lengths = torch.tensor([piece.stop for piece in pieces.values()], device=op.device).int()
        query = torch.cat([op.query[i][piece] for i, piece in pieces.items()])
        return op.read(query, self.cache, self.table[requests], lengths, starts)
