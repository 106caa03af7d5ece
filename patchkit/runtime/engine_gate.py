"""Is the engine that was built the one the profile describes?

Asked of the engine's *final* configuration, and of each worker's own copy of it:
arguments are only wishes (vLLM resolves, overrides and sometimes drops them). The
rules are positive and closed: a setting that cannot be read is a violation, and so
is every feature that the claim does not cover.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from packaging.version import Version

from patchkit.errors import Violation, ViolationsError
from patchkit.runtime import all2all
from patchkit.runtime.profile import ANY_MODEL, Profile, ProfileContent
from patchkit.runtime.sync import BACKENDS

__all__ = [
    "RULES",
    "EngineRefusedError",
    "EngineRule",
    "check_settings",
    "read_settings",
    "require_engine",
]

UNREADABLE = "(cannot be read)"


class EngineRefusedError(ViolationsError):
    """An engine that is not what its profile says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRule:
    """One setting of ``VllmConfig``.

    Attributes:
        path: Attribute path in the configuration, or a name for what ``read`` reads.
        expected: What it must be under a profile, as plain data.
        key: The profile's key, for the line; empty for features never covered.
        accepts: The test, ``accepts(found, expected)``; equality if None.
        effect: What another value does.
        since: First version of vLLM that has the setting; an older one without it
            cannot have the feature. Empty: every version we know has it.
        refuse: Judges a value that could be read, in the place of ``accepts``, where more
            than the profile decides: by what was accepted, and with words of its own.
        read: Reads it in the process where no configuration says it.
    """

    path: str
    expected: Callable[[ProfileContent], Any]
    key: str = ""
    accepts: Callable[[Any, Any], bool] | None = None
    effect: str = ""
    since: str = ""
    refuse: Callable[..., Violation | None] | None = None
    read: Callable[[], Any] | None = None

    def holds(self, found: Any, content: ProfileContent, version: str | None) -> bool:
        expected = self.expected(content)
        if found == UNREADABLE:
            return bool(self.since and version) and Version(str(version)) < Version(self.since)
        if self.accepts is not None:
            return self.accepts(found, expected)
        # 1 == True: a switch must be a switch.
        return type(found) is type(expected) and bool(found == expected)


def _same(
    path: str, key: str, get: Callable[[ProfileContent], Any], effect: str = ""
) -> EngineRule:
    return EngineRule(path=path, key=key, expected=get, effect=effect)


def _off(path: str, effect: str, since: str = "") -> EngineRule:
    return EngineRule(path=path, expected=lambda c: False, effect=effect, since=since)


def _none(path: str, effect: str, since: str = "") -> EngineRule:
    return EngineRule(path=path, expected=lambda c: None, effect=effect, since=since)


def _empty(path: str, effect: str, read: Callable[[], Any] | None = None) -> EngineRule:
    return EngineRule(
        path=path,
        expected=lambda c: "nothing",
        accepts=lambda found, _: found is None or found in ([], {}),
        effect=effect,
        read=read,
    )


def _entry_points(group: str) -> list[str]:
    return sorted(f"{e.name} = {e.value}" for e in entry_points(group=group))


def _at_most(path: str, key: str, get: Callable[[ProfileContent], Any], effect: str) -> EngineRule:
    return EngineRule(
        path=path,
        key=key,
        expected=get,
        accepts=lambda found, cap: type(found) is int and 1 <= found <= cap,
        effect=effect,
    )


_BATCH = "changes which rows are computed together, beyond what was certified"
_MODEL = "model_config."
_PARALLEL = "parallel_config."

