"""Trainer side on CUDA: what the profiles replace in Hugging Face Qwen3-MoE.

Like :mod:`patchkit.bindings.transformers`, with operators that reproduce
vLLM's batch-invariant mode, at one fixed topology or with exact sums over slices. Written
against transformers 5.17.

A batch may be padded (``attention_mask`` ``[B, S]``) or packed (no mask, position
ids that restart); packed is faster, since padding is computed too.

Shapes: B sequences, S tokens, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from patchkit.bindings.claim import UncoveredLayerError
from patchkit.bindings.transformers.output_layer import causal_lm_output
from patchkit.providers import cuda

_PACKING = "patchkit_packing"

_topology = cuda.RolloutTopology()
_TWO_SLICES = cuda.AnyTopology(slices=2)
_FOUR_SLICES = cuda.AnyTopology(slices=4)
_topology_lock = threading.Lock()


def match_rollout(*, tensor_parallel: int = 1, expert_parallel: bool = False) -> None:
    """Say which topology of the rollout engine this process is to match.

    Call it once, before the first forward. What was computed before keeps its
    topology through its backward. Under the ``tp_independent`` profiles there is nothing to say.
    """
    global _topology
    topology = cuda.RolloutTopology(
        tensor_parallel=tensor_parallel, expert_parallel=expert_parallel
    )
    with _topology_lock:
        _topology = topology


def rollout_topology() -> cuda.RolloutTopology:
    """The topology that this process matches."""
    return _topology


def rms_norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """``Qwen3MoeRMSNorm.forward``."""
    return cuda.rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _is_padding(mask: Tensor | None) -> bool:
    return mask is None or mask.dim() == 2


def _packing(kwargs: dict[str, Any], positions_BS: Tensor, mask: Tensor | None) -> cuda.Packing:
    """From the model's forward, from what Hugging Face passes for varlen, or found here."""
    known = kwargs.get(_PACKING)
    if known is not None:
        return known
    starts, longest = kwargs.get("cu_seq_lens_q"), kwargs.get("max_length_q")
    if starts is not None and longest is not None and mask is None:
        return cuda.Packing(starts.to(torch.int32), int(longest))
    return cuda.Packing.of(positions_BS, mask)


def attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``Qwen3MoeAttention.forward``: the engine's products, norm, rotation and attention.

    ``position_embeddings`` is not read: the engine rounds its table from float32
    on its own, and so does :func:`patchkit.providers.cuda.cos_sin_table`.
    """
    return _attention(self, hidden_states, attention_mask, past_key_values, _topology, kwargs)


def attention_forward_any(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The same for a rollout of any topology, up to two ranks."""
    return _attention(self, hidden_states, attention_mask, past_key_values, _TWO_SLICES, kwargs)


