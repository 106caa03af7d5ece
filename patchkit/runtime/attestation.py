"""Each process says what is installed in it; the driver believes nothing else.

A process that installs writes ``<role>-<rank>-<pid>.json`` into the run's folder:
the digest of the contract it was given, the digest of its runtime manifest, and
the environment as it sees it. The driver knows which processes must exist. One
that is missing (its plugin was left out, a variable was not forwarded, an
exception was swallowed), one that differs, and one that nobody expected are each
a violation that names it. Nothing here imports torch or vLLM.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from patchkit.errors import Violation, ViolationsError
from patchkit.files import write_atomically
from patchkit.runtime.caches import CACHE_VARIABLES, unkeyed
from patchkit.symbols import installed_version

__all__ = [
    "Attestation",
    "AttestationError",
    "Process",
    "attest",
    "collect_attestations",
    "compare_attestations",
    "read_attestations",
    "rollout_processes",
    "trainer_processes",
    "write_attestation",
]

SCHEMA = 1

# Variables of these families change numerics, threads or what is installed.
_FAMILIES = (
    "PATCHKIT_",
    "VLLM_",
    "TORCH",
    "PYTORCH_",
    "OMP_",
    "MKL_",
    "KMP_",
    "OPENBLAS_",
    "CUBLAS",
    "CUDA_",
    "CUDNN_",
    "NCCL_",
    "NVIDIA_TF32",
    "TRITON_",
    "FLASHINFER_",
    "TRANSFORMERS_",
)


class AttestationError(ViolationsError):
    """The processes of a run are not what the contract says."""


@dataclass(frozen=True, slots=True, order=True)
class Process:
    """A process that must exist."""

    role: str
    rank: int

    def __str__(self) -> str:
        return f"{self.role} {self.rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attestation:
    """What one process said about itself.

    Attributes:
        role: ``driver``, ``engine-core``, ``worker`` or ``trainer``.
        rank: Its rank in that role; -1 where it did not know yet.
        pid: Process id.
        host: Host name.
        adapter: Adapter installed.
        contract_digest: Digest of the contract it was given; empty without one.
        manifest_digest: Digest of its runtime manifest.
        state: State of its installation.
        unreviewed: Symbols accepted without review.
        environment: Variables that matter, as the process sees them.
        manifest: The runtime manifest itself.
        packages: Versions of the contract's packages, as installed where the process runs.
    """

    role: str
    rank: int
    pid: int
    host: str
    adapter: str
    contract_digest: str
    manifest_digest: str
    state: str
    unreviewed: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    python: str = ""
    written: float = 0.0
    schema: int = SCHEMA

    @property
    def process(self) -> Process:
        return Process(self.role, self.rank)

    @property
    def who(self) -> str:
        rank = "of unknown rank" if self.rank < 0 else self.rank
        return f"{self.role} {rank} (pid {self.pid} on {self.host})"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def other_packages(self, wanted: Mapping[str, str | None]) -> dict[str, str]:
        """Those that are installed here in another version; a trainer calls no engine."""
        seen = {k: v for k, v in self.packages.items() if (self.role, k) != ("trainer", "vllm")}
        return {k: v for k, v in seen.items() if wanted.get(k, v) != v}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Attestation:
        known = {n: data[n] for n in cls.__dataclass_fields__ if n in data}
        return cls(**{**known, "unreviewed": tuple(known.get("unreviewed", ()))})


def attest(*, role: str, rank: int, installation: Any = None) -> dict[str, Any]:
    """Verify this process's installation and describe it; written to the run folder.

    Args:
        role: As in :class:`Attestation`.
        rank: Rank in that role, -1 if unknown.
        installation: The handle; the one that the rollout plugin made if None.

    Returns:
        The attestation as plain data. A process in which nothing is installed
        says so (``state`` is ``absent``) instead of raising: it is the driver
        that has to hear it.
    """
    if installation is None:
        # Only the plugin's module knows; a process without it has installed nothing.
        worker = sys.modules.get("patchkit.runtime.worker")
        installation = getattr(worker, "installation", None) if worker else None
    made = _describe(role, rank, installation)
    if run_dir := os.environ.get("PATCHKIT_RUN_DIR"):
        write_attestation(run_dir, made)
    return made.as_dict()


def _describe(role: str, rank: int, installation: Any) -> Attestation:
    manifest: dict[str, Any] = {}
    digest, state, adapter = "", "absent", ""
    unreviewed: tuple[str, ...] = ()
    if installation is not None:
        installation.verify()
        manifest = dict(installation.manifest.as_dict())
        digest, state = installation.manifest.digest, str(installation.state)
        adapter = str(manifest.get("adapter", ""))
        unreviewed = tuple(map(str, manifest.get("unreviewed", ())))
    return Attestation(
        role=role,
        rank=rank,
        pid=os.getpid(),
        host=socket.gethostname(),
        adapter=adapter or os.environ.get("PATCHKIT_ADAPTER", ""),
        contract_digest=os.environ.get("PATCHKIT_CONTRACT_DIGEST", ""),
        manifest_digest=digest,
        state=state,
        unreviewed=unreviewed,
        environment=_environment(),
        manifest=manifest,
        packages={p: installed_version(p) for p in _packages(os.environ) if find_spec(p)},
        python=platform.python_version(),
        written=time.time(),
    )


def _environment() -> dict[str, str]:
    """Variables of the families, and those that the contract's profile names."""
    named = os.environ.get("PATCHKIT_VARIABLES", "").split()
    seen = sorted(os.environ.items())
    return {k: v for k, v in seen if k.startswith(_FAMILIES) or k in named}


