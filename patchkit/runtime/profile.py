"""Profiles: the frozen configuration of a claim, in TOML.

A profile says everything that the claim depends on. Unknown keys are errors, there
are no defaults for what decides bits, and each thing that is wrong is reported
with its line, all of them together.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
)

from patchkit.errors import ConfigurationError, Violation, ViolationsError
from patchkit.runtime.all2all import DEFAULT as DEFAULT_ALL2ALL
from patchkit.runtime.canonical import digest_of
from patchkit.runtime.sync import BACKENDS
from patchkit.runtime.tomllines import find_line, key_lines

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "ANY_MODEL",
    "EngineOption",
    "Parallel",
    "Profile",
    "ProfileContent",
    "ProfileError",
    "load_profile",
    "parse_profile",
]

ANY_MODEL = "any"

Size = Annotated[int, Field(ge=1)]
Dtype = Literal["bfloat16", "float16", "float32"]


class ProfileError(ViolationsError, ConfigurationError):
    """A profile that cannot be used, with every reason."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Head(_Section):
    """What is claimed, and by whom.

    Attributes:
        name: As it appears in artifacts.
        adapter: Adapter that patches both sides.
        claim: ``on_policy``: every token is drawn from the trainer's distribution and
            proven so. ``greedy_smoke``: deterministic, for smoke tests. ``in_flight``:
            weights change under running requests; the lag of each token is
            measured. Only the first is ever called on-policy.
        summary: For the reader.
    """

    name: str
    adapter: str
    claim: Literal["on_policy", "greedy_smoke", "in_flight"]
    summary: str = ""


class Model(_Section):
    """The model.

    Attributes:
        architecture: Class name in ``config.json``; ``any`` for an adapter that no model
            belongs to. Never with the claim ``on_policy``.
        id: Name, or folder.
        revision: A commit of 40 hexadecimal digits, or ``local`` for a folder: then
            the digest of its ``config.json`` is part of the contract.
    """

    architecture: str
    id: str = ""
    revision: Annotated[str, Field(pattern=r"^([0-9a-f]{40}|local)$")]


class Parallel(_Section):
    """Sizes of the parallel dimensions of one side."""

    tensor: Size
    expert: Size
    pipeline: Size
    context: Size
    data: Size

    @property
    def ranks(self) -> int:
        """Processes; expert parallelism reuses those of tensor and data."""
        return self.tensor * self.pipeline * self.context * self.data


class Topology(_Section):
    """Rollout and trainer apart."""

    rollout: Parallel
    trainer: Parallel


class Precision(_Section):
    """Numerical formats."""

    weights: Dtype
    master: Dtype
    kv_cache: str
    logprobs: Literal["float32"]


class Sampling(_Section):
    """What requests may ask for.

    Attributes:
        policy: Name of a request policy; see :mod:`patchkit.runtime.admission`.
    """

    policy: Literal["on_policy", "greedy_smoke"]