RULES: tuple[EngineRule, ...] = (
    EngineRule(
        path=_MODEL + "architectures",
        key="model.architecture",
        expected=lambda c: [c.model.architecture],
        accepts=lambda found, wanted: (
            isinstance(found, list) and (found == wanted or wanted == [ANY_MODEL])
        ),
        effect="the patches are for another model",
    ),
    _off(_MODEL + "is_hybrid", "state-space layers (Mamba) are not certified"),
    _off(_MODEL + "is_attention_free", "state-space layers (Mamba) are not certified"),
    EngineRule(
        path=_MODEL + "runner_type",
        expected=lambda c: "generate",
        effect="no generation, nothing to prove",
    ),
    _same(_MODEL + "dtype", "precision.weights", lambda c: c.precision.weights, "other roundings"),
    _same(
        _MODEL + "head_dtype",
        "engine.head_dtype",
        lambda c: c.precision.weights if c.engine.head_dtype == "model" else c.engine.head_dtype,
        "logits have another precision than was asked for",
    ),
    _none(_MODEL + "quantization", "quantised weights have no exact counterpart in the trainer"),
    _none("quant_config", "quantised weights have no exact counterpart in the trainer"),
    _same(
        _MODEL + "logprobs_mode",
        "engine.logprobs_mode",
        lambda c: c.engine.logprobs_mode,
        "raw and processed log-probabilities differ by a renormalisation",
    ),
    _same(
        _MODEL + "generation_config",
        "engine.generation_config",
        lambda c: c.engine.generation_config,
        "the model's own defaults are merged into every request",
    ),
    _empty(_MODEL + "override_generation_config", "defaults are merged into every request"),
    _empty(_MODEL + "logits_processors", "custom processors change what is drawn from"),
    # vLLM loads these into every sampler because they are installed; the raw
    # log-probabilities are taken before them, so no comparison of bits would show one.
    _empty(
        "entry_points.logits_processors",
        "an installed plugin changes what is drawn from; uninstall it",
        read=lambda: _entry_points("vllm.logits_processors"),
    ),
    _same(
        _MODEL + "disable_cascade_attn",
        "engine.cascade_attention",
        lambda c: not c.engine.cascade_attention,
        "a shared prefix is reduced in another order",
    ),
    _same(_MODEL + "enforce_eager", "engine.enforce_eager", lambda c: c.engine.enforce_eager),
    EngineRule(
        path=_MODEL + "max_model_len",
        key="engine.max_model_len",
        expected=lambda c: c.engine.max_model_len,
        accepts=lambda found, cap: type(found) is int and 1 <= found <= cap,
        effect="longer contexts were not certified",
    ),
    _off(_MODEL + "enable_prompt_embeds", "embeddings instead of tokens cannot be replayed"),
    _off(_MODEL + "enable_trace_replay", "tokens are forced, not drawn", since="0.30"),
    _off(_MODEL + "return_sampling_mask", "draws are masked", since="0.28"),
    _off(_MODEL + "trust_remote_code", "code from the model's repository runs unreviewed"),
    _same(
        _PARALLEL + "tensor_parallel_size",
        "topology.rollout.tensor",
        lambda c: c.topology.rollout.tensor,
        "sums over ranks have another tree",
    ),
    _same(
        _PARALLEL + "pipeline_parallel_size",
        "topology.rollout.pipeline",
        lambda c: c.topology.rollout.pipeline,
    ),
    _same(
        _PARALLEL + "data_parallel_size",
        "topology.rollout.data",
        lambda c: c.topology.rollout.data,
    ),
    _same(
        _PARALLEL + "decode_context_parallel_size",
        "topology.rollout.context",
        lambda c: c.topology.rollout.context,
        "attention is reduced over ranks",
    ),
    EngineRule(
        path=_PARALLEL + "prefill_context_parallel_size",
        expected=lambda c: 1,
        effect="attention is reduced over ranks",
    ),
    _same(
        _PARALLEL + "enable_expert_parallel",
        "topology.rollout.expert",
        lambda c: c.topology.rollout.expert > 1,
        "experts are placed and combined in another way",
    ),
    EngineRule(
        path=all2all.SETTING,
        key=all2all.KEY,
        expected=lambda c: c.engine.all2all_backend,
        refuse=all2all.refuse_engine,
    ),
    _off(_PARALLEL + "enable_eplb", "experts move while the engine runs"),
    _off(_PARALLEL + "enable_dbo", _BATCH),
    _off(_PARALLEL + "enable_elastic_ep", "the topology changes while the engine runs"),
    _none("speculative_config", "drafted tokens are accepted by a rule of their own"),
    _none("lora_config", "other weights than the policy's"),
    _none("kv_transfer_config", "KV entries come from elsewhere, perhaps of other weights"),
    _none("ec_transfer_config", "encoder outputs come from elsewhere"),
    _none("diffusion_config", "no autoregressive distribution"),
    _none("watermark_config", "draws are biased", since="0.30"),
    _same(
        "cache_config.enable_prefix_caching",
        "engine.prefix_caching",
        lambda c: c.engine.prefix_caching,
    ),
    _same(
        "cache_config.cache_dtype",
        "precision.kv_cache",
        lambda c: c.precision.kv_cache,
        "keys and values are rounded differently",
    ),
    _same("cache_config.block_size", "engine.block_size", lambda c: c.engine.block_size),
    _off("cache_config.kv_sharing_fast_prefill", "prefill skips layers"),
    _none("cache_config.kv_offloading_size", "KV entries outlive a reset elsewhere"),
    _at_most(
        "scheduler_config.max_num_seqs",
        "engine.max_num_seqs",
        lambda c: c.engine.max_num_seqs,
        "more concurrent requests than were certified",
    ),
    _at_most(
        "scheduler_config.max_num_batched_tokens",
        "engine.max_num_batched_tokens",
        lambda c: c.engine.max_num_batched_tokens,
        "more tokens in a step than were certified",
    ),
    _same(
        "scheduler_config.async_scheduling",
        "engine.async_scheduling",
        lambda c: c.engine.async_scheduling,
        "steps overlap with sampling",
    ),
    _same(
        "scheduler_config.enable_chunked_prefill",
        "engine.chunked_prefill",
        lambda c: c.engine.chunked_prefill,
    ),
    EngineRule(
        path="scheduler_config.policy",
        expected=lambda c: "fcfs",
        effect="another scheduler was not certified",
    ),
    _none("scheduler_config.scheduler_cls", "a scheduler of one's own was not certified"),
    _same(
        "compilation_config.mode",
        "engine.compilation",
        lambda c: c.engine.compilation.upper(),
        "a compiler may fuse agreed roundings away",
    ),
    _same(
        "compilation_config.cudagraph_mode",
        "engine.cuda_graphs",
        lambda c: c.engine.cuda_graphs.upper(),
        "graphs pad batches and replay fixed kernels",
    ),
    EngineRule(
        path="compilation_config.custom_ops",
        key="engine.custom_ops",
        expected=lambda c: list(c.engine.custom_ops),
        accepts=lambda found, wanted: not wanted or set(wanted) <= set(found or ()),
        effect="inductor's own operator runs where the patched one should",
    ),
    _same(
        "attention_config.backend",
        "engine.attention_backend",
        lambda c: None if c.engine.attention_backend == "auto" else c.engine.attention_backend,
        "another attention kernel",
    ),
    _same(
        "kernel_config.moe_backend",
        "engine.moe_backend",
        lambda c: c.engine.moe_backend,
        "another expert kernel",
    ),
    _same(
        "use_v2_model_runner",
        "engine.model_runner",
        lambda c: c.engine.model_runner == "v2",
        "the other model runner has a sampler of its own",
    ),
    EngineRule(
        path="offload_config.uva.cpu_offload_gb",
        expected=lambda c: 0.0,
        accepts=lambda found, expected: found == expected,
        effect="layer-wise reload and receipts do not cover offloaded weights",
    ),
    _same(
        "weight_transfer_config.backend",
        "weights.path",
        lambda c: BACKENDS[c.weights.path],
        "weights would arrive without receipts",
    ),
)


