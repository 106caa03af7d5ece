"""Rollout side on CUDA: what the profiles replace in vLLM.

Everything that the trainer relies on sits behind a ``torch.library`` operator:
inductor fuses what it can see, and a fused add is not rounded in between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from patchkit.bindings.claim import UncoveredLayerError
from patchkit.providers.cuda import add_rms_norm_forward, rms_norm_forward
from patchkit.providers.cuda.experts import expert_outputs
from patchkit.providers.cuda.grouped import tile_for
from patchkit.providers.cuda.linear import linear_forward, slice_products
from patchkit.providers.cuda.sums import partial_sum, rounded, whole_sum


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


@torch.library.custom_op("patchkit_cuda::row_linear", mutates_args=())
def _row_linear(x: Tensor, weight: Tensor, slices: int) -> Tensor:
    return whole_sum(slice_products(x, weight, slices=slices))


@_row_linear.register_fake
def _(x: Tensor, weight: Tensor, slices: int) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@torch.library.custom_op("patchkit_cuda::row_linear_part", mutates_args=())
def _row_linear_part(x: Tensor, weight: Tensor, slices: int) -> Tensor:
    return partial_sum(slice_products(x, weight, slices=slices))


@_row_linear_part.register_fake
def _(x: Tensor, weight: Tensor, slices: int) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float64)


@torch.library.custom_op("patchkit_cuda::rounded", mutates_args=())
def _rounded(total: Tensor) -> Tensor:
    return rounded(total)


@_rounded.register_fake
def _(total: Tensor) -> Tensor:
    return total.new_empty(total.shape, dtype=torch.bfloat16)


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
    """``get_default_config``: a tile for the number of rows per expert, never split over K."""
    if dtype is not None or block_shape is not None:
        raise ValueError(
            f"expert_tile: quantised experts (dtype {dtype!r}, block_shape {block_shape!r}) are "
            "not covered by adapter qwen3_moe; run this model without the adapter"
        )
    tile = tile_for(M * topk / E)
    return {
        "BLOCK_SIZE_M": tile.m,
        "BLOCK_SIZE_N": tile.n,
        "BLOCK_SIZE_K": tile.k,
        "GROUP_SIZE_M": tile.group,
        "SPLIT_K": 1,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


# --- the same bits at any tensor- and expert-parallel size -----------------------


def row_parallel_forward(self: Any, input_: Tensor) -> Tensor | tuple[Tensor, None]:
    """``RowParallelLinear.forward``: two slices of K added exactly, over all ranks."""
    return _row_parallel(self, input_, 2)


def row_parallel_forward_4(self: Any, input_: Tensor) -> Tensor | tuple[Tensor, None]:
    """The same with four slices."""
    return _row_parallel(self, input_, 4)


def _row_parallel(self: Any, input_: Tensor, slices: int) -> Tensor | tuple[Tensor, None]:
    from vllm.distributed import tensor_model_parallel_all_reduce

    wrong = _too_many_ranks(self.tp_size, slices)
    if self.bias is not None:
        wrong["bias"] = ("a bias", None)
    if not (self.input_is_parallel and self.reduce_results):
        wrong["input_is_parallel, reduce_results"] = (
            (self.input_is_parallel, self.reduce_results), (True, True)
        )  # fmt: skip
    if input_.dtype != torch.bfloat16 or self.weight.dtype != torch.bfloat16:
        wrong["dtype"] = ((input_.dtype, self.weight.dtype), torch.bfloat16)
    if wrong:
        raise UncoveredLayerError("RowParallelLinear", wrong)
    flat = input_.reshape(-1, input_.shape[-1])
    if self.tp_size == 1:
        output = torch.ops.patchkit_cuda.row_linear(flat, self.weight, slices)
    else:
        part = torch.ops.patchkit_cuda.row_linear_part(flat, self.weight, slices // self.tp_size)
        output = torch.ops.patchkit_cuda.rounded(tensor_model_parallel_all_reduce(part))
    output = output.reshape(*input_.shape[:-1], self.weight.shape[0])
    return (output, None) if self.return_bias else output


def _too_many_ranks(ranks: int, slices: int) -> dict[str, tuple[Any, Any]]:
    if slices % ranks == 0:
        return {}
    expected = f"a divisor of {slices}, the slices of K; profile tp_independent_4 has 4"
    return {"tensor_parallel_size": (ranks, expected)}


def experts_apply(
    self: Any,
    layer: Any,
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    shared_experts: Any,
    shared_experts_input: Tensor | None,
) -> Tensor:
    """``UnquantizedFusedMoEMethod.apply``: two slices of each expert added exactly, over all ranks.

    Runs inside vLLM's opaque operator, the all-reduce too: what leaves it is rounded.
    """
    return _experts(self, layer, x, topk_weights, topk_ids, shared_experts, 2)


def experts_apply_4(
    self: Any,
    layer: Any,
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    shared_experts: Any,
    shared_experts_input: Tensor | None,
) -> Tensor:
    """The same with four slices."""
    return _experts(self, layer, x, topk_weights, topk_ids, shared_experts, 4)


def _experts(
    self: Any,
    layer: Any,
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    shared_experts: Any,
    slices: int,
) -> Tensor:
    from vllm.distributed import tensor_model_parallel_all_reduce

    config = self.moe
    wrong = _too_many_ranks(config.tp_size, slices)
    for name, found, expected in (
        ("activation", layer.activation.value, "silu"),
        ("apply_router_weight_on_input", layer.apply_router_weight_on_input, False),
        ("has_bias", config.has_bias, False),
        ("shared_experts", shared_experts, None),
        ("data_parallel_size", config.dp_size, 1),
        ("is_sequence_parallel", config.is_sequence_parallel, False),
        ("dtype", x.dtype, torch.bfloat16),
    ):
        if found != expected:
            wrong[name] = (found, expected)
    if wrong:
        raise UncoveredLayerError("UnquantizedFusedMoEMethod", wrong)
    each, _ = expert_outputs(
        x.contiguous(),
        topk_ids,
        topk_weights,
        layer.w13_weight,
        layer.w2_weight,
        # With expert parallelism a rank holds whole experts: all of their slices.
        slices=slices // config.tp_size,
        experts=layer.global_num_experts,
        expert_map=layer.expert_map,
    )
    if config.tp_size * config.ep_size == 1:
        return whole_sum(each)
    return rounded(tensor_model_parallel_all_reduce(partial_sum(each)))


def added_already(self: Any, states: Tensor, trunc_size: int | None) -> Tensor:
    """``MoERunner._maybe_reduce_final_output``: :func:`experts_apply` has added the ranks."""
    return states[..., :trunc_size] if trunc_size is not None else states