def _packages(environment: Mapping[str, str]) -> dict[str, str]:
    """The contract's packages, as the driver has them."""
    versions: dict[str, str] = json.loads(environment.get("PATCHKIT_PACKAGES") or "{}")
    return versions


def write_attestation(run_dir: str | Path, attestation: Attestation) -> Path:
    """Write atomically; an earlier file of this process under another rank goes."""
    folder = Path(run_dir)
    rank = "x" if attestation.rank < 0 else attestation.rank
    path = folder / f"{attestation.role}-{rank}-{attestation.pid}.json"
    write_atomically(path, json.dumps(attestation.as_dict(), indent=1, sort_keys=True).encode())
    unknown = folder / f"{attestation.role}-x-{attestation.pid}.json"
    if unknown != path:
        unknown.unlink(missing_ok=True)
    return path


def read_attestations(run_dir: str | Path) -> list[Attestation]:
    """Every attestation in the folder, in the order of role and rank."""
    found = []
    for path in sorted(Path(run_dir).glob("[!.]*-*-*.json")):
        try:
            data = json.loads(path.read_text())
            if data["schema"] != SCHEMA:
                raise ValueError(f"schema {data['schema']} is not {SCHEMA}")
            found.append(Attestation.from_dict(data))
        except (ValueError, KeyError, TypeError) as e:
            raise AttestationError(
                "an attestation cannot be read",
                [
                    Violation(
                        subject=str(path),
                        problem="no attestation",
                        expected=f"schema {SCHEMA}, written by patchkit in one piece",
                        found=f"{type(e).__name__}: {e}",
                        remedy="use an empty folder for each start of an engine",
                    )
                ],
            ) from e
    return sorted(found, key=lambda a: (a.role, a.rank, a.pid))


def rollout_processes(
    *, tensor_parallel: int = 1, pipeline_parallel: int = 1, data_parallel: int = 1
) -> list[Process]:
    """The vLLM workers that must exist, in process or not."""
    return [
        Process("worker", r) for r in range(tensor_parallel * pipeline_parallel * data_parallel)
    ]


def trainer_processes(ranks: int) -> list[Process]:
    """The trainer's ranks; each calls :func:`attest` with its own installation."""
    return [Process("trainer", r) for r in range(ranks)]


def collect_attestations(
    run_dir: str | Path,
    expected: Iterable[Process],
    *,
    contract_digest: str | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 0.0,
    roles: Sequence[str] | None = None,
) -> list[Attestation]:
    """Read the run's folder and refuse it unless every process is as it must be.

    Args:
        run_dir: One folder per start of an engine: files of earlier starts would
            count as processes nobody expected.
        expected: The processes that must exist.
        contract_digest: What each must have been given; not compared if None.
        environment: Variables that each must see with these values.
        timeout_s: How long to wait for missing ones.
        roles: Roles to look at; those of ``expected`` if None.

    Returns:
        The attestations, one per expected process.

    Raises:
        AttestationError: Naming every process that is missing, different or extra.
    """
    expected = list(expected)
    wanted = set(roles) if roles is not None else {p.role for p in expected}
    deadline = time.monotonic() + timeout_s
    while True:
        found = [a for a in read_attestations(run_dir) if a.role in wanted]
        if {a.process for a in found} >= set(expected) or time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    violations = compare_attestations(
        found, expected, contract_digest=contract_digest, environment=environment
    )
    if violations:
        raise AttestationError(f"the processes attested in {run_dir} are refused", violations)
    return found


