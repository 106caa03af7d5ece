"""Compile caches of a worker: under the patch set's own folder, and known to be read there.

What vLLM keys its compiled graphs by does not contain what is patched: an engine
that starts warm under another patch set would run the graph of the old one. So
the folders that it keeps them in are the patch set's own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from patchkit.engine import cache_environment
from patchkit.errors import Violation, ViolationsError

__all__ = [
    "CACHE_VARIABLES",
    "SharedCacheError",
    "artefact_folder",
    "key_caches",
    "restore_caches",
    "unkeyed",
    "was_loaded",
    "was_saved",
]

CACHE_VARIABLES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")


class SharedCacheError(ViolationsError):
    """This process would share compiled code with other patch sets."""


def key_caches(digest: str) -> dict[str, str | None]:
    """Give this process compile caches of its patch set's own, inside those it has.

    Returns:
        What the variables were before, for :func:`restore_caches`.

    Raises:
        SharedCacheError: vLLM has read the old folder already and goes on using it.
    """
    before = {name: os.environ.get(name) for name in CACHE_VARIABLES}
    wanted = cache_environment(digest)
    os.environ.update(wanted)
    envs = sys.modules.get("vllm.envs")
    read = str(envs.VLLM_CACHE_ROOT) if envs is not None else None
    if read is not None and read != os.path.expanduser(wanted["VLLM_CACHE_ROOT"]):
        restore_caches(before)
        raise SharedCacheError(
            "compiled code of other patch sets could be run here",
            [
                Violation(
                    subject="VLLM_CACHE_ROOT",
                    problem="vLLM has read it for good before patchkit was enabled",
                    expected=wanted["VLLM_CACHE_ROOT"],
                    found=read,
                    remedy="set PATCHKIT_ENABLE before this process builds its first engine",
                )
            ],
        )
    return before


def restore_caches(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def unkeyed(
    who: str, digest: str, environment: Mapping[str, str], user: Mapping[str, str]
) -> Iterator[Violation]:
    """Cache folders that a process attested, and that are not its patch set's own.

    Args:
        who: The process.
        digest: Of its runtime manifest.
        environment: What it attested.
        user: Folders that the run was given; those of the process must lie inside.
    """
    for name in CACHE_VARIABLES:
        seen = environment.get(name)
        own = cache_environment(
            digest, {**environment, **({name: user[name]} if name in user else {})}
        )
        # While it compiles, vLLM moves inductor's folder into its own.
        allowed = {own[name], own["VLLM_CACHE_ROOT"]}
        if seen is None or not any(Path(seen).is_relative_to(folder) for folder in allowed):
            yield Violation(
                subject=who,
                problem=f"{name} is not its patch set's own folder: it could run code "
                "that was compiled under other patches",
                expected=own[name],
                found="not set" if seen is None else seen,
                remedy="leave it alone after vLLM has loaded its plugins; set what it should "
                "be before the process starts",
            )


def artefact_folder() -> Path | None:
    """The folder of the compiled model that this process made or loaded, if it did.

    vLLM puts inductor's folder into that of the artefact, which it keys by model,
    configuration and version; together with the patch set's root that says all.
    """
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    root = os.environ.get("VLLM_CACHE_ROOT")
    if not inductor or not root:
        return None
    folder = Path(inductor)
    inside = folder != Path(root) and folder.is_relative_to(root)
    return folder.parent if inside and folder.name == "inductor_cache" else None


def was_saved() -> bool:
    """Whether vLLM compiled a model in this process, and kept it."""
    return _counted("num_aot_artifacts_saved")


def was_loaded() -> bool:
    """Whether vLLM took a compiled model from disk in this process."""
    return _counted("num_aot_artifacts_loaded")


def _counted(name: str) -> bool:
    module = sys.modules.get("vllm.compilation.counter")
    return module is not None and getattr(module.compilation_counter, name, 0) > 0
