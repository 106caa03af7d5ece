"""The CUDA patches of Qwen3-MoE: declarations only, nothing heavy is imported.

``vllm_bi`` takes vLLM's batch-invariant mode as it is and replaces one symbol of
it; the trainer then reproduces that engine's roundings at one fixed topology.
``vllm_bi_fast`` also chooses tiles by the number of rows, which on this chip
changes no bit: the same trainer matches both. ``tp_independent`` adds to that exact sums
in the two places where ranks share a layer: its bits do not depend on tensor- or
expert-parallel size, up to two ranks; ``tp_independent_4`` cuts K into four slices, for
up to four.
"""

from __future__ import annotations

from typing import Any

from patchkit.engine import Patch

VLLM_BI = ("vllm_bi", "vllm_bi_fast")
# Profile, and the ending of the replacements that cut K into its number of slices.
_SLICED = {"tp_independent": "", "tp_independent_4": "_4"}
ANY_TOPOLOGY = tuple(_SLICED)
EVERY = VLLM_BI + ANY_TOPOLOGY

_ROLLOUT = "patchkit_adapters.qwen3_moe.cuda_rollout:"
_TRAINER = "patchkit_adapters.qwen3_moe.cuda_trainer:"
_LAYERS = "vllm.model_executor.layers."
_MOE = _LAYERS + "fused_moe."
_HF = "transformers.models.qwen3_moe.modeling_qwen3_moe:"

# The only vLLM that these operators were compared with.
_VLLM = ">=0.26,<0.27"
_TRANSFORMERS = ">=5.17,<5.18"
_UNTIL_EXACT = "vLLM has a reduction whose bits do not depend on the number of ranks"
_UNTIL_TRAINER = "transformers lets the trainer name the operator instead of replacing the method"

_FLASH = ("vllm.vllm_flash_attn.flash_attn_interface:flash_attn_varlen_func",)
_ALIGN = (_MOE + "moe_align_block_size:moe_align_block_size",)
# The trainer of vllm_bi does not call the engine's kernel, but has to have its bits.
_ENGINES_EXPERTS = (_MOE + "fused_moe:invoke_fused_moe_triton_kernel", *_ALIGN)


def _sliced(*, replacement: str, **fields: Any) -> tuple[Patch, ...]:
    """A patch for each number of slices, with a replacement of its own."""
    return tuple(
        Patch(action="replace", replacement=replacement + ending, profiles=(profile,), **fields)
        for profile, ending in _SLICED.items()
    )


CUDA_ROLLOUT: tuple[Patch, ...] = (
    Patch(
        symbol=_LAYERS + "layernorm:rms_norm_batch_invariant",
        action="replace",
        replacement=_ROLLOUT + "rms_norm",
        versions=_VLLM,
        profiles=EVERY,
        reason="the residual sum is rounded before the norm reads it, behind an opaque operator",
        consequence="inductor fuses the add (one rounding less) and picks the reduction of the "
        "q/k norms by timing: two starts of one engine can differ in their last bits",
        until="vLLM's batch-invariant RMSNorm is an opaque operator that rounds the residual sum",
    ),
    Patch(
        symbol=_LAYERS + "batch_invariant:linear_batch_invariant",
        action="replace",
        replacement=_ROLLOUT + "linear",
        versions=_VLLM,
        profiles=("vllm_bi_fast", *ANY_TOPOLOGY),
        reason="a tile for few rows, in every layer and the output layer; the same sum in order",
        consequence="none in the bits; decode computes 128 rows where it needs 1 to 64",
        until="vLLM's matmul_persistent chooses its tile by the number of rows",
    ),
    Patch(
        symbol=_MOE + "fused_moe:get_default_config",
        action="replace",
        replacement=_ROLLOUT + "expert_tile",
        versions=_VLLM,
        profiles=("vllm_bi_fast",),
        reason="a tile for the number of rows per expert; batch-invariant mode takes a fixed one",
        consequence="none in the bits; the experts run with a tile that fits no batch size well",
        until="vLLM chooses its expert tiles by batch size in batch-invariant mode",
    ),
    *_sliced(
        symbol=_LAYERS + "linear:RowParallelLinear.forward",
        replacement=_ROLLOUT + "row_parallel_forward",
        versions=_VLLM,
        reason="slices of K are rounded where they are cut and added exactly, in float64",
        consequence="the output projection's bits change with the tensor-parallel size",
        until=_UNTIL_EXACT,
    ),
    *_sliced(
        symbol=_MOE + "unquantized_fused_moe_method:UnquantizedFusedMoEMethod.apply",
        replacement=_ROLLOUT + "experts_apply",
        versions=_VLLM,
        reason="outputs of experts and slices are added exactly, in float64, over all ranks",
        consequence="the experts' sum changes with tensor- and expert-parallel size",
        until=_UNTIL_EXACT,
        depends_on=_ALIGN,
    ),
    Patch(
        symbol=_MOE + "runner.moe_runner:MoERunner._maybe_reduce_final_output",
        action="replace",
        replacement=_ROLLOUT + "added_already",
        versions=_VLLM,
        profiles=ANY_TOPOLOGY,
        reason="the ranks have been added before the sum was rounded",
        consequence="the experts' output is added up once for every rank",
        until=_UNTIL_EXACT,
    ),
)