def compare_attestations(
    found: Sequence[Attestation],
    expected: Iterable[Process],
    *,
    contract_digest: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Violation]:
    """Everything that is wrong with a set of attestations."""
    expected = list(expected)
    known = set(expected)
    violations = []
    present = Counter(a.process for a in found)
    for process in expected:
        if not present[process]:
            others = ", ".join(sorted(map(str, present))) or "none at all"
            violations.append(_unpatched(str(process), "an attestation", others))
    for a in found:
        if a.process not in known:
            violations.append(_differs(a, "nobody expected it", "not to exist", "an attestation"))
        elif present[a.process] > 1:
            violations.append(
                _differs(a, "attested more than once", "one process", present[a.process])
            )
        if a.state == "absent":
            violations.append(_unpatched(a.who, "an active installation", "absent"))
        elif a.state not in ("active", "pending"):
            # Pending is right for a process that has no use for some module: what was
            # never imported runs nothing, and is patched the moment it is imported.
            # Whether everything was reached somewhere is the canary's question.
            violations.append(_differs(a, "its installation is not active", "active", a.state))
        if contract_digest is not None and a.contract_digest != contract_digest:
            violations.append(
                _differs(
                    a, "runs under another contract", contract_digest, a.contract_digest or "none"
                )
            )
        violations += _installed_for_another(a)
        wanted = _packages(a.environment)
        violations += [
            _differs(a, f"has another {name} installed than the driver", wanted[name], version)
            for name, version in a.other_packages(wanted).items()
        ]
        given = environment or {}
        own_caches = _installed_by_plugin(a)
        if own_caches:
            user = {n: given[n] for n in CACHE_VARIABLES if n in given}
            violations += unkeyed(a.who, a.manifest_digest, a.environment, user)
        for name, value in given.items():
            if own_caches and name in CACHE_VARIABLES:
                continue  # the patch set's own folder inside the given one: looked at above
            if a.environment.get(name) != value:
                violations.append(
                    _differs(
                        a,
                        f"sees another value of {name}",
                        value,
                        a.environment.get(name, "not set"),
                    )
                )
    violations += _minority(found, "manifest", lambda a: a.manifest_digest)
    if contract_digest is None:
        violations += _minority(found, "contract", lambda a: a.contract_digest)
    return violations


def _installed_for_another(a: Attestation) -> Iterable[Violation]:
    """A process installs once; what it attests as its contract may be that of a later run."""
    for what, name in (("adapter", "PATCHKIT_ADAPTER"), ("profile", "PATCHKIT_PROFILE")):
        asked, installed = a.environment.get(name), a.manifest.get(what)
        if asked and a.manifest and asked != installed:
            yield _differs(a, f"has another {what} installed than {name} says", asked, installed)


def _installed_by_plugin(a: Attestation) -> bool:
    enabled = a.environment.get("PATCHKIT_ENABLE") == "1"
    return enabled and a.role != "trainer" and a.state in ("active", "pending")


def _unpatched(who: str, expected: str, found: str) -> Violation:
    return Violation(
        subject=who,
        problem="did not attest: it runs without patchkit, or is not there",
        expected=expected,
        found=found,
        remedy="is patchkit-vllm-plugin installed there, is it left out by VLLM_PLUGINS, and are "
        "PATCHKIT_ENABLE, PATCHKIT_ADAPTER and PATCHKIT_RUN_DIR forwarded to it (Ray forwards "
        "VLLM_* only)?",
    )


def _minority(
    found: Sequence[Attestation], what: str, value: Callable[[Attestation], str]
) -> Iterable[Violation]:
    """Within a role all must be equal; those that differ from most are named."""
    for role in sorted({a.role for a in found}):
        same = [a for a in found if a.role == role]
        counts = Counter(value(a) for a in same)
        usual = counts.most_common(1)[0][0]
        for a in same:
            if value(a) != usual:
                yield _differs(
                    a,
                    f"its {what} differs from the other {role} processes",
                    usual or "none",
                    value(a) or "none",
                )


def _differs(a: Attestation, problem: str, expected: object, found: object) -> Violation:
    return Violation(
        subject=a.who,
        problem=problem,
        expected=str(expected),
        found=str(found),
        remedy="start all processes of the run anew, from one environment and one folder",
    )
