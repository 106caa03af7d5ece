"""The declarations, by operator. Data only: replacements are named by reference."""

from __future__ import annotations

from typing import Any

from patchkit.engine import Patch

PROFILE = "cpu_tree"

_HERE = "patchkit.bindings.transformers."
_UNTIL_SHARED = "transformers lets the trainer name the operator instead of replacing the method"

# transformers versions whose methods these patches know. A model that came into this shape
# later says ``since=``; what ends the range is a property of the bindings.
_SINCE = "5.17"
_BEFORE = "5.25"
# Attention and causal models take ``cache`` from here on; it was ``past_key_values``.
_CACHE = "5.24"


def _replace(
    symbol: str, shared: str, /, *, since: str = _SINCE, **fields: Any
) -> tuple[Patch, ...]:
    defaults: dict[str, Any] = {
        "replacement": _HERE + shared,
        "versions": f">={since},<{_BEFORE}",
        "until": _UNTIL_SHARED,
        "profiles": (PROFILE,),
    }
    return (Patch(symbol=symbol, action="replace", **{**defaults, **fields}),)


def _by_signature(
    symbol: str, shared: str, /, *, since: str = _SINCE, **fields: Any
) -> tuple[Patch, ...]:
    """A patch for each name that the cache's argument has had.

    A replacement of the caller's own has one of them: ``replacement=`` makes one patch,
    for the ``versions=`` that come with it.
    """
    if "replacement" in fields:
        return _replace(symbol, shared, **fields)
    before, after = f">={since},<{_CACHE}", f">={_CACHE},<{_BEFORE}"
    return (
        *_replace(symbol, f"{shared}_5_17", versions=before, **fields),
        *_replace(symbol, shared, versions=after, **fields),
    )


def rms_norm(module: str, name: str, **fields: Any) -> tuple[Patch, ...]:
    """A norm ``name(weight, variance_epsilon)``, ``weight * x / rms``."""
    return _replace(
        f"{module}:{name}.forward",
        "norm_layer:rms_norm_forward",
        reason="exact mean of squares",
        consequence="the mean's order depends on the width's vectorisation",
        evidence="patchkit.bindings.evidence:stock_norm_differs",
        **fields,
    )


def attention(module: str, name: str, **fields: Any) -> tuple[Patch, ...]:
    """Grouped-query attention with ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``.

    Norms of queries and keys, biases of the projections and a rotation of a part
    of each head are read off the module and its configuration.
    """
    return _by_signature(
        f"{module}:{name}.forward",
        "attention_layer:attention_forward",
        reason="exact projections and attention; rotation in float32 from position ids",
        consequence="bits change with padding, packing and micro-batch size; FSDP2 casts "
        "cosines and sines to bf16",
        **fields,
    )


def gated_mlp(module: str, name: str, **fields: Any) -> tuple[Patch, ...]:
    """A feed-forward layer with ``gate_proj``, ``up_proj`` and ``down_proj``."""
    return _replace(
        f"{module}:{name}.forward",
        "mlp_layer:gated_mlp_forward",
        reason="exact products, the rollout's roundings, slices of the down projection as a tree",
        consequence="every token's log-probability differs from the rollout",
        **fields,
    )


def softmax_router(module: str, name: str, **fields: Any) -> tuple[Patch, ...]:
    """A softmax top-k router with ``weight``, ``top_k`` and ``norm_topk_prob``."""
    return _replace(
        f"{module}:{name}.forward",
        "expert_layers:softmax_router_forward",
        reason="float32 router logits, stable ties, weights kept in float32",
        consequence="near ties choose other experts than the rollout did",
        **fields,
    )


def grouped_router(module: str, name: str, **fields: Any) -> tuple[Patch, ...]:
    """A sigmoid router with ``e_score_correction_bias`` that chooses within groups."""
    return _replace(
        f"{module}:{name}.forward",
        "expert_layers:grouped_router_forward",
        reason="float32 router logits, stable ties, weights kept in float32",
        consequence="near ties choose other experts than the rollout did",
        evidence="patchkit.bindings.evidence:stock_grouped_router_differs",
        **fields,
    )


def shared_moe(module: str, name: str, **fields: Any) -> tuple[Patch, ...]:
    """``gate``, ``experts`` and ``shared_experts``, a gated feed-forward layer."""
    return _replace(
        f"{module}:{name}.forward",
        "expert_layers:shared_moe_forward",
        reason="shared and routed outputs stay float32 until their sum, as on the rollout side",
        consequence="both are rounded before they are added, and the factor is in the weights",
        **fields,
    )


def experts(module: str, name: str, **fields: Any) -> tuple[Patch, ...]:
    """Stacked experts ``gate_up_proj`` ``[E, 2F, H]`` and ``down_proj`` ``[E, H, F]``."""
    return _replace(
        f"{module}:{name}.forward",
        "expert_layers:experts_forward",
        reason="the rollout's roundings and order of combination",
        consequence="every token's log-probability differs from the rollout",
        **fields,
    )


def causal_lm(module: str, name: str, *, output: str = "dense", **fields: Any) -> tuple[Patch, ...]:
    """The causal model: logits in float32, losses and output as in transformers.

    Args:
        module: Of the class.
        name: The class.
        output: ``"dense"``, ``"moe"`` (mixture of experts without a router loss in its
            signature) or ``"router_loss"``.
        fields: Further fields of the patch.
    """
    return _by_signature(
        f"{module}:{name}.forward",
        f"output_layer:{output}_forward",
        reason="float32 logits from the exact product",
        consequence="bf16 logits: every log-probability differs",
        **{"until": "transformers has a float32 output layer for this model", **fields},
    )


def decoder(module: str, family: str, **fields: Any) -> tuple[Patch, ...]:
    """Norm and attention of ``{family}RMSNorm`` and ``{family}Attention``."""
    return (
        *rms_norm(module, f"{family}RMSNorm", **fields),
        *attention(module, f"{family}Attention", **fields),
    )


def dense(module: str, family: str, **fields: Any) -> tuple[Patch, ...]:
    """Everything of a dense model whose classes begin with ``family``."""
    return (
        *decoder(module, family, **fields),
        *gated_mlp(module, f"{family}MLP", **fields),
        *causal_lm(module, f"{family}ForCausalLM", **fields),
    )


def softmax_moe(module: str, family: str, **fields: Any) -> tuple[Patch, ...]:
    """Everything of a model of softmax-routed experts whose classes begin with ``family``."""
    return (
        *decoder(module, family, **fields),
        *softmax_router(module, f"{family}TopKRouter", **fields),
        *experts(module, f"{family}Experts", **fields),
        *causal_lm(module, f"{family}ForCausalLM", output="router_loss", **fields),
    )


def grouped_moe(module: str, family: str, **fields: Any) -> tuple[Patch, ...]:
    """Everything of a model of dense layers, then experts of a grouped sigmoid router.

    Shared experts run beside the routed ones.
    """
    return (
        *decoder(module, family, **fields),
        *gated_mlp(module, f"{family}MLP", **fields),
        *grouped_router(module, f"{family}TopkRouter", **fields),
        *shared_moe(module, f"{family}MoE", **fields),
        *causal_lm(module, f"{family}ForCausalLM", output="moe", **fields),
    )