def read_settings(config: Any) -> dict[str, Any]:
    """The settings that rules look at, as plain data; runs in driver and workers."""
    return {rule.path: rule.read() if rule.read else _plain(config, rule.path) for rule in RULES}


def _plain(config: Any, path: str) -> Any:
    value = config
    for name in path.split("."):
        try:
            value = getattr(value, name)
        except Exception:  # a property may raise whatever it likes: it cannot be read
            return UNREADABLE
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list | tuple):
        return [v if type(v) in (bool, int, float, str) else repr(v) for v in value]
    if isinstance(value, dict):
        return {str(k): repr(v) for k, v in value.items()}
    if isinstance(getattr(value, "name", None), str):  # enumerations
        return value.name
    if str(value).startswith("torch."):
        return str(value).removeprefix("torch.")
    return f"<{type(value).__name__}>"


def check_settings(
    settings: Mapping[str, Any],
    profile: Profile,
    *,
    who: str = "engine",
    version: str | None = None,
    accept_all2all: Mapping[str, str] | None = None,
) -> list[Violation]:
    """Every setting that is not as the profile says.

    Args:
        settings: From :func:`read_settings`.
        profile: What was asked for.
        who: The process, for messages.
        version: vLLM's version; without one, nothing may be unreadable.
        accept_all2all: All-to-all backends that the contract accepted unreviewed.
    """
    found = []
    for rule in RULES:
        value = settings.get(rule.path, UNREADABLE)
        if rule.refuse is not None and value != UNREADABLE:
            refused = rule.refuse(value, profile, accept_all2all or {}, who=who)
            found += [refused] if refused else []
            continue
        if rule.holds(value, profile.content, version):
            continue
        line = f" ({profile.where(rule.key)})" if rule.key else ""
        found.append(
            Violation(
                subject=f"{who}: {rule.path}{line}",
                problem=rule.effect or "not what the profile says",
                expected=f"at most {rule.expected(profile.content)}"
                if rule.path.rsplit(".", 1)[-1].startswith("max_")
                else repr(rule.expected(profile.content)),
                found=repr(value),
                remedy="build the engine with Profile.engine_arguments(), or write and certify "
                "another profile"
                if value != UNREADABLE
                else "this version of vLLM has no such setting: its rules must be reviewed",
            )
        )
    return found


