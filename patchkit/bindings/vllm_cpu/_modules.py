"""What becomes of vLLM's shared layer classes under the patches of this package."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from patchkit.bindings.vllm_cpu._declarations import (
    ACTIVATION,
    ATTENTION,
    EXPERTS,
    EXPERTS_OUTPUT,
    LM_HEAD,
    NORM,
    PROFILE,
    ROTARY,
    SHARED_EXPERTS_OUTPUT,
)
from patchkit.engine import Patch, Submodule

_LAYERS = "vllm.model_executor.layers."
_MOE = _LAYERS + "fused_moe."
_APPLY = _LAYERS + "linear:UnquantizedLinearMethod.apply"


def _module(name: str, treatment: Any, **fields: Any) -> Submodule:
    return Submodule(name=name, side="rollout", treatment=treatment, profiles=(PROFILE,), **fields)


def _by(patches: Iterable[Patch]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(patch.symbol for patch in patches))


def stock(*names: str, by: tuple[str, ...] = (), note: str = "") -> tuple[Submodule, ...]:
    """A model's own classes: they call other layers, and add and reshape."""
    return tuple(_module(name, "stock", by=by, note=note) for name in names)


DECODER_MODULES = (
    _module(
        _LAYERS + "vocab_parallel_embedding:VocabParallelEmbedding",
        "stock",
        note="a lookup; ranks add zeros for each other's tokens",
    ),
    _module("torch.nn.modules.container:ModuleList", "stock"),
    _module(_LAYERS + "linear:QKVParallelLinear", "exact", by=(_APPLY,)),
    _module(
        _LAYERS + "linear:RowParallelLinear",
        "exact",
        by=(_LAYERS + "linear:RowParallelLinear.forward",),
    ),
    _module(_LAYERS + "rotary_embedding.base:RotaryEmbedding", "exact", by=_by(ROTARY)),
    _module(
        _LAYERS + "rotary_embedding.common:ApplyRotaryEmb",
        "unused",
        inside=(_LAYERS + "rotary_embedding.base:RotaryEmbedding",),
        note="part of the stock rotation",
    ),
    _module(_LAYERS + "attention.attention:Attention", "exact", by=_by(ATTENTION)),
    _module(_LAYERS + "layernorm:RMSNorm", "exact", by=_by(NORM)),
    _module(_LAYERS + "vocab_parallel_embedding:ParallelLMHead", "exact", by=_by(LM_HEAD)),
    _module(
        _LAYERS + "logits_processor:LogitsProcessor",
        "stock",
        note="gathers the shards of the vocabulary, scales by one",
    ),
)

MLP_MODULES = (
    _module(_LAYERS + "linear:MergedColumnParallelLinear", "exact", by=(_APPLY,)),
    _module(_LAYERS + "activation:SiluAndMul", "exact", by=_by(ACTIVATION)),
)

_RUN_EXPERTS = tuple(p for p in EXPERTS if "process_weights" not in p.symbol)

_GATE_MODULES = (
    _module(
        _MOE + "router.gate_linear:GateLinear",
        "exact",
        by=(_MOE + "router.gate_linear:GateLinear.forward",),
        note="from vLLM 0.31",
    ),
    _module(
        _LAYERS + "linear:ReplicatedLinear",
        "exact",
        by=(_LAYERS + "linear:ReplicatedLinear.forward",),
        note="the gate, until vLLM 0.30; any other is refused when it runs",
    ),
)

_ROUTED_MODULES = (
    _module(_MOE + "routed_experts:RoutedExperts", "exact", by=_by(_RUN_EXPERTS)),
    _module(
        _MOE + "unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
        "exact",
        by=_by(_RUN_EXPERTS),
    ),
)


def _runner(by: Iterable[Patch]) -> Submodule:
    return _module(
        _MOE + "runner.moe_runner:MoERunner",
        "exact",
        by=_by(by),
        note="the router, a plain object, by CPURouter",
    )


EXPERT_MODULES = (*_GATE_MODULES, *_ROUTED_MODULES, _runner(EXPERTS_OUTPUT))
SHARED_EXPERT_MODULES = (
    _module(
        _MOE + "router.gate_linear:GateLinear",
        "exact",
        by=(_APPLY,),
        note="a gate that the model widens to float32",
    ),
    *_ROUTED_MODULES,
    _runner(SHARED_EXPERTS_OUTPUT),
    _module(
        _MOE + "runner.shared_experts:SharedExperts",
        "stock",
        note="calls the feed-forward layer that it holds",
    ),
)
