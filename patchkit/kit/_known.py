"""Which operators of both libraries the shared bindings cover.

On the vLLM side operators are the library's own layers, known by name: what each
binding accepts of a layer it checks itself, when it runs. On the transformers side every
model writes its own classes; a binding covers a class whose ``forward`` is, statement by
statement, one that the binding was written against.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from patchkit.bindings import transformers as hf
from patchkit.engine import Patch
from patchkit.symbols import Symbol, find_facts, installed_version

_HF = "transformers.models."
_QWEN3 = _HF + "qwen3.modeling_qwen3:Qwen3"
_QWEN3_MOE = _HF + "qwen3_moe.modeling_qwen3_moe:Qwen3Moe"
_QWEN2 = _HF + "qwen2.modeling_qwen2:Qwen2"
_LLAMA = _HF + "llama.modeling_llama:Llama"
_GLM4_MOE = _HF + "glm4_moe.modeling_glm4_moe:Glm4Moe"
_DECODERS = (_QWEN3, _QWEN3_MOE, _QWEN2, _LLAMA, _GLM4_MOE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """A maker of trainer patches, in :mod:`patchkit.bindings.transformers`.

    Attributes:
        function: Its name.
        written_for: Classes whose ``forward`` it was written against.
        output: Its argument of that name, where it has one.
    """

    function: str
    written_for: tuple[str, ...]
    output: str = ""

    def call(self, name: str) -> str:
        """The call, as an adapter writes it."""
        more = f', output="{self.output}"' if self.output else ""
        return f'hf.{self.function}(_HF, "{name}"{more})'

    def patches(self, module: str, name: str) -> tuple[Patch, ...]:
        """What the call makes."""
        options = {"output": self.output} if self.output else {}
        made: tuple[Patch, ...] = getattr(hf, self.function)(module, name, **options)
        return made


MAKERS = (
    Maker(function="rms_norm", written_for=(_QWEN3 + "RMSNorm",)),
    Maker(
        function="attention",
        written_for=tuple(prefix + "Attention" for prefix in _DECODERS),
    ),
    Maker(function="gated_mlp", written_for=(_QWEN3 + "MLP",)),
    Maker(function="softmax_router", written_for=(_QWEN3_MOE + "TopKRouter",)),
    Maker(function="experts", written_for=(_QWEN3_MOE + "Experts",)),
    Maker(function="grouped_router", written_for=(_GLM4_MOE + "TopkRouter",)),
    Maker(function="shared_moe", written_for=(_GLM4_MOE + "MoE",)),
    Maker(function="causal_lm", written_for=(_QWEN3 + "ForCausalLM",)),
    Maker(function="causal_lm", output="router_loss", written_for=(_QWEN3_MOE + "ForCausalLM",)),
    Maker(function="causal_lm", output="moe", written_for=(_GLM4_MOE + "ForCausalLM",)),
)

# Forward methods that add residuals and call the rest: exact as they are, and reviewed.
CALLS_ONLY = tuple(
    prefix + name
    for name in ("DecoderLayer", "Model", "RotaryEmbedding", "SparseMoeBlock")
    for prefix in _DECODERS
)

_LAYERS = "vllm.model_executor.layers."


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer of vLLM's.

    Attributes:
        patches: Names of tuples in ``patchkit.bindings.vllm_cpu``; none where the layer
            is exact as it is.
        note: What is worth knowing.
        reviewed: Whether its own source is part of the claim, because it runs as it is.
    """

    patches: tuple[str, ...] = ()
    note: str = ""
    reviewed: bool = False


