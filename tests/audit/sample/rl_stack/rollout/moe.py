"""Experts and their operators."""

import functools

import torch
import wrapt
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.fused_moe import moe_permute_unpermute as permute
from vllm.model_executor.models import qwen3_moe as q

from rl_stack.compat import batch_invariant, older_than

aten = torch.library.Library("aten", "IMPL")


def mm(a, b):
    return a @ b


def sparse_forward(self, hidden_states):
    return self.experts(hidden_states, self.gate(hidden_states)[0])


def moe_unpermute(out, permuted_hidden_states, topk_weights, inv_permuted_idx,
                  expert_first_token_offset=None):
    out.copy_(permuted_hidden_states)


def softmax(input, dim, dtype=None):
    return torch.softmax(input, dim)


def counted(fn):
    @functools.wraps(fn)
    def inner(*args, **kwargs):
        return fn(*args, **kwargs)

    return inner


def apply():
    aten.impl("mm", mm, "CUDA")
    q.Qwen3MoeSparseMoeBlock.forward = sparse_forward
    permute.moe_unpermute = moe_unpermute
    layer_utils.dispatch_unquantized_gemm = counted(layer_utils.dispatch_unquantized_gemm)
    batch_invariant.softmax_batch_invariant = softmax
    if older_than("0.28"):
        from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

        CPUFusedMOE.forward_grouped_gemm = lambda self, *a, **k: None
    if older_than("0.20"):
        permute.moe_permute = counted(permute.moe_permute)
    wrapt.wrap_function_wrapper(
        "vllm.model_executor.layers.fused_moe.router.fused_topk_router", "fused_topk", traced
    )


def traced(wrapped, instance, args, kwargs):
    return wrapped(*args, **kwargs)
