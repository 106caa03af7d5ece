"""Grouped-query attention of transformers models.

Shapes: B sequences, S tokens, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from patchkit import providers
from patchkit.bindings.claim import TREE_CHUNKS, UncoveredLayerError


def allowed_positions(
    attention_mask: Any,
    position_ids_BS: Tensor,
    batch: int,
    implementation: str | None,
    layer: str = "Attention",
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
        layer,
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


def _refusals(attention: Any, past_key_values: Any, position_ids: Any) -> dict[str, Any]:
    """What of this call the exact path does not cover: name to (found, covered)."""
    wrong: dict[str, Any] = {}
    if past_key_values is not None:
        wrong["past_key_values"] = ("a cache", "None: call the model with use_cache=False")
    if position_ids is None:
        wrong["position_ids"] = (None, "absolute positions")
    if (window := getattr(attention, "sliding_window", None)) is not None:
        wrong["sliding_window"] = (window, None)
    if attention.o_proj.bias is not None:
        wrong["o_proj.bias"] = (True, False)
    if attention.training and attention.attention_dropout:
        wrong["attention_dropout"] = (attention.attention_dropout, 0.0)
    return wrong


def attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``Attention.forward``: projections, norms, rotation and attention, all exact.

    ``position_embeddings`` is not read: FSDP2's mixed precision casts it to bf16.
    The rotation is computed from ``position_ids`` in float32.
    """
    position_ids = kwargs.get("position_ids")
    if wrong := _refusals(self, past_key_values, position_ids):
        raise UncoveredLayerError(type(self).__name__, wrong)
    assert position_ids is not None  # refused above

    batch, length, _ = hidden_states.shape
    dtype, size = hidden_states.dtype, self.head_dim
    positions = position_ids.expand(batch, length)
    rope = self.config.rope_parameters
    rotary_dim = int(size * rope.get("partial_rotary_factor", 1.0))

    def heads(projection: Any, norm: Any = None) -> Tensor:
        flat = providers.linear(hidden_states, projection.weight, bias=projection.bias).to(dtype)
        split = flat.view(batch, length, -1, size)
        return split if norm is None else norm(split)

    def rotated(x_BSHD: Tensor) -> Tensor:
        return providers.rotate(
            x_BSHD.reshape(batch * length, -1, size),
            positions.reshape(-1),
            base=rope["rope_theta"],
            max_position=self.config.max_position_embeddings,
            rotary_dim=rotary_dim,
        ).view(batch, length, -1, size)

    query = rotated(heads(self.q_proj, getattr(self, "q_norm", None)))
    key = rotated(heads(self.k_proj, getattr(self, "k_norm", None)))
    allowed = allowed_positions(
        attention_mask,
        positions,
        batch,
        getattr(self.config, "_attn_implementation", None),
        type(self).__name__,
    )
    attended = providers.attention(query, key, heads(self.v_proj), allowed, scale=self.scaling)
    output = providers.linear(
        attended.reshape(batch, length, -1), self.o_proj.weight, chunks=TREE_CHUNKS
    )
    return output.to(dtype), None