def attention_forward_any_4(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The same for up to four ranks."""
    return _attention(self, hidden_states, attention_mask, past_key_values, _FOUR_SLICES, kwargs)


def _attention(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    past_key_values: Any,
    topology: cuda.RolloutTopology | cuda.AnyTopology,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    position_ids = kwargs.get("position_ids")
    wrong: dict[str, tuple[Any, Any]] = {}
    if past_key_values is not None:
        wrong["past_key_values"] = ("a cache", "None: call the model with use_cache=False")
    if position_ids is None:
        wrong["position_ids"] = (None, "absolute positions")
    if self.sliding_window is not None:
        wrong["sliding_window"] = (self.sliding_window, None)
    if self.q_proj.bias is not None:
        wrong["attention_bias"] = (True, False)
    if self.training and self.attention_dropout:
        wrong["attention_dropout"] = (self.attention_dropout, 0.0)
    if hidden_states.dtype != torch.bfloat16:
        wrong["dtype"] = (hidden_states.dtype, torch.bfloat16)
    if kwargs.get(_PACKING) is None and not _is_padding(attention_mask):
        wrong["attention_mask"] = (
            f"Tensor{list(attention_mask.shape)}",
            "None or [B, S]: call Qwen3MoeForCausalLM, which finds the sequences itself",
        )
    if wrong:
        raise UncoveredLayerError("Qwen3MoeAttention", wrong)

    batch, length, _ = hidden_states.shape
    tokens, size = batch * length, self.head_dim
    flat = hidden_states.reshape(tokens, -1)
    positions_BS = position_ids.expand(batch, length)
    positions_T = positions_BS.reshape(-1)
    packing = _packing(kwargs, positions_BS, attention_mask)
    table = cuda.cos_sin_table(
        size,
        float(self.config.rope_parameters["rope_theta"]),
        int(self.config.max_position_embeddings),
        flat.device,
    )

    def heads(projection: Any) -> Tensor:
        return cuda.linear(flat, projection.weight).view(tokens, -1, size)

    query = cuda.rotate(self.q_norm(heads(self.q_proj)), positions_T, table)
    key = cuda.rotate(self.k_norm(heads(self.k_proj)), positions_T, table)
    attended = cuda.attention(
        packing.gather(query),
        packing.gather(key),
        packing.gather(heads(self.v_proj)),
        packing,
        scale=self.scaling,
    )
    attended = packing.scatter(attended, tokens).reshape(tokens, -1)
    output = cuda.linear(attended, self.o_proj.weight, slices=topology.slices, exact=topology.exact)
    return output.view(batch, length, -1), None


def router_forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``Qwen3MoeTopKRouter.forward``: the engine's bf16 logits, top-k kernel, float32 weights."""
    logits = cuda.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    weights, experts = cuda.route(logits, self.top_k, renormalize=self.norm_topk_prob)
    return logits, weights, experts


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """``Qwen3MoeExperts.forward``: the engine's grouped kernel, for the matched topology."""
    return _experts(self, hidden_states, top_k_index, top_k_weights, _topology)


def experts_forward_any(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The same for a rollout of any topology, up to two ranks."""
    return _experts(self, hidden_states, top_k_index, top_k_weights, _TWO_SLICES)


def experts_forward_any_4(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The same for up to four ranks."""
    return _experts(self, hidden_states, top_k_index, top_k_weights, _FOUR_SLICES)


def _experts(
    self: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    topology: cuda.RolloutTopology | cuda.AnyTopology,
) -> Tensor:
    return cuda.experts(
        hidden_states.contiguous(),
        top_k_index,
        top_k_weights,
        self.gate_up_proj,
        self.down_proj,
        topology,
    )


@can_return_tuple
def causal_lm_forward(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    use_cache: bool | None = None,
    output_router_logits: bool | None = None,
    logits_to_keep: int | Tensor = 0,
    **kwargs: Any,
) -> MoeCausalLMOutputWithPast:
    """``Qwen3MoeForCausalLM.forward``: bf16 logits from the engine's product.

    Finds the sequences of the batch once, for all layers. Pass ``use_cache=False``.
    """
    if output_router_logits is None:
        output_router_logits = self.config.output_router_logits
    shape = inputs_embeds.shape[:2] if input_ids is None else input_ids.shape
    if position_ids is None:
        device = (inputs_embeds if input_ids is None else input_ids).device
        position_ids = torch.arange(shape[1], device=device)[None]
    if not _is_padding(attention_mask):
        found = f"Tensor{list(attention_mask.shape)}"
        raise UncoveredLayerError("Qwen3MoeModel", {"attention_mask": (found, "None or [B, S]")})
    kwargs[_PACKING] = _packing(kwargs, position_ids.expand(shape), attention_mask)
    # A four-dimensional mask goes through transformers as it is; any other would
    # make it build one of S * S entries, which attention does not read.
    unread = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=position_ids.device)
    outputs = self.model(
        input_ids=input_ids,
        attention_mask=unread,
        position_ids=position_ids,
        past_key_values=past_key_values,
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
        output_router_logits=output_router_logits,
        **kwargs,
    )
    kwargs.pop(_PACKING)
    return causal_lm_output(
        self,
        outputs,
        cuda.linear,
        labels=labels,
        logits_to_keep=logits_to_keep,
        router_loss=output_router_logits,
        attention_mask=attention_mask,
        loss_options=kwargs,
    )
