"""The trials by which :mod:`patchkit.providers.fast` is admitted."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from patchkit.parity.admission import AdmissionCase
from patchkit.parity.conformance import RowOperator
from patchkit.parity.conformance.cases import MANY_ROWS, ROW_COUNTS
from patchkit.providers import logprobs as reference
from patchkit.providers.fast import logprobs as fast


def cases() -> Iterator[AdmissionCase]:
    """Vocabularies of tiny and of real models, in both formats of logits."""
    for size, rows in ((512, MANY_ROWS), (151_936, (1, 2, 3, 7, 31, 33)), (99, ROW_COUNTS)):
        for dtype in (torch.float32, torch.bfloat16):
            yield AdmissionCase(
                name="selected_token_logprobs",
                operator=_selected(size, rows, dtype),
                reference=reference.selected_token_logprobs,
            )


def _selected(size: int, rows: tuple[int, ...], dtype: torch.dtype) -> RowOperator:
    generator = torch.Generator().manual_seed(size)
    count = max(rows)
    logits = (3 * torch.randn(count, size, generator=generator)).to(dtype)
    return RowOperator(
        name=f"selected_token_logprobs [V={size}] of {dtype}",
        run=fast.selected_token_logprobs,
        inputs={
            "logits_TV": logits,
            "tokens_T": torch.randint(0, size, (count,), generator=generator),
        },
        row_counts=rows,
    )