class EngineOption(_Section):
    """The rollout engine's switches, one option instead of flags and variables.

    None of them has a default: an upgrade that changes a default of vLLM must not
    change a profile.

    Attributes:
        custom_ops: Entries that vLLM's ``compilation_config.custom_ops`` must have.
            Where it compiles, an operator that is not named there is inductor's
            own, and a patch of vLLM's is never reached.
        head_dtype: vLLM's own option for the output layer: ``model`` leaves it at the
            model's format. An adapter may compute in float32 either way. It came later
            than the others, so that it may be left out.
        all2all_backend: How tokens reach the experts of other ranks: vLLM's name for it.
            Left out, it is ``allgather_reducescatter``, whatever vLLM's own default
            becomes. Others are refused by name: see :mod:`patchkit.runtime.all2all`.
    """

    batch_invariant: bool
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"]
    generation_config: Literal["vllm"]
    max_model_len: Size
    max_num_seqs: Size
    max_num_batched_tokens: Size
    block_size: Size
    prefix_caching: bool
    chunked_prefill: bool
    async_scheduling: bool
    cascade_attention: bool
    enforce_eager: bool
    compilation: Literal["none", "stock_torch_compile", "dynamo_trace_once", "vllm_compile"]
    cuda_graphs: Literal["none", "piecewise", "full", "full_decode_only", "full_and_piecewise"]
    custom_ops: Annotated[tuple[str, ...], Field(strict=False)]
    model_runner: Literal["v1", "v2"]
    attention_backend: str
    moe_backend: str
    quantization: Literal["none"]
    speculative_decoding: Literal["none"]
    head_dtype: Literal["model", "float32"] = "model"
    all2all_backend: Annotated[str, Field(min_length=1)] = DEFAULT_ALL2ALL

    @model_serializer(mode="wrap")
    def _as_before(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Profiles from before the key existed meant its default, and keep their digests."""
        made: dict[str, Any] = handler(self)
        if self.all2all_backend == DEFAULT_ALL2ALL:
            del made["all2all_backend"]
        return made


class Weights(_Section):
    """How new weights arrive.

    Attributes:
        path: Transport: ``files`` that every worker can read, or ``ipc``: the memory of
            trainer ranks on the workers' own accelerators.
        receipts: Whether loaded weights are digested and compared.
        caches: How entries of older weights are kept from being hit.
    """

    path: Literal["files", "ipc"]
    receipts: Literal["off", "log", "enforce"]
    caches: Literal["reset", "salt"]


class Providers(_Section):
    """Implementations of operators beside the reference.

    Attributes:
        allow: Packages of implementations that the profile may use; each has to be
            admitted on the machine (``patchkit admit``). The reference always may.
        use: Operator of :mod:`patchkit.providers` to the allowed package whose function
            stands for it in every process of a run.
    """

    allow: Annotated[tuple[str, ...], Field(strict=False)] = ()
    use: dict[str, str] = {}


class ProfileContent(_Section):
    """Everything in a profile's file."""

    profile: Head
    model: Model
    topology: Topology
    packages: dict[str, str]
    precision: Precision
    sampling: Sampling
    engine: EngineOption
    weights: Weights
    providers: Providers = Providers()
    environment: dict[str, str] = {}

    @field_validator("packages")
    @classmethod
    def _specifiers(cls, packages: dict[str, str]) -> dict[str, str]:
        from packaging.specifiers import InvalidSpecifier, SpecifierSet

        for name, text in packages.items():
            try:
                if not str(SpecifierSet(text)):
                    raise ValueError(f"{name}: an empty specifier pins nothing")
            except InvalidSpecifier as e:
                raise ValueError(f"{name}: {e}") from e
        return packages

    @field_validator("environment")
    @classmethod
    def _ours(cls, environment: dict[str, str]) -> dict[str, str]:
        if taken := sorted(n for n in environment if n.startswith("PATCHKIT_")):
            raise ValueError(f"{', '.join(taken)}: set by the contract, not by a profile")
        return environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A profile with its origin.

    Attributes:
        content: The validated content.
        source: The file, for messages.
        lines: Line of each key.
    """

    content: ProfileContent
    source: str
    lines: Mapping[tuple[str, ...], int]

    @property
    def name(self) -> str:
        return self.content.profile.name

    def as_dict(self) -> dict[str, Any]:
        return self.content.model_dump(mode="json")

    @property
    def digest(self) -> str:
        return digest_of(self.as_dict())

    def where(self, key: str) -> str:
        """``file:line key``, for the subject of a violation."""
        return _where(self.source, dict(self.lines), tuple(key.split(".")))

    def changed(self, **values: Any) -> Profile:
        """The same profile with other values: ``changed(**{"topology.rollout.tensor": 2})``.

        Validated like a file; the name of the source says what was changed.
        """
        data = self.as_dict()
        for key, value in values.items():
            *sections, name = key.split(".")
            section = data
            for part in sections:
                section = section[part]
            section[name] = value
        changes = ", ".join(f"{key} = {value!r}" for key, value in values.items())
        source = f"{self.source} with {changes}" if changes else self.source
        try:
            content = ProfileContent.model_validate(data)
        except ValidationError as e:
            raise ProfileError(
                f"profile {source} is refused",
                [_told(source, dict(self.lines), error) for error in e.errors()],
            ) from e
        return Profile(content=content, source=source, lines=self.lines)

    def engine_arguments(self, model: str) -> dict[str, Any]:
        """Arguments for ``vllm.LLM``; what it makes of them is checked afterwards."""
        c, e, t = self.content, self.content.engine, self.content.topology.rollout
        arguments: dict[str, Any] = {
            "model": model,
            "dtype": c.precision.weights,
            "kv_cache_dtype": c.precision.kv_cache,
            "tensor_parallel_size": t.tensor,
            "pipeline_parallel_size": t.pipeline,
            "data_parallel_size": t.data,
            "decode_context_parallel_size": t.context,
            "enable_expert_parallel": t.expert > 1,
            "all2all_backend": e.all2all_backend,
            "logprobs_mode": e.logprobs_mode,
            "generation_config": e.generation_config,
            "max_model_len": e.max_model_len,
            "max_num_seqs": e.max_num_seqs,
            "max_num_batched_tokens": e.max_num_batched_tokens,
            "block_size": e.block_size,
            "enable_prefix_caching": e.prefix_caching,
            "enable_chunked_prefill": e.chunked_prefill,
            "async_scheduling": e.async_scheduling,
            "disable_cascade_attn": not e.cascade_attention,
            "enforce_eager": e.enforce_eager,
            "weight_transfer_config": {"backend": BACKENDS[c.weights.path]},
        }
        if e.head_dtype != "model":
            arguments["hf_overrides"] = {"head_dtype": e.head_dtype}
        if e.custom_ops:
            arguments["compilation_config"] = {"custom_ops": list(e.custom_ops)}
        if c.model.revision != "local":
            arguments["revision"] = c.model.revision
        if e.attention_backend != "auto":
            arguments["attention_backend"] = e.attention_backend
        if e.moe_backend != "auto":
            arguments["moe_backend"] = e.moe_backend
        return arguments

    def engine_environment(self) -> dict[str, str]:
        """Variables for every process of both sides."""
        e = self.content.engine
        return {
            **self.content.environment,
            "VLLM_BATCH_INVARIANT": str(int(e.batch_invariant)),
            "VLLM_USE_V2_MODEL_RUNNER": str(int(e.model_runner == "v2")),
        }


def load_profile(path: str | Path) -> Profile:
    """Read and validate a profile.

    Raises:
        ProfileError: With everything that is wrong, by line.
        ConfigurationError: If the file cannot be read.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else f"no UTF-8 text: {e}"
        raise ConfigurationError(f"profile {path}: cannot be read ({why})") from e
    return parse_profile(text, source=str(path))


def parse_profile(text: str, *, source: str = "<profile>") -> Profile:
    """The same for a text."""
    lines = key_lines(text)
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as e:  # its own, a number of 5,000 digits, deep nesting
        raise ProfileError(
            f"profile {source} is refused",
            [
                Violation(
                    subject=source,
                    problem="no TOML",
                    expected="a TOML document",
                    found=str(e),
                    remedy="correct the syntax; nothing else was looked at",
                )
            ],
        ) from e
    try:
        content = ProfileContent.model_validate(data)
    except ValidationError as e:
        raise ProfileError(
            f"profile {source} is refused", [_told(source, lines, error) for error in e.errors()]
        ) from e
    return Profile(content=content, source=source, lines=lines)


def _told(source: str, lines: dict[tuple[str, ...], int], error: Any) -> Violation:
    path = tuple(str(p) for p in error["loc"])
    kind = error["type"]
    remedy = {
        "extra_forbidden": "remove it, or correct its spelling: unknown keys are errors",
        "missing": "state it; what decides bits has no default",
    }.get(kind, "correct the value")
    return Violation(
        subject=_where(source, lines, path),
        problem={"extra_forbidden": "unknown key", "missing": "missing"}.get(kind, "not usable"),
        expected=error["msg"],
        found="nothing" if kind == "missing" else repr(error["input"])[:200],
        remedy=remedy,
    )


def _where(source: str, lines: dict[tuple[str, ...], int], path: tuple[str, ...]) -> str:
    line = find_line(lines, path)
    return f"{source}:{line} {'.'.join(path)}" if line else f"{source} {'.'.join(path)}"
