"""Layers: attribute assignments in several spellings."""

import importlib
import sys
from unittest.mock import patch

import torch
import vllm.model_executor.layers.layernorm as norms
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers import vocab_parallel_embedding as vpe
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.models import qwen3_moe

from rl_stack.compat import RowParallelLinear, UnquantizedLinearMethod, replace_attribute


def attention_forward(self, positions, hidden_states):
    qkv, _ = self.qkv_proj(hidden_states)
    return self.o_proj(qkv)[0]


def norm_native(self, x, residual=None):
    return x if residual is None else (x, residual)


def norm_cuda(self, x, residual=None):
    return self.forward_native(x, residual)


def silu(x):
    half = x.shape[-1] // 2
    return torch.nn.functional.silu(x[..., :half]) * x[..., half:]


def silu_with_self(self, x):
    return silu(x)


def row_forward(self, input_):
    return self.quant_method.apply(self, input_)


def linear_apply(self, layer, x, bias=None):
    return torch.nn.functional.linear(x, layer.weight, bias)


def masked(input_, org_vocab_start_index, org_vocab_end_index, num_org_vocab_padding,
           added_vocab_start_index, added_vocab_end_index):
    return input_, input_ == 0


def dispatch(self, compile_native):
    return self.forward_native


def apply():
    qwen3_moe.Qwen3MoeAttention.forward = attention_forward
    setattr(norms.RMSNorm, "forward_native", norm_native)
    norms.RMSNorm.forward_cuda = norm_cuda
    SiluAndMul.forward_native = staticmethod(silu)
    patch("vllm.model_executor.layers.activation.GeluAndMul.forward_native", gelu).start()
    replace_attribute(RowParallelLinear, "forward", row_forward)
    replace_attribute(UnquantizedLinearMethod, "apply", linear_apply)
    sys.modules["vllm.model_executor.layers.vocab_parallel_embedding"].get_masked_input_and_mask = (
        masked
    )
    base = importlib.import_module("vllm.model_executor.layers.rotary_embedding.base")
    getattr(base, "RotaryEmbeddingBase")._compute_inv_freq = inv_freq
    CustomOp.dispatch_forward = dispatch
    vpe.VocabParallelEmbedding.forward = embedded(vpe.VocabParallelEmbedding.forward)


def gelu(self, x):
    return x


def inv_freq(self, base):
    return torch.arange(8)


def embedded(original):
    def forward(self, input_):
        return original(self, input_).float()

    return forward
