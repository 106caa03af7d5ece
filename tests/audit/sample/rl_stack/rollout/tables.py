"""Declared in tables, registries and modules."""

import importlib
import sys

import vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata as nixl
import vllm.envs as envs
import vllm.v1.worker.gpu.sample.bad_words as bad_words
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.registry import ModelRegistry

from rl_stack import stand_in


def matmul(a, b, bias=None):
    return a @ b


def linear(input, weight, bias=None):
    return input @ weight.t()


def unpack(recv_buffer, head_dim, lse_pack_dim, return_lse, is_lse_base_on_e):
    return recv_buffer


def load(source_path, view, offset, block_size):
    view[:] = b""


def supported(module_name, supported_lora_modules):
    return True


def layout(cache_layout):
    return None


LAYERS = "vllm.model_executor.layers"
TABLE = (
    (f"{LAYERS}.batch_invariant", "matmul_persistent", matmul),
    (f"{LAYERS}.batch_invariant", "linear_batch_invariant", linear),
    ("vllm.v1.attention.ops.dcp_alltoall", "_dcp_a2a_unpack_combine", unpack),
    ("vllm.v1.kv_offload.tiering.fs.io", "load_block", load),
    ("vllm.lora.utils", "is_supported_lora_module", supported),
    ("vllm.v1.attention.backends.utils", "set_kv_cache_layout", layout),
)


class ExactLinear(ReplicatedLinear):
    def forward(self, x):
        return x, None


class RlModel:
    pass


def apply():
    for module, name, function in TABLE:
        setattr(importlib.import_module(module), name, function)
    sys.modules["vllm.lora.layers.vocal_parallel_embedding"] = stand_in
    ModelRegistry.register_model("RlModelForCausalLM", RlModel)
    envs.environment_variables["RL_STACK_LEVEL"] = lambda: 1
    bad_words.MAX_NUM_BAD_WORDS = 512
    nixl.NIXL_CONNECTOR_VERSION = 14


def swap(model):
    for layer in model.modules():
        if type(layer).__name__ == "ReplicatedLinear":
            layer.__class__ = ExactLinear
