"""What both trainers' ``Qwen3MoeForCausalLM.forward`` do after the last layer.

The projection to logits is the profile's own; losses and the output are as in
transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func


def causal_lm_output(
    model: Any,
    outputs: Any,
    project: Callable[[Tensor, Tensor], Tensor],
    *,
    labels: Tensor | None,
    logits_to_keep: int | Tensor,
    router_loss: bool,
    attention_mask: Tensor | None,
    loss_options: Mapping[str, Any],
) -> MoeCausalLMOutputWithPast:
    """Logits, losses and the output object.

    Args:
        model: The ``Qwen3MoeForCausalLM``.
        outputs: Of its inner model; ``last_hidden_state`` is ``[B, S, H]``.
        project: ``project(hidden, weight)`` to logits ``[B, kept, V]``.
        labels: Token ids of the loss; None for none.
        logits_to_keep: The last so many positions (0: all), or their indices.
        router_loss: Whether the load-balancing loss is wanted.
        attention_mask: As the caller gave it; ``[B, S]`` or None.
        loss_options: Further arguments of the model's loss function.
    """
    kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    logits = project(outputs.last_hidden_state[:, kept, :], model.lm_head.weight)
    loss = aux_loss = None
    if labels is not None:
        loss = model.loss_function(logits, labels, model.vocab_size, **loss_options)
    if router_loss:
        aux_loss = load_balancing_loss_func(
            outputs.router_logits, model.num_experts, model.num_experts_per_tok, attention_mask
        )
        if loss is not None:
            loss = loss + model.router_aux_loss_coef * aux_loss
    return MoeCausalLMOutputWithPast(
        loss=loss,
        aux_loss=aux_loss,
        logits=logits,
        past_key_values=outputs.past_key_values,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
        router_logits=outputs.router_logits,
    )
