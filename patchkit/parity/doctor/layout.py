"""How both sides' modules and functions map to the same operators: rules, as data.

vLLM keeps the module names of the checkpoint, because weights are loaded by them, and
so does transformers. An operator's name therefore is its module's path inside its layer
(``self_attn.q_proj``); what a side merges, renames or does in a function is said here.
The defaults cover decoder models of the usual build; an adapter whose model is built
otherwise points to a :class:`Layout` of its own (``Adapter.doctor``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from patchkit.parity.doctor.recording import AFTER, BEFORE, OperatorKey

__all__ = ["DEFAULT_LAYOUT", "FunctionTap", "Layout", "label", "locate"]

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.(.+))?$")


@dataclass(frozen=True, kw_only=True)
class FunctionTap:
    """A function of the exact path whose result is an operator's.

    A shared product is float32 where the function returns. If its caller casts it next,
    the operator's output is what comes out of the cast.

    Attributes:
        reference: ``module:qualname``.
        role: ``product``: ``f(x, weight, ...)``, named by the module that owns the
            weight; ``rotation``: ``f(x, positions, ...)``, queries first, then keys.
    """

    reference: str
    role: str


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The rules.

    Attributes:
        packed: What a rollout module's output rows consist of, where the model class
            does not say it itself (``packed_modules_mapping``).
        renamed: Path parts that vLLM and transformers call differently, to the name used.
        inputs: Products whose *input* is an operator of its own, and that one's name.
        combined: Blocks whose whole output is compared only where they have a part that
            vLLM adds inside its expert layer.
        expert_weights: vLLM's name of a stacked expert weight, to the trainer's.
        functions: Functions of the exact trainer path.
        rotation: Names of the stock rotation function in a modeling module.
    """

    packed: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {
            "qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "gate_up_proj": ("gate_proj", "up_proj"),
        }
    )
    renamed: Mapping[str, str] = field(
        default_factory=lambda: {
            "block_sparse_moe": "mlp",
            "shared_experts": "shared_expert",
            "embedding": "embed_tokens",
            "wte": "embed_tokens",
            "final_layernorm": "norm",
            "ln_f": "norm",
        }
    )
    inputs: Mapping[str, str] = field(
        default_factory=lambda: {
            "o_proj": "attention",
            "out_proj": "attention",
            "dense": "attention",
            "down_proj": "activation",
        }
    )
    combined: tuple[str, ...] = ("mlp", "feed_forward")
    expert_weights: Mapping[str, str] = field(
        default_factory=lambda: {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}
    )
    functions: tuple[FunctionTap, ...] = (
        FunctionTap(reference="patchkit.providers:linear", role="product"),
        FunctionTap(reference="patchkit.providers:rotate", role="rotation"),
    )
    rotation: tuple[str, ...] = ("apply_rotary_pos_emb", "apply_rotary_emb")


DEFAULT_LAYOUT = Layout()

# Path of an operator to what a reader calls it; the last part decides.
_LABELS = {
    "embed_tokens": "embedding",
    "input_layernorm": "input norm",
    "input_layernorm.in": "residual in",
    "post_attention_layernorm": "post norm",
    "post_attention_layernorm.in": "residual mid",
    "q_proj": "q product",
    "k_proj": "k product",
    "v_proj": "v product",
    "q_norm": "q norm",
    "k_norm": "k norm",
    "rope.q": "q rope",
    "rope.k": "k rope",
    "attention": "attention",
    "o_proj": "o product",
    "out_proj": "o product",
    "gate": "router logits",
    "gate.ids": "top-k choice",
    "gate.weights": "top-k weights",
    "experts": "experts combined",
    "mlp": "mlp output",
    "feed_forward": "mlp output",
    "gate_proj": "gate product",
    "up_proj": "up product",
    "activation": "activation",
    "down_proj": "down product",
    "norm": "final norm",
    "norm.in": "last residual",
    "lm_head": "logits",
    "logprob": "log-softmax",
}


def label(op: str) -> str:
    """A reader's name of an operator."""
    parts = op.split(".")
    for count in (2, 1):
        known = _LABELS.get(".".join(parts[-count:]))
        if known:
            shared = "shared expert " if "shared_expert" in parts[:-count] else ""
            return shared + known
    if parts[-1] == "in":
        return f"into {label('.'.join(parts[:-1]))}"
    return parts[-1].replace("_layernorm", " norm").replace("_", " ")


def locate(path: str, layout: Layout) -> OperatorKey | None:
    """A module's path to layer and operator; None for a container of operators."""
    if found := _LAYER.search(path):
        if not found[2]:
            return None
        return OperatorKey(int(found[1]), _renamed(found[2], layout))
    name = _renamed(path.rsplit(".", 1)[-1], layout)
    return OperatorKey(BEFORE if name == "embed_tokens" else AFTER, name)


def _renamed(path: str, layout: Layout) -> str:
    return ".".join(layout.renamed.get(part, part) for part in path.split("."))


def owner_names(*objects: object) -> tuple[str, ...]:
    """``module:Class`` of each object and its bases, nearest first, torch's own left out."""
    names: dict[str, None] = {}
    for one in objects:
        if one is None:
            continue
        for cls in type(one).__mro__:
            if cls.__module__.partition(".")[0] not in ("builtins", "torch", "abc", "typing"):
                names[f"{cls.__module__}:{cls.__qualname__}"] = None
    return tuple(names)


_FACTS = {
    "variance_epsilon": "eps",
    "eps": "eps",
    "scaling": "scale",
    "scale": "scale",
    "base": "rope base",
    "top_k": "top_k",
    "norm_topk_prob": "renormalize",
    "renormalize": "renormalize",
    "scoring_func": "scoring",
    "sliding_window": "sliding window",
    "logits_soft_cap": "soft cap",
    "soft_cap": "soft cap",
}


def module_facts(*objects: object) -> dict[str, float | int | str | bool]:
    """Settings that decide numbers, read from instance attributes alone."""
    found: dict[str, float | int | str | bool] = {}
    for one in objects:
        for name, value in vars(one).items() if hasattr(one, "__dict__") else ():
            if name in _FACTS and isinstance(value, float | int | str | bool):
                found.setdefault(_FACTS[name], value)
    return found
