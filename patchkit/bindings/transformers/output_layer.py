"""What causal models of transformers do after the last layer.

The projection to logits is the profile's own; losses and the output are as in
transformers. Each forward method is here twice: transformers 5.24 renamed the argument
``past_key_values``, and the field of its outputs, to ``cache``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import Tensor
from transformers import modeling_utils
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple

from patchkit import providers
from patchkit.runtime.coverage import require_once

Project = Callable[[Tensor, Tensor], Tensor]
Cache = Literal["cache", "past_key_values"]


def project_logits(
    model: Any, outputs: Any, project: Project, logits_to_keep: int | Tensor
) -> Tensor:
    """Logits ``[B, kept, V]`` of the positions that the caller wants.

    Args:
        model: The causal model.
        outputs: Of its inner model; ``last_hidden_state`` is ``[B, S, H]``.
        project: ``project(hidden, weight)`` to logits.
        logits_to_keep: The last so many positions (0: all), or their indices; from
            transformers 5.24 on also indices or a mask for each sequence.
    """
    hidden = outputs.last_hidden_state
    select = getattr(modeling_utils, "slice_logits_to_keep", None)
    if select is not None:
        return project(select(hidden, logits_to_keep), model.lm_head.weight)
    kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    return project(hidden[:, kept, :], model.lm_head.weight)


def _loss(model: Any, logits: Tensor, labels: Tensor | None, options: Mapping[str, Any]) -> Any:
    if labels is None:
        return None
    # By keyword and with the configuration's size, as transformers calls it.
    return model.loss_function(
        logits=logits, labels=labels, vocab_size=model.config.vocab_size, **options
    )


def _kept(outputs: Any, cache: Cache) -> dict[str, Any]:
    return {cache: getattr(outputs, cache)}


def causal_lm_output(
    model: Any,
    outputs: Any,
    project: Project,
    *,
    labels: Tensor | None,
    logits_to_keep: int | Tensor,
    router_loss: bool,
    attention_mask: Tensor | None,
    loss_options: Mapping[str, Any],
    cache: Cache = "past_key_values",
) -> MoeCausalLMOutputWithPast:
    """Logits, losses and the output object of a mixture-of-experts model.

    Args:
        model: The causal model.
        outputs: Of its inner model; ``last_hidden_state`` is ``[B, S, H]``.
        project: ``project(hidden, weight)`` to logits ``[B, kept, V]``.
        labels: Token ids of the loss; None for none.
        logits_to_keep: The last so many positions (0: all), or their indices.
        router_loss: Whether the load-balancing loss is wanted.
        attention_mask: As the caller gave it; ``[B, S]`` or None.
        loss_options: Further arguments of the model's loss function.
        cache: What this transformers calls the field.
    """
    logits = project_logits(model, outputs, project, logits_to_keep)
    loss = _loss(model, logits, labels, loss_options)
    aux_loss = None
    if router_loss:
        # Each model's module has its own, under this name.
        load_balancing = vars(sys.modules[_stock_module(model)])["load_balancing_loss_func"]
        aux_loss = load_balancing(
            outputs.router_logits, model.num_experts, model.num_experts_per_tok, attention_mask
        )
        if loss is not None:
            loss = loss + model.router_aux_loss_coef * aux_loss
    return MoeCausalLMOutputWithPast(
        loss=loss,
        aux_loss=aux_loss,
        logits=logits,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
        router_logits=outputs.router_logits,
        **_kept(outputs, cache),
    )


def _stock_module(model: Any) -> str:
    """The transformers module of a model's class, also where FSDP made a subclass of it."""
    return next(
        kind.__module__
        for kind in type(model).__mro__
        if kind.__module__.startswith("transformers.models.")
    )


def _dense(
    model: Any,
    inputs: Mapping[str, Any],
    cache: Cache,
    *,
    labels: Tensor | None,
    logits_to_keep: int | Tensor,
    options: Mapping[str, Any],
) -> CausalLMOutputWithPast:
    """Of a dense model: float32 logits from the exact product.

    Args:
        model: The causal model.
        inputs: Of its inner model, by name.
        cache: Which of them is the cache's, and what this transformers calls the field.
        labels: Token ids of the loss; None for none.
        logits_to_keep: The last so many positions (0: all), or their indices.
        options: Further arguments of the inner model and of the loss.
    """
    require_once(model)
    outputs = model.model(**inputs, **options)
    logits = project_logits(model, outputs, providers.linear, logits_to_keep)
    return CausalLMOutputWithPast(
        loss=_loss(model, logits, labels, options),
        logits=logits,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
        **_kept(outputs, cache),
    )