CUDA_TRAINER: tuple[Patch, ...] = (
    Patch(
        symbol=_HF + "Qwen3MoeRMSNorm.forward",
        action="replace",
        replacement=_TRAINER + "rms_norm_forward",
        versions=_TRANSFORMERS,
        profiles=EVERY,
        reason="the engine's order of summation, and one rounding instead of two",
        consequence="every token's log-probability differs from the rollout",
        until=_UNTIL_TRAINER,
    ),
    Patch(
        symbol=_HF + "Qwen3MoeAttention.forward",
        action="replace",
        replacement=_TRAINER + "attention_forward",
        versions=_TRANSFORMERS,
        profiles=VLLM_BI,
        reason="products in order of K, rotation in float32, FlashAttention 3 with one split",
        consequence="every token's log-probability differs from the rollout",
        until=_UNTIL_TRAINER,
        depends_on=_FLASH,
    ),
    *_sliced(
        symbol=_HF + "Qwen3MoeAttention.forward",
        replacement=_TRAINER + "attention_forward_any",
        versions=_TRANSFORMERS,
        reason="as in vllm_bi; slices of the output projection are added exactly",
        consequence="every token's log-probability differs from the rollout",
        until=_UNTIL_TRAINER,
        depends_on=_FLASH,
    ),
    Patch(
        symbol=_HF + "Qwen3MoeTopKRouter.forward",
        action="replace",
        replacement=_TRAINER + "router_forward",
        versions=_TRANSFORMERS,
        profiles=EVERY,
        reason="vLLM's top-k softmax; router weights stay float32",
        consequence="weights are rounded to bf16 and ties go to another expert",
        until=_UNTIL_TRAINER,
        depends_on=("vllm._custom_ops:topk_softmax",),
    ),
    Patch(
        symbol=_HF + "Qwen3MoeExperts.forward",
        action="replace",
        replacement=_TRAINER + "experts_forward",
        versions=_TRANSFORMERS,
        profiles=VLLM_BI,
        reason="the bits of vLLM's grouped kernel, and its order of combination",
        consequence="every token's log-probability differs from the rollout",
        until=_UNTIL_TRAINER,
        depends_on=_ENGINES_EXPERTS,
    ),
    *_sliced(
        symbol=_HF + "Qwen3MoeExperts.forward",
        replacement=_TRAINER + "experts_forward_any",
        versions=_TRANSFORMERS,
        reason="as in vllm_bi; outputs of experts and slices are added exactly",
        consequence="every token's log-probability differs from the rollout",
        until=_UNTIL_TRAINER,
        depends_on=_ALIGN,
    ),
    Patch(
        symbol=_HF + "Qwen3MoeForCausalLM.forward",
        action="replace",
        replacement=_TRAINER + "causal_lm_forward",
        versions=_TRANSFORMERS,
        profiles=EVERY,
        reason="the output layer's product in order of K; sequence boundaries found once",
        consequence="every token's log-probability differs from the rollout",
        until=_UNTIL_TRAINER,
    ),
)
