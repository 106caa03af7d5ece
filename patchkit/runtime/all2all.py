"""The all-to-all backend: how tokens reach the experts of other ranks, and come back.

vLLM has many (``ParallelConfig.all2all_backend``), and most bring kernels of their own
that also add up what the experts made of a token. A backend is used under a claim when
a run with it was compared, or when somebody accepted it knowingly for one run; every
other one is refused by its name, whatever that is: a list of the refused would let the
next one pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchkit.errors import PatchkitError, Violation
from patchkit.runtime.canonical import digest_of
from patchkit.symbols import installed_version
from patchkit.symbols.source import normal_digest

if TYPE_CHECKING:
    from patchkit.runtime.profile import Profile, ProfileContent

__all__ = [
    "COMPARED",
    "DEFAULT",
    "KEY",
    "SETTING",
    "VARIABLE",
    "check_all2all",
    "entered",
    "named",
    "refuse_engine",
    "sources_digest",
]

DEFAULT = "allgather_reducescatter"
KEY = "engine.all2all_backend"
SETTING = "parallel_config.all2all_backend"
# vLLM 0.14 and earlier read it; a process that has it means another backend.
VARIABLE = "VLLM_ALL2ALL_BACKEND"

# What the compared runs were set to, with the run. They had data_parallel_size 1, where
# vLLM enters no backend: a run that enters it is still to be compared (see `entered`).
COMPARED: Mapping[str, str] = {DEFAULT: "exact-tp_independent-tp2-ep"}

# How a name begins, whose kernels those are, and the package they come in.
_KINDS = (
    ("deepep", "DeepEP", "deep_ep"),
    ("pplx", "pplx-kernels", "pplx_kernels"),
    ("mori", "MoRI", "mori"),
    ("moonep", "MoonEP", "moonep"),
    ("nixl", "NIXL EP", "nixl_ep"),
    ("flashinfer", "FlashInfer's all-to-all", "flashinfer"),
    ("naive", "the broadcast of early versions", ""),
    ("passthrough", "an expert kernel that exchanges tokens by itself", "flashinfer"),
)
_SOURCES = (
    "distributed/device_communicators/*all2all*.py",
    "model_executor/layers/fused_moe/all2all*.py",
    "model_executor/layers/fused_moe/prepare_finalize/*.py",
)
# As vLLM's ModelConfig.is_moe looks for them.
_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")


def entered(content: ProfileContent, model_config: Mapping[str, Any] | None) -> bool:
    """Whether vLLM exchanges tokens between ranks at all.

    With one data-parallel rank every rank of an expert-parallel group has all tokens:
    it computes its own experts, and an all-reduce adds up. vLLM builds a backend only
    from two on, with expert parallelism or without it, for models that have experts.
    """
    rollout = content.topology.rollout
    return rollout.data > 1 and (rollout.expert > 1 or _has_experts(model_config))


def named(content: ProfileContent, model_config: Mapping[str, Any] | None) -> bool:
    """Whether a contract has to name the backend."""
    return (
        content.topology.rollout.expert > 1
        or content.engine.all2all_backend != DEFAULT
        or entered(content, model_config)
    )


def sources_digest(backend: str) -> str | None:
    """What an acceptance holds for: vLLM's sources of the exchange, and the kernels' version.

    Nothing is imported. None where the sources are not in the places that are known.
    """
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(spec.submodule_search_locations[0])
    files = [sorted(root.glob(pattern)) for pattern in _SOURCES]
    if not all(files):
        return None
    return digest_of(
        {
            "backend": backend,
            "sources": {
                file.relative_to(root).as_posix(): normal_digest(file.read_text(encoding="utf-8"))
                for group in files
                for file in group
            },
            "kernels": _kernels(backend),
        }
    )


def check_all2all(
    profile: Profile,
    *,
    model_config: Mapping[str, Any] | None,
    environment: Mapping[str, str],
    digest: str | None,
    accepted: Mapping[str, str],
) -> Iterator[Violation]:
    """What stands against the profile's backend, before anything is started.

    Args:
        profile: The profile.
        model_config: Content of the model's ``config.json``.
        environment: Variables of this process; every process of the engine inherits them.
        digest: From :func:`sources_digest`, for the profile's backend.
        accepted: Backends accepted for this run, to that digest.
    """
    backend = profile.content.engine.all2all_backend
    for where, variables in (
        (profile.where(f"environment.{VARIABLE}"), profile.content.environment),
        (f"this process's environment, {VARIABLE}", environment),
    ):
        if (other := variables.get(VARIABLE, backend)) != backend:
            yield Violation(
                subject=where,
                problem=f"it asks for another all-to-all backend than the profile: "
                f"{_unproven(other) or 'versions up to 0.14 obey it, later ones do not'}",
                expected=f"not set, or {backend}",
                found=repr(other),
                remedy=f"take {VARIABLE} out of the environment; what is wanted stands in the "
                "profile's [engine] all2all_backend, and is reviewed there",
            )
    why = _unproven(backend, entered(profile.content, model_config))
    subject = profile.where(KEY)
    for name, given in sorted(accepted.items()):
        if name != backend or not why or given != digest:
            yield Violation(
                subject=subject,
                problem=f"all-to-all backend {name} is accepted unreviewed, which does not fit",
                expected=f"{backend}={digest}" if why else f"nothing: {backend} needs no exception",
                found=f"{name}={given}",
                remedy="leave it out, or name backend and digest as expected: a stale exception "
                "would hide the next change",
            )
    if why and backend not in accepted:
        yield Violation(
            subject=subject,
            problem=why,
            expected=_usable(profile.content),
            found=backend,
            remedy=f"{_instead(profile.content)}. To have it reviewed: compare rollout and replay "
            "of a run that enters it, token by token, and enter backend and artifact in "
            f"patchkit.runtime.all2all.COMPARED. {_acceptance(backend, digest)}",
        )


def refuse_engine(
    found: Any, profile: Profile, accepted: Mapping[str, str], *, who: str
) -> Violation | None:
    """What stands against the backend that a process of the engine really has.

    Args:
        found: Its resolved setting: vLLM replaces some names, and binds one by itself.
        profile: What was asked for.
        accepted: ``Contract.accepted_all2all``.
        who: The process, for the message.
    """
    wanted = profile.content.engine.all2all_backend
    why = _unproven(found)
    if found == wanted and (not why or found in accepted):
        return None
    if found == wanted:
        remedy = (
            "validate the profile first: preflight says how to accept this backend for one run, "
            "and Contract.accepted_all2all carries that to here"
        )
    elif why:
        remedy = (
            "build the engine with Profile.engine_arguments() and without "
            f"{VARIABLE}; to use this backend, name it in the profile's [engine] all2all_backend: "
            "preflight says how to review it, and how to accept it for one run"
        )
    else:
        remedy = (
            "name the backend that the engine resolved to, or a version of vLLM and a topology "
            "that keep the profile's"
        )
    return Violation(
        subject=f"{who}: {SETTING} ({profile.where(KEY)})",
        problem=why or "tokens reach the experts by another way than the profile says",
        expected=repr(wanted),
        found=repr(found),
        remedy=remedy,
    )


def _unproven(backend: Any, is_entered: bool = False) -> str:
    """Why a backend may not be used; empty where it may."""
    if backend not in COMPARED:
        kind = _kind(str(backend))
        whose = f" ({kind[1]})" if kind else ""
        return (
            f"all-to-all backend {backend or repr(backend)}{whose} is not covered: no run with it "
            "exists whose bits were compared, and nobody reviewed how it adds up what the experts "
            "made"
        )
    if is_entered:
        return (
            f"all-to-all backend {backend} would be entered: it was set in the runs whose bits "
            "were compared, but those had data_parallel_size 1, where vLLM enters none"
        )
    return ""


def _usable(content: ProfileContent) -> str:
    usable = " or ".join(COMPARED)
    return usable if content.topology.rollout.data == 1 else f"{usable}, with data = 1"


def _instead(content: ProfileContent) -> str:
    steps = []
    if content.engine.all2all_backend not in COMPARED:
        steps.append(f'all2all_backend = "{DEFAULT}" in [engine], or the key left out')
    if content.topology.rollout.data > 1:
        steps.append("data = 1 in [topology.rollout], and several engines instead")
    return f"use {' and '.join(steps)}"


def _acceptance(backend: str, digest: str | None) -> str:
    if digest is None:
        return (
            "It cannot be accepted for one run here: vLLM's sources of the exchange are not where "
            "they are known to be, so that nothing would say what was accepted"
        )
    return (
        f"For one run, unreviewed: --accept-all2all {backend}={digest} (preflight's "
        "accept_all2all), and every output says so"
    )


def _kind(backend: str) -> tuple[str, str, str] | None:
    plain = backend.lower().replace("_", "").replace("-", "")
    return next((kind for kind in _KINDS if plain.startswith(kind[0])), None)


def _kernels(backend: str) -> dict[str, str | None]:
    kind = _kind(backend)
    if kind is None or not kind[2]:
        return {}
    try:
        return {kind[2]: installed_version(kind[2])}
    except PatchkitError:
        return {kind[2]: None}


def _has_experts(model_config: Mapping[str, Any] | None) -> bool:
    if model_config is None:
        return True  # refused elsewhere; until then nothing is ruled out
    parts = [model_config, *(v for v in model_config.values() if isinstance(v, Mapping))]
    return any(part.get(name) for part in parts for name in _EXPERTS)
