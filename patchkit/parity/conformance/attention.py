"""Attention: a row depends on its query and on the keys that its mask allows.

Shapes: B sequences, T queries, L keys, S tokens of a sequence, H query heads,
G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from patchkit.parity.conformance.cases import (
    LAYOUTS,
    NEIGHBOURS,
    ROW_COUNTS,
    SPLITS,
    THREAD_COUNTS,
    cuts,
)
from patchkit.parity.conformance.trial import Check, Skipped, Trial, threads


def causal_mask(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """``[T, L]`` bool for the last T of L tokens."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def block_mask(position_ids_S: Tensor) -> Tensor:
    """``[S, S]`` bool for packed sequences: causal within each run of position ids."""
    restarts = torch.zeros_like(position_ids_S, dtype=torch.bool)
    restarts[1:] = position_ids_S[1:] != position_ids_S[:-1] + 1
    sequence = restarts.cumsum(0)
    same = sequence[:, None] == sequence[None, :]
    return same & causal_mask(len(position_ids_S), len(position_ids_S), position_ids_S.device)


@dataclass(frozen=True, kw_only=True)
class AttentionOperator:
    """Attention over one sequence, asked for in every way that must not matter.

    Attributes:
        name: Shown in findings; include the shape.
        run: ``run(query [B, T, H, D], key [B, L, G, D], value, allowed [B, T, L])``
            to ``[B, T, H, D]``.
        query: ``[S, H, D]``.
        key: ``[S, G, D]``.
        value: ``[S, G, D]``.
        ranks: Tensor-parallel sizes; each rank has its share of the heads.
    """

    name: str
    run: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    query: Tensor
    key: Tensor
    value: Tensor
    ranks: tuple[int, ...] = (1, 2, 4)

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def length(self) -> int:
        return self.query.shape[0]

    def _call(self, q_THD: Tensor, k_LGD: Tensor, v_LGD: Tensor, allowed_TL: Tensor) -> Tensor:
        return self.run(q_THD[None], k_LGD[None], v_LGD[None], allowed_TL[None])[0]

    def _span(self, rows: slice, keys: int) -> Tensor:
        """Queries ``rows`` against the first ``keys`` tokens, the last of which is theirs."""
        mask = causal_mask(self.length, self.length, self.device)[rows, :keys]
        return self._call(self.query[rows], self.key[:keys], self.value[:keys], mask)

    def _in_pieces(self, pieces: list[slice]) -> Tensor:
        return torch.cat([self._span(piece, piece.stop) for piece in pieces])

    def _threaded(self, number: int) -> Tensor:
        with threads(number):
            return self._span(slice(self.length), self.length)

    def _by_heads(self, ranks: int) -> Tensor:
        mask = causal_mask(self.length, self.length, self.device)
        shares = zip(
            *(x.chunk(ranks, dim=1) for x in (self.query, self.key, self.value)), strict=True
        )
        return torch.cat([self._call(q, k, v, mask) for q, k, v in shares], dim=1)

    @cached_property
    def whole(self) -> Tensor:
        """All tokens in one call: what every other way of asking must equal."""
        with torch.no_grad():
            return self._span(slice(self.length), self.length)

    def checks(self) -> dict[str, Check]:
        return {
            "prompt length": self.lengths,
            "one token": self.single_tokens,
            "chunked prefill": self.chunks,
            "padding": self.padding,
            "batch": self.batches,
            "packing": self.packing,
            "neighbours": self.neighbours,
            "threads": self.thread_counts,
            "layout": self.layouts,
            "tensor parallel": self.shards,
            "no rows": self.no_rows,
        }

    def _lengths(self) -> list[int]:
        return [n for n in ROW_COUNTS if n < self.length] + [self.length]

    def lengths(self) -> Iterator[Trial]:
        for length in self._lengths():
            yield Trial(
                case=f"S={length}",
                found=partial(self._span, slice(length), length),
                expected=self.whole[:length],
            )

    def single_tokens(self) -> Iterator[Trial]:
        for length in self._lengths():
            yield Trial(
                case=f"context {length}",
                found=partial(self._span, slice(length - 1, length), length),
                expected=self.whole[length - 1 : length],
                rows=(length - 1,),
            )

    def chunks(self) -> Iterator[Trial]:
        for case, sizes in SPLITS.items():
            yield Trial(
                case=case,
                found=partial(self._in_pieces, cuts(self.length, sizes)),
                expected=self.whole,
            )

    def _padded(self, before: int, after: int, filling: float) -> Tensor:
        """The sequence among keys (and values) that nobody may look at."""
        total = before + self.length + after
        mine = slice(before, before + self.length)
        key = self.key.new_full((total, *self.key.shape[1:]), filling)
        value = self.value.new_full((total, *self.value.shape[1:]), filling)
        key[mine], value[mine] = self.key, self.value
        mask = torch.zeros(self.length, total, dtype=torch.bool, device=self.device)
        mask[:, mine] = causal_mask(self.length, self.length, self.device)
        return self._call(self.query, key, value, mask)

    def padding(self) -> Iterator[Trial]:
        for before, after in ((0, 1), (0, 31), (1, 0), (7, 0), (3, 61)):
            for case, filling in NEIGHBOURS.items():
                yield Trial(
                    case=f"{before} before, {after} after, {case}",
                    found=partial(self._padded, before, after, filling),
                    expected=self.whole,
                )
        nothing = torch.zeros(self.length, self.length, dtype=torch.bool, device=self.device)
        yield Trial(
            case="rows that may see nothing",
            found=partial(self._call, self.query, self.key, self.value, nothing),
            expected=torch.zeros_like(self.whole),
        )

    def _batch(self, lengths: list[int], damaged: int | None = None) -> Tensor:
        """Prefixes of the sequence side by side, padded on the right; their real rows."""
        count, longest = len(lengths), max(lengths)
        query = self.query[:longest].repeat(count, 1, 1, 1)
        key = self.key[:longest].repeat(count, 1, 1, 1)
        value = self.value[:longest].repeat(count, 1, 1, 1)
        mask = causal_mask(longest, longest, self.device).repeat(count, 1, 1)
        for i, length in enumerate(lengths):
            mask[i, :, length:] = False
            key[i, length:], value[i, length:] = torch.nan, torch.nan
        if damaged is not None:
            query[damaged], key[damaged], value[damaged] = torch.nan, torch.nan, torch.nan
        result = self.run(query, key, value, mask)
        rows = [result[i, :length] for i, length in enumerate(lengths) if i != damaged]
        return torch.cat(rows)

    def batches(self) -> Iterator[Trial]:
        full = self.length
        tables = ([full, full], [full, 1, full // 2], [3, full - 1, 2, 1, full // 3 + 1])
        for lengths in tables:
            lengths = [max(1, n) for n in lengths]
            yield Trial(
                case=f"lengths {lengths}",
                found=partial(self._batch, lengths),
                expected=torch.cat([self.whole[:n] for n in lengths]),
            )
            yield Trial(
                case=f"lengths {lengths}, the first all NaN",
                found=partial(self._batch, lengths, damaged=0),
                expected=torch.cat([self.whole[:n] for n in lengths[1:]]),
            )

    def _packed(self, lengths: list[int], damaged: int | None = None) -> Tensor:
        """Prefixes of the sequence in one row, told apart by position ids that restart."""
        ids = torch.cat([torch.arange(n) for n in lengths]).to(self.device)
        query, key, value = self.query[ids], self.key[ids], self.value[ids]
        owner = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]).to(self.device)
        if damaged is not None:
            for tensor in (query, key, value):
                tensor[owner == damaged] = torch.nan
        result = self._call(query, key, value, block_mask(ids))
        return result if damaged is None else result[owner != damaged]

    def packing(self) -> Iterator[Trial]:
        full = self.length
        for lengths in ([full // 2, full // 2], [1, full // 3, 7, full // 4], [3, 1, 1, 2, full]):
            lengths = [max(1, min(full, n)) for n in lengths]
            yield Trial(
                case=f"lengths {lengths}",
                found=partial(self._packed, lengths),
                expected=torch.cat([self.whole[:n] for n in lengths]),
            )
            for damaged in (0, len(lengths) - 1):
                others = [n for i, n in enumerate(lengths) if i != damaged]
                yield Trial(
                    case=f"lengths {lengths}, number {damaged} all NaN",
                    found=partial(self._packed, lengths, damaged),
                    expected=torch.cat([self.whole[:n] for n in others]),
                )

    def _damaged(self, name: str, row: int, value: float, kept: slice) -> Tensor:
        tensors = {"query": self.query, "key": self.key, "value": self.value}
        tensors[name] = tensors[name].clone()
        tensors[name][row, ..., -1] = value
        mask = causal_mask(self.length, self.length, self.device)
        return self._call(tensors["query"], tensors["key"], tensors["value"], mask)[kept]

    def neighbours(self) -> Iterator[Trial]:
        """A damaged token reaches itself and later ones, never an earlier one."""
        row = self.length // 2
        for case, value in (("NaN", torch.nan), ("infinity", torch.inf), ("huge", 1e30)):
            for name in ("query", "key", "value"):
                yield Trial(
                    case=f"{case} in one {name}, earlier rows",
                    found=partial(self._damaged, name, row, value, slice(row)),
                    expected=self.whole[:row],
                )
                if case == "NaN":
                    seen = slice(row, row + 1) if name == "query" else slice(row, self.length)
                    yield Trial(
                        case=f"NaN in one {name}, rows that see it",
                        found=partial(self._damaged, name, row, torch.nan, seen),
                        rows=tuple(range(self.length))[seen],
                        want="nan",
                    )
        yield Trial(
            case="NaN in one query, later rows",
            found=partial(self._damaged, "query", row, torch.nan, slice(row + 1, None)),
            expected=self.whole[row + 1 :],
            rows=tuple(range(row + 1, self.length)),
        )

    def thread_counts(self) -> Iterator[Trial | Skipped]:
        if self.device.type != "cpu":
            yield Skipped(f"the operator runs on {self.device.type}")
            return
        for number in THREAD_COUNTS:
            yield Trial(
                case=f"{number} threads",
                found=partial(self._threaded, number),
                expected=self.whole,
            )

    def layouts(self) -> Iterator[Trial]:
        mask = causal_mask(self.length, self.length, self.device)
        for layout, arrange in LAYOUTS.items():
            for position, name in enumerate(("query", "key", "value", "allowed")):
                arguments = [self.query, self.key, self.value, mask]
                arguments[position] = arrange(arguments[position])
                yield Trial(
                    case=f"{name}: {layout}",
                    found=partial(self._call, *arguments),
                    expected=self.whole,
                )

    def shards(self) -> Iterator[Trial | Skipped]:
        groups = self.key.shape[1]
        possible = [ranks for ranks in self.ranks if groups % ranks == 0]
        if not possible:
            yield Skipped(f"{groups} key/value heads cannot be shared by {self.ranks} ranks")
        for ranks in possible:
            yield Trial(
                case=f"TP={ranks}", found=partial(self._by_heads, ranks), expected=self.whole
            )

    def no_rows(self) -> Iterator[Trial]:
        mask = causal_mask(self.length, self.length, self.device)[:0]
        yield Trial(
            case="T=0",
            found=partial(self._call, self.query[:0], self.key, self.value, mask),
            expected=self.whole[:0],
        )
