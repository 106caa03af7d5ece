"""vLLM's kernels, played by PyTorch on a CPU: for dry runs of what calls them.

They have nobody's bits. They are functions of a row, in float64 where a sum's order would
show, and the SwiGLU gives whole multiples of 1/8, as the inputs of a dry run are: then no
order of a product rounds.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LAYERS = "vllm.model_executor.layers"
_CONFIG: dict[str, Any] = {}


def install() -> None:
    """Put them where ``patchkit.providers.cuda`` and its cases import them."""
    from patchkit.providers import cuda

    _module(
        f"{_LAYERS}.batch_invariant",
        matmul_persistent=_product,
        rms_norm_batch_invariant=cuda.rms_norm_forward,
        log_softmax=_log_softmax,
    )
    _module(f"{_LAYERS}.rotary_embedding.base", RotaryEmbeddingBase=_Table)
    _module(f"{_LAYERS}.fused_moe", override_config=_override)
    _module(
        f"{_LAYERS}.fused_moe.fused_moe",
        fused_experts=_fused_experts,
        invoke_fused_moe_triton_kernel=_invoke,
        get_config_file_name=lambda experts, width, dtype: "none.json",
        __file__=str(Path(__file__).parent / "none" / "fused_moe.py"),
    )
    _module(
        f"{_LAYERS}.fused_moe.moe_align_block_size",
        moe_align_block_size=_align,
    )
    _module("vllm._custom_ops", topk_softmax=_topk_softmax, rotary_embedding=_rotary)
    _module("vllm.vllm_flash_attn", flash_attn_varlen_func=_attention)
    _OPERATORS.define("silu_and_mul(Tensor(a!) out, Tensor x) -> ()")
    _OPERATORS.impl("silu_and_mul", _silu_and_mul, "CPU")
    _ATEN.impl("_flash_attention_backward", _attention_backward, "CPU")


_OPERATORS = torch.library.Library("_C", "FRAGMENT")
_ATEN = torch.library.Library("aten", "IMPL")


def _module(name: str, **content: Any) -> None:
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if path not in sys.modules:
            sys.modules[path] = ModuleType(path)
            sys.modules[path].__path__ = []  # type: ignore[attr-defined]
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[path])
    vars(sys.modules[name]).update(content)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() @ b.double()).to(a.dtype)


def _log_softmax(logits: Tensor) -> Tensor:
    """Blocks of 1,024 columns, as the kernel has them."""
    out = np.empty(logits.shape, dtype=np.float32)
    for row, values in enumerate(logits.numpy()):
        total = np.float32(0.0)
        for start in range(0, len(values), 1024):
            part = np.zeros(1024, dtype=np.float32)
            found = np.exp(values[start : start + 1024] - values.max())
            part[: len(found)] = found
            total += part.sum()
        out[row] = values - values.max() - np.log(total)
    return torch.from_numpy(out)


class _Table:
    def _compute_inv_freq(self: Any, base: float) -> Tensor:
        steps = torch.arange(0, self.rotary_dim, 2, dtype=torch.float) / self.rotary_dim
        return 1.0 / (base**steps)

    def _compute_cos_sin_cache(self: Any) -> Tensor:
        position = torch.arange(self.max_position_embeddings, dtype=torch.float)
        angle = torch.einsum("i,j -> ij", position, self._compute_inv_freq(self.base))
        return torch.cat((angle.cos(), angle.sin()), dim=-1)


@contextmanager
def _override(config: dict[str, Any]) -> Any:
    _CONFIG.update(config)
    yield
    _CONFIG.clear()


def _fused_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    weight: Tensor,
    chosen: Tensor,
    *,
    global_num_experts: int,
    expert_map: Tensor | None,
) -> Tensor:
    assert json.dumps(_CONFIG), "the tile of batch-invariant mode"
    assert x.is_contiguous() and chosen.is_contiguous() and weight.is_contiguous()
    tokens, top_k = chosen.shape
    gate_up = x.new_empty(tokens, top_k, w13.shape[1])
    aligned = _align(chosen, _CONFIG["BLOCK_SIZE_M"], global_num_experts, expert_map)
    _invoke(x, w13, gate_up, None, None, None, *aligned, False, top_k, _CONFIG)
    activated = x.new_empty(tokens * top_k, w2.shape[2])
    _silu_and_mul(activated, gate_up.view(tokens * top_k, -1))
    each = x.new_empty(tokens, top_k, w2.shape[1])
    _invoke(activated, w2, each, None, None, weight, *aligned, True, 1, _CONFIG)
    return each.sum(1)


def _align(
    chosen: Tensor, block: int, experts: int, held: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs by expert in whole blocks, the experts of the blocks, and how many entries count."""
    assert chosen.is_contiguous()
    pairs = chosen.numel()
    order = torch.full((pairs + experts * (block - 1),), pairs, dtype=torch.int32)
    owners = torch.zeros(-(-len(order) // block), dtype=torch.int32)
    end = 0
    for expert in range(experts):
        mine = (chosen.flatten() == expert).nonzero()[:, 0]
        order[end : end + len(mine)] = mine.int()
        blocks = -(-len(mine) // block)
        owners[end // block : end // block + blocks] = expert
        end += blocks * block
    owners = owners if held is None else held[owners.long()]
    return order, owners, torch.tensor([end], dtype=torch.int32)


def _invoke(
    a: Tensor, weights: Tensor, out: Tensor, _a: Any, _b: Any, scale: Tensor | None,
    order: Tensor, owners: Tensor, filled: Tensor, scaled: bool, top_k: int, tile: Any, **_: Any,
) -> None:  # fmt: skip
    flat = out.view(-1, out.shape[-1])
    for at, pair in enumerate(order[: int(filled)].tolist()):
        expert = int(owners[at // tile["BLOCK_SIZE_M"]])
        if pair < len(flat):
            product = weights[expert].double() @ a[pair // top_k].double()
            flat[pair] = product.to(out.dtype) if expert >= 0 else 0.0
    if scaled:
        assert scale is not None
        flat.mul_(scale.reshape(-1, 1))


def _silu_and_mul(out: Tensor, x: Tensor) -> None:
    gate, up = x.double().chunk(2, -1)
    values = torch.nn.functional.silu(gate) * up
    out.copy_((values * 8).round() / 8)


def _topk_softmax(
    weights: Tensor, chosen: Tensor, _: Tensor, logits: Tensor, renormalize: bool
) -> None:
    share = torch.softmax(logits.double(), -1).nan_to_num(0.0)
    order = torch.argsort(share, dim=-1, descending=True, stable=True)[:, : weights.shape[1]]
    picked = share.gather(1, order)
    weights.copy_(picked / picked.sum(-1, keepdim=True) if renormalize else picked)
    chosen.copy_(order)


def _rotary(
    positions: Tensor, query: Tensor, key: Tensor, size: int, table: Tensor, neox: bool
) -> None:
    for x in (query, key):
        heads = x.view(len(x), -1, size)
        cos, sin = table[positions][:, None].chunk(2, -1)
        first, second = heads.clone().chunk(2, -1)
        heads[:] = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _sequences(starts: Tensor, *tensors: Tensor) -> Any:
    """Of every sequence, the tensors as ``[heads, S, D]`` float64, as many heads as the first."""
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        own = [x[begin:end].double().transpose(0, 1) for x in tensors]
        yield [x.repeat_interleave(len(own[0]) // len(x), dim=0) for x in own]


def _shares(q: Tensor, k: Tensor, scale: float) -> Tensor:
    hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1)
    return (q @ k.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf).softmax(-1)


def _attended(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float) -> Tensor:
    out = []
    for queries, keys, values in _sequences(starts, q, k, v):
        share = _shares(queries, keys, scale)
        # Query by query: a batched product's blocks depend on the number of queries.
        rows = [share[:, i, None, : i + 1] @ values[:, : i + 1] for i in range(share.shape[1])]
        out.append(torch.cat(rows, 1).transpose(0, 1))
    return torch.cat(out).to(q.dtype)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, softmax_scale: float,
    block_table: Tensor | None = None, seqused_k: Tensor | None = None,
    return_softmax_lse: bool = False, causal: bool, num_splits: int, fa_version: int, **_: Any,
) -> Any:  # fmt: skip
    assert causal and num_splits == 1 and fa_version == 3
    if block_table is not None:
        assert seqused_k is not None
        k, v = (
            torch.cat([
                x[block_table[i].long()].flatten(0, 1)[:length]
                for i, length in enumerate(seqused_k.tolist())
            ])
            for x in (k, v)
        )  # fmt: skip
    out = _attended(q, k, v, cu_seqlens_q, softmax_scale)
    return (out, q.new_zeros(q.shape[1], len(q))) if return_softmax_lse else out


def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts: Tensor,
    _starts: Tensor, longest: int, _longest: int, dropout: float, causal: bool, seed: Tensor,
    offset: Tensor, *, scale: float | None = None, **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert scale is not None
    grads: list[list[Tensor]] = [[], [], []]
    for queries, keys, values, outer in _sequences(starts, q, k, v, grad):
        share = _shares(queries, keys, scale)
        inner = outer @ values.transpose(1, 2)
        inner = share * (inner - (inner * share).sum(-1, keepdim=True)) * scale
        found = (inner @ keys, inner.transpose(1, 2) @ queries, share.transpose(1, 2) @ outer)
        for kept, x, like in zip(grads, found, (q, k, v), strict=True):
            kept.append(x.view(like.shape[1], -1, *x.shape[1:]).sum(1).transpose(0, 1))
    return tuple(torch.cat(x).to(q.dtype) for x in grads)  # type: ignore[return-value]
