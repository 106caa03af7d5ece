"""What the rollout plugin does in a vLLM process once it is enabled."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from patchkit.errors import Violation, ViolationsError
from patchkit.runtime.admission import POLICIES
from patchkit.runtime.attestation import attest
from patchkit.runtime.caches import key_caches, restore_caches
from patchkit.runtime.reach import start_canary

__all__ = ["FRONT_END", "WorkerRefusedError", "activate", "installation", "process_role"]

# Names a Ray actor that owns an engine instead of being one of its workers, by its process
# id: children inherit the variable, but not the id.
FRONT_END = "PATCHKIT_FRONT_END"

# The installation of this process; read by attestations.
installation: Any = None


class WorkerRefusedError(ViolationsError):
    """This process must not run a worker."""


def activate() -> Any:
    """Install the rollout side here, register the transfer backend, and attest.

    From then on this process, and those it starts, keep compiled code in folders of
    the patch set's own, inside those that ``VLLM_CACHE_ROOT`` and
    ``TORCHINDUCTOR_CACHE_DIR`` named before.

    vLLM loads its plugins in every process: in the user's own, in the engine core,
    in each worker, and in a short-lived one that only inspects a model class. In
    the last nothing is installed. Called again, it returns the same installation.

    Environment:
        PATCHKIT_ADAPTER: The adapter's name.
        PATCHKIT_PROFILE: Optional; the adapter's default profile if absent.
        PATCHKIT_CANARY: Optional; "1" counts calls until the driver asks for them.
        PATCHKIT_SAMPLING: Optional; which requests are admitted, "on_policy" if absent.
        PATCHKIT_RUN_DIR: Where this process attests.
        PATCHKIT_ACCEPT: Optional JSON object, symbol to digest, of drifted symbols
            accepted for this run.
        PATCHKIT_CONTRACT_DIGEST: Optional; attested, and compared by the driver.
        PATCHKIT_PACKAGES: Optional JSON object, package to version in the driver; attested.
        PATCHKIT_VARIABLES: Optional; names of further variables to attest.

    Raises:
        PatchkitError: With everything that is wrong; nothing is installed then.
    """
    global installation
    role, rank = process_role()
    if role == "inspector":
        return None
    if installation is not None:
        return installation
    adapter, accept = _settings()
    profile = os.environ.get("PATCHKIT_PROFILE") or None

    from patchkit.engine import install
    from patchkit.runtime.sync import register_backend

    made = install(adapter=adapter, side="rollout", accept=accept, profile=profile)
    caches: Mapping[str, str | None] = {}
    try:
        # Before anything is compiled: vLLM loads its plugins before it builds a model.
        caches = key_caches(made.manifest.digest)
        register_backend()
        if os.environ.get("PATCHKIT_CANARY") == "1":
            start_canary(made)
        installation = made
        attest(role=role, rank=rank, installation=made)
    except BaseException:
        # All or nothing: a process that cannot attest runs unpatched, and dies.
        installation = None
        restore_caches(caches)
        made.uninstall()
        raise
    return made


def process_role() -> tuple[str, int]:
    """Which of vLLM's processes this is, and its rank (-1 if not known yet)."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name == "vllm.model_executor.models.registry":
        return "inspector", 0
    from multiprocessing import current_process

    name = current_process().name
    if match := re.fullmatch(r"VllmWorker-(\d+)", name):
        return "worker", int(match[1])
    if match := re.fullmatch(r"EngineCore(?:_DP(\d+))?", name):
        return "engine-core", int(match[1] or 0)
    if os.environ.get(FRONT_END) == str(os.getpid()):
        return "driver", 0
    ray = sys.modules.get("ray")
    if ray is not None and _is_ray_actor(ray):
        return "worker", -1
    return "driver", 0


def _is_ray_actor(ray: Any) -> bool:
    return bool(ray.is_initialized() and ray.get_runtime_context().get_actor_id())


def _settings() -> tuple[str, Mapping[str, str]]:
    violations = [
        Violation(
            subject=name,
            problem="not set in this process",
            expected=what,
            found="nothing",
            remedy="set it where the driver sets PATCHKIT_ENABLE, before vLLM starts",
        )
        for name, what in (
            ("PATCHKIT_ADAPTER", "the name of an adapter"),
            ("PATCHKIT_RUN_DIR", "a folder for attestations, new for each start"),
        )
        if not os.environ.get(name)
    ]
    accept: Any = {}
    if text := os.environ.get("PATCHKIT_ACCEPT"):
        try:
            accept = json.loads(text)
        except ValueError as e:
            accept = e
        if not isinstance(accept, dict) or not all(isinstance(v, str) for v in accept.values()):
            violations.append(
                Violation(
                    subject="PATCHKIT_ACCEPT",
                    problem="not a JSON object of digests by symbol",
                    expected='{"package.module:name": "<digest>"}',
                    found=text[:200],
                    remedy="`patchkit check` prints the digests that can be accepted",
                )
            )
    violations += [
        Violation(
            subject=name,
            problem="no value that it can have",
            expected=f"one of {', '.join(known)}, or not set",
            found=text[:200],
            remedy="correct it where the driver sets PATCHKIT_ENABLE",
        )
        for name, known in (("PATCHKIT_SAMPLING", tuple(POLICIES)), ("PATCHKIT_CANARY", ("0", "1")))
        if (text := os.environ.get(name)) and text not in known
    ]
    if violations:
        raise WorkerRefusedError("patchkit cannot be enabled in this process", violations)
    return os.environ["PATCHKIT_ADAPTER"], accept
