"""Replacements for methods of LlamaForCausalLM's own signatures."""

from __future__ import annotations

from typing import Any

from patchkit.bindings.transformers.attention_layer import (
    attention_forward_5_17 as shared_attention_forward_5_17,
)


def attention_forward_5_17(
    self: Any,
    hidden_states: Any,
    position_embeddings: Any = None,
    attention_mask: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Any:
    """``LlamaAttention.forward``: the shared replacement, under this method's own signature."""
    return shared_attention_forward_5_17(
        self,
        hidden_states,
        position_embeddings,
        attention_mask,
        past_key_values,
        **kwargs,
    )
