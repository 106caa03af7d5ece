"""Grouped-query attention of transformers models.

Shapes: B sequences, S tokens, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.utils.deprecation import deprecate_kwarg

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


def _refusals(
    attention: Any, cache: Mapping[str, Any], position_ids: Any
) -> dict[str, tuple[Any, Any]]:
    """What of this call the exact path does not cover: name to (found, covered)."""
    wrong: dict[str, tuple[Any, Any]] = {
        name: ("a cache", "None: call the model with use_cache=False")
        for name, value in cache.items()
        if value is not None
    }
    if position_ids is None:
        wrong["position_ids"] = (None, "absolute positions")
    if (window := getattr(attention, "sliding_window", None)) is not None:
        wrong["sliding_window"] = (window, None)
    if attention.o_proj.bias is not None:
        wrong["o_proj.bias"] = (True, False)
    if attention.training and attention.attention_dropout:
        wrong["attention_dropout"] = (attention.attention_dropout, 0.0)
    return wrong


def _attention(
    attention: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    cache: Mapping[str, Any],
    position_ids: Any,
) -> tuple[Tensor, None]:
    """Projections, norms, rotation and attention, all exact.

    The rotation is computed from position ids in float32: FSDP2's mixed precision casts
    the cosines and sines that transformers hands down to bf16.

    Args:
        attention: The module.
        hidden_states: ``[B, S, H*D]``.
        attention_mask: See :func:`allowed_positions`.
        cache: The argument that transformers would put keys and values into, by its name.
        position_ids: ``[B, S]`` or ``[1, S]``.
    """
    if wrong := _refusals(attention, cache, position_ids):
        raise UncoveredLayerError(type(attention).__name__, wrong)
    assert position_ids is not None  # refused above

    batch, length, _ = hidden_states.shape
    dtype, size = hidden_states.dtype, attention.head_dim
    positions = position_ids.expand(batch, length)
    rope = attention.config.rope_parameters
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
            max_position=attention.config.max_position_embeddings,
            rotary_dim=rotary_dim,
        ).view(batch, length, -1, size)

    query = rotated(heads(attention.q_proj, getattr(attention, "q_norm", None)))
    key = rotated(heads(attention.k_proj, getattr(attention, "k_norm", None)))
    allowed = allowed_positions(
        attention_mask,
        positions,
        batch,
        getattr(attention.config, "_attn_implementation", None),
        type(attention).__name__,
    )
    value = heads(attention.v_proj)
    attended = providers.attention(query, key, value, allowed, scale=attention.scaling)
    output = providers.linear(
        attended.reshape(batch, length, -1), attention.o_proj.weight, chunks=TREE_CHUNKS
    )
    return output.to(dtype), None


@deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
def attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``Attention.forward``, and like it for callers that still say ``past_key_values``."""
    positions = kwargs.get("position_ids")
    return _attention(self, hidden_states, attention_mask, {"cache": cache}, positions)


def attention_forward_5_17(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``Attention.forward`` before transformers 5.24."""
    cache, positions = {"past_key_values": past_key_values}, kwargs.get("position_ids")
    return _attention(self, hidden_states, attention_mask, cache, positions)
