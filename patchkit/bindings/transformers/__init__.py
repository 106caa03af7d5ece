"""Makers of trainer patches for a Hugging Face model's own classes.

Every model of the Llama line writes the same few forward methods under its own
class names. One call declares them all:

>>> from patchkit.bindings import transformers as hf
>>> module = "transformers.models.qwen3.modeling_qwen3"
>>> trainer = CHECKPOINT_PATCHES + hf.dense(module, "Qwen3")     # doctest: +SKIP

Each makes a tuple: one patch for every signature that a method has had, from
transformers 5.17 to 5.24. The replacements act only inside
``patchkit.exact_context()``; outside, the stock method itself runs. Parameters are read
where FSDP2 has gathered them: inside the forward of the module that owns them or of
one of its parents in the same shard group.
"""

from __future__ import annotations

from patchkit.bindings.transformers._declarations import (
    PROFILE,
    attention,
    causal_lm,
    decoder,
    dense,
    experts,
    gated_mlp,
    grouped_moe,
    grouped_router,
    rms_norm,
    shared_moe,
    softmax_moe,
    softmax_router,
)
from patchkit.bindings.transformers._modules import (
    activation_inside,
    computed_inside,
    decoder_modules,
    dense_modules,
    exact,
    grouped_moe_modules,
    linear_inside,
    softmax_moe_modules,
)

__all__ = [
    "PROFILE",
    "activation_inside",
    "attention",
    "causal_lm",
    "computed_inside",
    "decoder",
    "decoder_modules",
    "dense",
    "dense_modules",
    "exact",
    "experts",
    "gated_mlp",
    "grouped_moe",
    "grouped_moe_modules",
    "grouped_router",
    "linear_inside",
    "rms_norm",
    "shared_moe",
    "softmax_moe",
    "softmax_moe_modules",
    "softmax_router",
]