_NOT_FUSED = "computes nothing: asks whether AITER fuses shared experts, on ROCm"
LAYERS: dict[str, Layer] = {
    _LAYERS + "linear:QKVParallelLinear": Layer(patches=("LINEAR",)),
    _LAYERS + "linear:MergedColumnParallelLinear": Layer(patches=("LINEAR",)),
    _LAYERS + "linear:ColumnParallelLinear": Layer(patches=("LINEAR",)),
    _LAYERS + "linear:RowParallelLinear": Layer(patches=("LINEAR",)),
    _LAYERS + "linear:ReplicatedLinear": Layer(patches=("LINEAR",)),
    _LAYERS + "layernorm:RMSNorm": Layer(patches=("NORM",)),
    _LAYERS + "rotary_embedding:get_rope": Layer(
        patches=("ROTARY",), note="the default rotation; others are refused by name"
    ),
    _LAYERS + "attention:Attention": Layer(patches=("ATTENTION",)),
    _LAYERS + "attention:EncoderOnlyAttention": Layer(note="not built for a decoder"),
    _LAYERS + "activation:SiluAndMul": Layer(patches=("ACTIVATION",)),
    _LAYERS + "fused_moe:GateLinear": Layer(patches=("GATE",)),
    _LAYERS + "fused_moe:FusedMoE": Layer(patches=("ROUTER", "EXPERTS", "EXPERTS_OUTPUT")),
    _LAYERS + "fused_moe:FusedMoEFactory": Layer(patches=("ROUTER", "EXPERTS", "EXPERTS_OUTPUT")),
    _LAYERS + "fused_moe.utils:is_model_fused_shared_expert_compatible": Layer(note=_NOT_FUSED),
    _LAYERS + "fused_moe.utils:resolve_layer_fused_shared_expert": Layer(note=_NOT_FUSED),
    _LAYERS + "vocab_parallel_embedding:ParallelLMHead": Layer(patches=("LM_HEAD",)),
    _LAYERS + "vocab_parallel_embedding:VocabParallelEmbedding": Layer(
        note="a lookup: no sum whose order could matter"
    ),
    _LAYERS + "fusion.fused_act_quant:maybe_fused_act_quant": Layer(
        note="calls the activation where nothing is quantised", reviewed=True
    ),
    _LAYERS + "logits_processor:LogitsProcessor": Layer(note="gathers logits, computes none"),
}


# What becomes of a routed model's patches where shared experts run beside the routed ones.
WITH_SHARED_EXPERTS = {
    "GATE": "LINEAR",
    "ROUTER": "GROUPED_ROUTER",
    "EXPERTS_OUTPUT": "SHARED_EXPERTS_OUTPUT",
}
# And what they call unpatched.
SHARED_EXPERTS_RELY_ON = (
    _LAYERS + "fused_moe.router.gate_linear:GateLinear.forward",
    _LAYERS + "fused_moe.runner.moe_runner:MoERunner.forward",
    _LAYERS + "fused_moe.runner.shared_experts:SharedExperts.forward",
)


@lru_cache(maxsize=1)
def forward_digests() -> dict[str, str]:
    """Body digest of each known ``forward`` in the installed transformers, to its class."""
    found: dict[str, str] = {}
    for symbol in (*(s for maker in MAKERS for s in maker.written_for), *CALLS_ONLY):
        facts = find_facts(f"{symbol}.forward")
        if facts is not None:
            found.setdefault(facts.body_digest, symbol)
    return found


def maker_of(symbol: str) -> Maker | None:
    """The maker whose binding was written against this class's ``forward``."""
    known = _known(symbol)
    return next((maker for maker in MAKERS if known in maker.written_for), None)


def only_calls(symbol: str) -> bool:
    """Whether a class's ``forward`` is one that only adds residuals and calls the rest."""
    known = _known(symbol)
    return known in CALLS_ONLY


def _known(symbol: str) -> str | None:
    facts = find_facts(f"{symbol}.forward")
    return forward_digests().get(facts.body_digest) if facts is not None else None


def applies(patch: Patch) -> bool:
    """Whether a patch is for the installed version of its target's package."""
    if not patch.versions:
        return True
    from packaging.specifiers import SpecifierSet

    version = installed_version(Symbol.parse(patch.symbol).package).partition("+")[0]
    return SpecifierSet(patch.versions).contains(version, prereleases=True)
