"""Runs vLLM's own output layer once, for the conformance suite."""

from __future__ import annotations

import hashlib
from functools import partial
from types import SimpleNamespace
from typing import Any


def exercise(side: str) -> str:
    """The bits of some float32 logits, from vLLM's ``LogitsProcessor``, one row at a time.

    Asked for float32 by vLLM's own option, so that without the patch the option is what
    runs: the same precision, other bits.
    """
    import torch
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(33, 256, generator=generator).bfloat16()
    weight = torch.randn(320, 256, generator=generator).bfloat16()
    head = SimpleNamespace(quant_method=UnquantizedEmbeddingMethod(), weight=weight, tp_size=1)
    processor: Any = SimpleNamespace(
        head_dtype=torch.float32, org_vocab_size=300, _gather_logits=lambda logits: logits
    )
    if hasattr(LogitsProcessor, "_apply_head"):
        processor._apply_head = partial(LogitsProcessor._apply_head, processor)
    together = LogitsProcessor._get_logits(processor, hidden, head, None)
    assert together is not None and together.shape == (33, 300)
    return f"{together.dtype} {hashlib.sha256(together.numpy().tobytes()).hexdigest()}"
