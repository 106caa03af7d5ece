"""Linear layers and the output layer of vLLM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from patchkit import providers
from patchkit.bindings.claim import chunks_per_rank, refuse_unless
from patchkit.bindings.vllm_cpu.ranks import tree_over_ranks


def keep_linear_weight(self: Any, layer: torch.nn.Module) -> None:
    """``UnquantizedLinearMethod.process_weights_after_loading``: no packing.

    The packed copy replaces ``layer.weight``, which both the provider and the
    next weight update need.
    """


def linear_apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """``UnquantizedLinearMethod.apply``: exact product, rounded once to the stream's dtype."""
    return providers.linear(x, layer.weight, bias=bias).to(x.dtype)


def row_parallel_forward(self: Any, input_: Tensor) -> Any:
    """``RowParallelLinear.forward``: float32 partial sums, one tree over chunks and ranks.

    A layer that leaves the reduction to its caller gives its partial sum in float32.
    """
    refuse_unless(
        self,
        input_is_parallel=(self.input_is_parallel, True),
        bias=(self.bias is None, True),
        quant_method=(type(self.quant_method).__name__, "UnquantizedLinearMethod"),
    )
    partial = providers.linear(input_, self.weight, chunks=chunks_per_rank(self, self.tp_size))
    if self.reduce_results:
        partial = tree_over_ranks(partial) if self.tp_size > 1 else partial
        output = partial.to(input_.dtype)
    else:
        output = partial
    return (output, None) if self.return_bias else output


def lm_head_apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """``UnquantizedEmbeddingMethod.apply``: float32 vocabulary logits."""
    refuse_unless(layer, bias=(bias is None, True))
    return providers.linear(x, layer.weight)