def _moe(
    model: Any,
    inputs: Mapping[str, Any],
    cache: Cache,
    *,
    router_loss: bool = False,
    labels: Tensor | None,
    logits_to_keep: int | Tensor,
    options: Mapping[str, Any],
) -> MoeCausalLMOutputWithPast:
    """Of a mixture of experts; arguments as of :func:`_dense`."""
    require_once(model)
    outputs = model.model(**inputs, **options)
    return causal_lm_output(
        model,
        outputs,
        providers.linear,
        labels=labels,
        logits_to_keep=logits_to_keep,
        router_loss=router_loss,
        attention_mask=inputs["attention_mask"],
        loss_options=options,
        cache=cache,
    )


@can_return_tuple
@deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
def dense_forward(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cache: Any = None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    use_cache: bool | None = None,
    logits_to_keep: int | Tensor = 0,
    **kwargs: Any,
) -> CausalLMOutputWithPast:
    """``ForCausalLM.forward`` of a dense model."""
    inputs = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "cache": cache,
        "inputs_embeds": inputs_embeds,
        "use_cache": use_cache,
    }
    return _dense(
        self,
        inputs,
        "cache",
        labels=labels,
        logits_to_keep=logits_to_keep,
        options=kwargs,
    )


@can_return_tuple
def dense_forward_5_17(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    use_cache: bool | None = None,
    logits_to_keep: int | Tensor = 0,
    **kwargs: Any,
) -> CausalLMOutputWithPast:
    """``ForCausalLM.forward`` of a dense model, before 5.24."""
    inputs = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "past_key_values": past_key_values,
        "inputs_embeds": inputs_embeds,
        "use_cache": use_cache,
    }
    return _dense(
        self,
        inputs,
        "past_key_values",
        labels=labels,
        logits_to_keep=logits_to_keep,
        options=kwargs,
    )


@can_return_tuple
@deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
def moe_forward(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cache: Any = None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    use_cache: bool | None = None,
    logits_to_keep: int | Tensor = 0,
    **kwargs: Any,
) -> MoeCausalLMOutputWithPast:
    """``ForCausalLM.forward`` of a mixture of experts without a router loss."""
    inputs = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "cache": cache,
        "inputs_embeds": inputs_embeds,
        "use_cache": use_cache,
    }
    return _moe(
        self,
        inputs,
        "cache",
        labels=labels,
        logits_to_keep=logits_to_keep,
        options=kwargs,
    )


@can_return_tuple
def moe_forward_5_17(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    use_cache: bool | None = None,
    logits_to_keep: int | Tensor = 0,
    **kwargs: Any,
) -> MoeCausalLMOutputWithPast:
    """``ForCausalLM.forward`` of a mixture of experts without a router loss, before 5.24."""
    inputs = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "past_key_values": past_key_values,
        "inputs_embeds": inputs_embeds,
        "use_cache": use_cache,
    }
    return _moe(
        self,
        inputs,
        "past_key_values",
        labels=labels,
        logits_to_keep=logits_to_keep,
        options=kwargs,
    )


@can_return_tuple
@deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
def router_loss_forward(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cache: Any = None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    use_cache: bool | None = None,
    output_router_logits: bool | None = None,
    logits_to_keep: int | Tensor = 0,
    **kwargs: Any,
) -> MoeCausalLMOutputWithPast:
    """``ForCausalLM.forward`` of a mixture of experts with a load-balancing loss."""
    if output_router_logits is None:
        output_router_logits = self.config.output_router_logits
    inputs = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "cache": cache,
        "inputs_embeds": inputs_embeds,
        "use_cache": use_cache,
        "output_router_logits": output_router_logits,
    }
    return _moe(
        self,
        inputs,
        "cache",
        router_loss=output_router_logits,
        labels=labels,
        logits_to_keep=logits_to_keep,
        options=kwargs,
    )


@can_return_tuple
def router_loss_forward_5_17(
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
    """``ForCausalLM.forward`` of a mixture of experts with a load-balancing loss, before 5.24."""
    if output_router_logits is None:
        output_router_logits = self.config.output_router_logits
    inputs = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "past_key_values": past_key_values,
        "inputs_embeds": inputs_embeds,
        "use_cache": use_cache,
        "output_router_logits": output_router_logits,
    }
    return _moe(
        self,
        inputs,
        "past_key_values",
        router_loss=output_router_logits,
        labels=labels,
        logits_to_keep=logits_to_keep,
        options=kwargs,
    )
