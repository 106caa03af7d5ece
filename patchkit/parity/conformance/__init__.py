"""Does an operator's row depend on that row alone? Compared bit for bit.

The kit knows no operator: it gets callables, with the tensors to call them on,
so that the device and the dtype are the caller's, and the reference operators, a
CUDA kernel and stock PyTorch go through the same trials. Adapters name the
operators of their model.

>>> operator = RowOperator(name="linear", run=my_linear,           # doctest: +SKIP
...                        inputs={"x": x_TK}, weights={"weight": w_NK})
>>> examine(operator).raise_if_failed()                            # doctest: +SKIP

Importing this package imports torch.
"""

from __future__ import annotations

from patchkit.parity.conformance.attention import AttentionOperator, block_mask, causal_mask
from patchkit.parity.conformance.bits import Difference, bit_pattern, first_difference
from patchkit.parity.conformance.paged import PagedOperator
from patchkit.parity.conformance.report import ConformanceError, Finding, Report, merge_reports
from patchkit.parity.conformance.rows import RowOperator
from patchkit.parity.conformance.ties import RouterOperator
from patchkit.parity.conformance.trial import Check, Skipped, Trial, examine

__all__ = [
    "AttentionOperator",
    "Check",
    "ConformanceError",
    "Difference",
    "Finding",
    "PagedOperator",
    "Report",
    "RouterOperator",
    "RowOperator",
    "Skipped",
    "Trial",
    "bit_pattern",
    "block_mask",
    "causal_mask",
    "examine",
    "first_difference",
    "merge_reports",
]
