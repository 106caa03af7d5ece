"""The output layer as the conformance kit tries it: the replacements themselves."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from patchkit.parity.conformance import RowOperator
from patchkit_adapters.fp32_lm_head.rollout import apply_head, get_logits


class UnquantizedEmbeddingMethod:
    """Stands for vLLM's class of that name, which is known by its name alone."""


def _head(weight: Tensor) -> Any:
    return SimpleNamespace(quant_method=UnquantizedEmbeddingMethod(), weight=weight)


def _option(x: Tensor, weight: Tensor) -> Tensor:
    return apply_head(None, _head(weight), x, None)


def _before(x: Tensor, weight: Tensor) -> Tensor | None:
    processor = SimpleNamespace(org_vocab_size=len(weight), _gather_logits=lambda logits: logits)
    return get_logits(processor, x, _head(weight), None)


def _vocabulary_over_ranks(ranks: int, x: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([_option(x, part) for part in weight.chunk(ranks)], dim=-1)


def operators() -> Iterator[RowOperator]:
    """The replacement where vLLM has the option and the one where it has not.

    The last is wider than the longest exact sum, so that it is a tree of slices.
    """
    for name, run, hidden, rows in (
        ("_apply_head, H=128", _option, 128, (1, 2, 3, 7, 31, 32, 33, 255, 256, 257)),
        ("_get_logits, H=128", _before, 128, (1, 2, 33, 257)),
        ("_apply_head, H=4096", _option, 4096, (1, 2, 33, 65)),
        ("_apply_head, H=16384", _option, 16384, (1, 2, 33)),
    ):
        generator = torch.Generator().manual_seed(len(name) + hidden)
        x = torch.randn(max(rows), hidden, generator=generator).bfloat16()
        weight = torch.randn(256, hidden, generator=generator).bfloat16()
        yield RowOperator(
            name=f"lm_head {name}",
            run=run,
            inputs={"x": x},
            weights={"weight": weight},
            row_counts=rows,
            sharded=_vocabulary_over_ranks,
        )
