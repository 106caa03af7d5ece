"""What becomes of a Hugging Face model's submodules under the patches of this package."""

from __future__ import annotations

from typing import Any

from patchkit.bindings.transformers._declarations import PROFILE
from patchkit.engine import Submodule

_LINEAR = "torch.nn.modules.linear:Linear"
_SILU = "transformers.activations:SiLUActivation"


def _module(name: str, treatment: Any, **fields: Any) -> Submodule:
    return Submodule(name=name, side="trainer", treatment=treatment, profiles=(PROFILE,), **fields)


def exact(module: str, *classes: str) -> tuple[Submodule, ...]:
    """Classes whose own forward is patched."""
    return tuple(
        _module(f"{module}:{name}", "exact", by=(f"{module}:{name}.forward",)) for name in classes
    )


def linear_inside(module: str, *classes: str) -> Submodule:
    """``torch.nn.Linear`` whose weight the patched forward of its parent reads."""
    return _module(
        _LINEAR,
        "exact",
        by=tuple(f"{module}:{name}.forward" for name in classes),
        inside=tuple(f"{module}:{name}" for name in classes),
        note="its weight is read by the patched forward around it",
    )


def computed_inside(name: str, module: str, *classes: str) -> Submodule:
    """A submodule ``name`` that the patched forward of its parent computes from its weights."""
    return _module(
        name,
        "exact",
        by=tuple(f"{module}:{parent}.forward" for parent in classes),
        inside=tuple(f"{module}:{parent}" for parent in classes),
        note="its weights are read by the patched forward around it",
    )


def activation_inside(module: str, *classes: str) -> Submodule:
    """An activation that the patched forward of its parent computes itself."""
    inside = tuple(f"{module}:{name}" for name in classes)
    return _module(_SILU, "unused", inside=inside, note="the patched forward has its own")


def decoder_modules(module: str, family: str) -> tuple[Submodule, ...]:
    """Everything around the feed-forward layers of a model of the Llama line."""
    model = f"{module}:{family}Model"
    return (
        *exact(module, f"{family}ForCausalLM", f"{family}Attention", f"{family}RMSNorm"),
        linear_inside(module, f"{family}Attention", f"{family}ForCausalLM"),
        _module(model, "stock", note="calls its layers in order"),
        _module(f"{module}:{family}DecoderLayer", "stock", note="rounds the residual sums"),
        _module("torch.nn.modules.sparse:Embedding", "stock", inside=(model,), note="a lookup"),
        _module("torch.nn.modules.container:ModuleList", "stock", inside=(model,)),
        _module(
            f"{module}:{family}RotaryEmbedding",
            "unused",
            note="attention computes its cosines and sines from position ids",
        ),
    )


def dense_modules(module: str, family: str) -> tuple[Submodule, ...]:
    """A dense model whose classes begin with ``family``."""
    mlp = f"{family}MLP"
    return (
        *decoder_modules(module, family),
        *exact(module, mlp),
        linear_inside(module, mlp),
        activation_inside(module, mlp),
    )


def softmax_moe_modules(module: str, family: str) -> tuple[Submodule, ...]:
    """A model of softmax-routed experts whose classes begin with ``family``."""
    return (
        *decoder_modules(module, family),
        *exact(module, f"{family}TopKRouter", f"{family}Experts"),
        activation_inside(module, f"{family}Experts"),
        _module(f"{module}:{family}SparseMoeBlock", "stock", note="router, then experts"),
    )


def grouped_moe_modules(module: str, family: str) -> tuple[Submodule, ...]:
    """A model of dense layers, then experts of a grouped sigmoid router and shared ones."""
    mlp, moe, experts = f"{family}MLP", f"{family}MoE", f"{family}Experts"
    return (
        *decoder_modules(module, family),
        *exact(module, mlp, f"{family}TopkRouter", moe),
        linear_inside(module, mlp),
        activation_inside(module, mlp, experts),
        computed_inside(f"{module}:{experts}", module, moe),
    )
