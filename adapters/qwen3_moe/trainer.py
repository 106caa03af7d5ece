"""Trainer side: replacements for Hugging Face Qwen3-MoE's forward methods.

They act only inside ``patchkit.exact_context()``; outside, the stock method
itself runs. Signatures follow transformers 5.17 to 5.19. Parameters are read
where FSDP2 has gathered them: inside the forward of the module that owns them
or of one of its parents in the same shard group.

Shapes: B sequences, S tokens, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from patchkit import providers
from patchkit_adapters.qwen3_moe.causal_lm import causal_lm_output
from patchkit_adapters.qwen3_moe.coverage import TREE_CHUNKS, UncoveredLayerError


def rms_norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """``Qwen3MoeRMSNorm.forward``."""
    return providers.rms_norm(hidden_states, self.weight, self.variance_epsilon)


def allowed_positions(
    attention_mask: Any, position_ids_BS: Tensor, batch: int, implementation: str | None
) -> Tensor:
    """Which token may look at which: ``[B, S, S]`` bool.

    Covers every form in which transformers hands a mask to attention: none
    (causal; packed sequences show as position ids that restart), ``[B, S]``
    padding (the flash implementations), ``[B, 1, S, S]`` bool (sdpa) or additive
    float (eager).

    Raises:
        UncoveredLayerError: Another form, for instance flex attention's
            ``BlockMask``; names the implementation.
    """
    length = position_ids_BS.shape[-1]
    if attention_mask is None:
        # Packed sequences show as position ids that restart.
        restarts = torch.zeros_like(position_ids_BS, dtype=torch.bool)
        restarts[:, 1:] = position_ids_BS[:, 1:] != position_ids_BS[:, :-1] + 1
        segment = restarts.cumsum(-1)
        same = segment[:, :, None] == segment[:, None, :]
        return (_causal(position_ids_BS) & same).expand(batch, -1, -1)
    if isinstance(attention_mask, Tensor) and attention_mask.shape[0] in (1, batch):
        if attention_mask.shape[1:] == (length,):
            # Padding repeats or resets position ids without starting a sequence.
            real = attention_mask.to(torch.bool)
            return (_causal(position_ids_BS) & real[:, None, :]).expand(batch, -1, -1)
        if attention_mask.shape[1:] == (1, length, length):
            allowed = _allowed_by(attention_mask)
            if allowed is not None:
                return allowed[:, 0].expand(batch, -1, -1)
    found = type(attention_mask).__name__
    if isinstance(attention_mask, Tensor):
        found = f"Tensor{list(attention_mask.shape)} of {attention_mask.dtype}"
    raise UncoveredLayerError(
        "Qwen3MoeAttention",
        {
            "attention_mask": (found, "None, [B, S], or [B, 1, S, S] bool or 0 and lowest"),
            "attn_implementation": (implementation, "'sdpa', 'eager' or 'flash_attention_*'"),
        },
    )


def _causal(position_ids_BS: Tensor) -> Tensor:
    length = position_ids_BS.shape[-1]
    return torch.ones(length, length, dtype=torch.bool, device=position_ids_BS.device).tril()


# What transformers writes where a token may not look is the dtype's lowest value.
_EXCLUDED = -1e4


def _allowed_by(mask: Tensor) -> Tensor | None:
    """A bool mask of a bool or an additive one; None when it is something else.

    Integers are not additive, though they look like it, and an additive mask that
    also biases scores (ALiBi, say) cannot be told by who may look at whom.
    """
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return None
    allowed = mask == 0
    return allowed if bool((allowed | (mask <= _EXCLUDED)).all()) else None


def attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``Qwen3MoeAttention.forward``: projections, rotation and attention, all exact.

    ``position_embeddings`` is not read: FSDP2's mixed precision casts it to bf16.
    The rotation is computed from ``position_ids`` in float32.
    """
    position_ids = kwargs.get("position_ids")
    implementation = getattr(self.config, "_attn_implementation", None)
    wrong = {}
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
    if wrong:
        raise UncoveredLayerError("Qwen3MoeAttention", wrong)

    batch, length, _ = hidden_states.shape
    dtype, size = hidden_states.dtype, self.head_dim

    def heads(projection: Any) -> Tensor:
        flat = providers.linear(hidden_states, projection.weight).to(dtype)
        return flat.view(batch, length, -1, size)

    positions = position_ids.expand(batch, length)
    rope = self.config.rope_parameters

    def rotated(x_BSHD: Tensor) -> Tensor:
        return providers.rotate(
            x_BSHD.reshape(batch * length, -1, size),
            positions.reshape(-1),
            base=rope["rope_theta"],
            max_position=self.config.max_position_embeddings,
        ).view(batch, length, -1, size)

    query = rotated(self.q_norm(heads(self.q_proj)))
    key = rotated(self.k_norm(heads(self.k_proj)))
    allowed = allowed_positions(attention_mask, positions, batch, implementation)
    attended = providers.attention(query, key, heads(self.v_proj), allowed, scale=self.scaling)
    output = providers.linear(
        attended.reshape(batch, length, -1), self.o_proj.weight, chunks=TREE_CHUNKS
    )
    return output.to(dtype), None


def router_forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``Qwen3MoeTopKRouter.forward``: float32 logits and weights, stable ties."""
    flat = hidden_states.reshape(-1, self.hidden_dim)
    logits = providers.linear(flat, self.weight)
    weights, experts = providers.route(logits, self.top_k, renormalize=self.norm_topk_prob)
    return logits, weights, experts


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """``Qwen3MoeExperts.forward``: the rollout's chunks and tree, on one rank."""
    parts = providers.experts_chunks(
        hidden_states,
        top_k_index,
        top_k_weights,
        self.gate_up_proj,
        self.down_proj,
        chunks=TREE_CHUNKS,
    )
    return providers.pairwise_tree(parts).to(hidden_states.dtype)


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
    """``Qwen3MoeForCausalLM.forward`` with float32 logits from the exact product."""
    if output_router_logits is None:
        output_router_logits = self.config.output_router_logits
    outputs = self.model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
        output_router_logits=output_router_logits,
        **kwargs,
    )
    return causal_lm_output(
        self,
        outputs,
        providers.linear,
        labels=labels,
        logits_to_keep=logits_to_keep,
        router_loss=output_router_logits,
        attention_mask=attention_mask,
        loss_options=kwargs,
    )
