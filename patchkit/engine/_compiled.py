"""Compiled artefacts know the patch set: cache folders by digest, and evidence beside them.

A warm start traces nothing and a captured graph replays without Python: then
no hit can be seen. What was seen when the artefact was made is stored under
the patch set's digest, in the same folder as the artefact.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from patchkit.engine._declare import Adapter
from patchkit.engine._plan import inspect_plan
from patchkit.engine._report import runtime_manifest

# The name of a folder that this module made; a user's own "patchkit-data" is not one.
_OURS = re.compile(r"patchkit-[0-9a-f]{16}")

# Variables that say where compiled code is kept, and where that is without them. The
# ahead-of-time key of vLLM has no room for a patch set; the root of its caches has.
_FOLDERS = {
    "VLLM_CACHE_ROOT": lambda env: (
        Path(env.get("XDG_CACHE_HOME") or Path(env.get("HOME", "~")).expanduser() / ".cache")
        / "vllm"
    ),
    "TORCHINDUCTOR_CACHE_DIR": lambda env: Path(tempfile.gettempdir()) / f"torchinductor_{_user()}",
}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container whose user has no name
        return f"uid-{os.getuid()}"


def patch_set_digest(
    adapter: str | Adapter,
    side: str,
    *,
    accept: Mapping[str, str] | None = None,
    profile: str | None = None,
) -> str:
    """The digest that the runtime manifest of what is so installed will have.

    Needs no import of what is patched: it can be asked before any worker starts.
    The arguments are those of :func:`patchkit.install`.
    """
    plan = inspect_plan(adapter, side, accept=accept, profile=profile)
    return runtime_manifest(plan, list(plan.patches), "planned", {}).digest


def cache_environment(digest: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that give a patch set compile caches of its own.

    Idempotent: a folder made by an earlier call, or one inside it (vLLM moves
    inductor's there while it compiles), is replaced, not nested.

    Args:
        digest: From :func:`patch_set_digest` or a runtime manifest.
        environ: The environment the processes would start with; this one's by default.
    """
    env = os.environ if environ is None else environ
    result = {}
    for variable, default in _FOLDERS.items():
        folder = Path(env[variable]) if env.get(variable) else default(env)
        for inner in (folder, *folder.parents):
            if _OURS.fullmatch(inner.name):
                folder = inner.parent
        result[variable] = str(folder / f"patchkit-{digest[:16]}")
    return result


def store_evidence(folder: Path, digest: str, hits: Mapping[str, int]) -> Path:
    """Write down which patches were reached when the artefacts in this folder were made.

    Hits add up over runs: different runs compile different parts.
    """
    known = load_evidence(folder, digest)
    merged = {k: max(v, known.get(k, 0)) for k, v in {**known, **hits}.items()}
    folder.mkdir(parents=True, exist_ok=True)
    path = _file(folder, digest)
    text = json.dumps({"schema": 1, "patch_set": digest, "hits": merged}, sort_keys=True, indent=1)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=path.name)
    with os.fdopen(handle, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return path


def load_evidence(folder: Path, digest: str) -> dict[str, int]:
    """Stored hits for this very patch set; empty where there are none, or of another set."""
    try:
        content = json.loads(_file(folder, digest).read_text())
        if content["schema"] == 1 and content["patch_set"] == digest:
            return {str(k): int(v) for k, v in content["hits"].items()}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}  # a damaged file is no evidence: the canary then fails, which is right
    return {}


def _file(folder: Path, digest: str) -> Path:
    return folder / f"patchkit-evidence-{digest[:16]}.json"
