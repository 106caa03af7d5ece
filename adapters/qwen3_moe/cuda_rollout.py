"""Rollout side on CUDA: what the ``vllm_bi`` profiles replace in vLLM.

Everything that the trainer relies on sits behind a ``torch.library`` operator:
inductor fuses what it can see, and a fused add is not rounded in between.
"""

from __future__ import annotations

import torch
from torch import Tensor

from patchkit.providers.cuda import add_rms_norm_forward, rms_norm_forward
from patchkit.providers.cuda.experts import tile_for
from patchkit.providers.cuda.linear import linear_forward


@torch.library.custom_op("patchkit_cuda::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm_forward(x, weight, eps)


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("patchkit_cuda::add_rms_norm", mutates_args=())
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return add_rms_norm_forward(x, residual, weight, eps)


@_add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@torch.library.custom_op("patchkit_cuda::linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return linear_forward(x, weight)


@_linear.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def rms_norm(
    input: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``rms_norm_batch_invariant``: every rounding in the open, none for inductor to remove."""
    if weight is None:
        raise ValueError(
            "rms_norm: a norm without a weight is not covered by adapter qwen3_moe; "
            "run this model without the adapter"
        )
    if residual is None:
        return torch.ops.patchkit_cuda.rms_norm(input, weight, eps)
    return torch.ops.patchkit_cuda.add_rms_norm(input, residual, weight, eps)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``linear_batch_invariant`` with a tile that follows the number of rows."""
    flat = input.reshape(-1, input.shape[-1])
    output = torch.ops.patchkit_cuda.linear(flat, weight)
    output = output.reshape(*input.shape[:-1], weight.shape[0])
    return output if bias is None else output + bias


def expert_tile(
    M: int,
    E: int,
    N: int,
    K: int,
    topk: int,
    dtype: str | None,
    block_shape: list[int] | None = None,
) -> dict[str, int]:
    """``get_default_config``: the tile that vLLM ships for this GPU, never split over K."""
    if dtype is not None or block_shape is not None:
        raise ValueError(
            f"expert_tile: quantised experts (dtype {dtype!r}, block_shape {block_shape!r}) are "
            "not covered by adapter qwen3_moe; run this model without the adapter"
        )
    return tile_for(M, E, N)