def require_engine(
    llm: Any, profile: Profile, *, accept_all2all: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Refuse an engine, or a worker of it, that is not what the profile says.

    Args:
        llm: ``vllm.LLM`` with patchkit's worker extension.
        profile: What was asked for.
        accept_all2all: ``Contract.accepted_all2all``, where something was accepted.

    Returns:
        The workers' settings, for the artifact.

    Raises:
        EngineRefusedError: With every setting of every process that differs.
    """
    from patchkit.symbols import installed_version

    version = installed_version("vllm")
    own = read_settings(llm.llm_engine.vllm_config)
    violations = check_settings(own, profile, version=version, accept_all2all=accept_all2all)
    workers = llm.collective_rpc("patchkit_settings")
    rollout = profile.content.topology.rollout
    # Of one engine; each data-parallel one answers for itself.
    if len(workers) != (size := rollout.tensor * rollout.pipeline):
        violations.append(
            Violation(
                subject=f"engine: its workers ({profile.where('topology.rollout')})",
                problem="not every worker said what it was built with",
                expected=f"{size} answers",
                found=str(len(workers)),
                remedy="build the engine with Profile.engine_arguments() and the worker "
                "extension of patchkit",
            )
        )
    for rank, settings in enumerate(workers):
        violations += check_settings(
            settings,
            profile,
            who=f"worker {rank}",
            version=version,
            accept_all2all=accept_all2all,
        )
    if violations:
        raise EngineRefusedError(
            f"the engine is not the one of profile {profile.name!r}", violations
        )
    return list(workers)
