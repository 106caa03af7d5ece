"""What an artifact's attestations say, held against themselves and the rest of it.

A process wrote what was installed in it and the digest of that. Both are in the
artifact, so the digest is made again here; and what is told more than once (adapter,
profile, versions, process id, what was not reviewed) must be told the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from patchkit.engine import manifest_digest
from patchkit.errors import Violation
from patchkit.runtime.artifact.document import broken
from patchkit.runtime.attestation import (
    Attestation,
    Process,
    rollout_processes,
    trainer_processes,
)

__all__ = ["check_attested"]

# A manifest without one of these says nothing about what ran.
_PARTS = (
    "adapter", "side", "profile", "versions", "unreviewed", "patches", "sources", "skipped",
    "digest", "state", "pid", "python", "reviewed", "slots", "hits",
)  # fmt: skip


_TRAINER_RANKS = ("tensor", "pipeline", "context", "data")


def check_attested(
    attestations: Sequence[Mapping[str, Any]],
    contract: Mapping[str, Any],
    unreviewed: Sequence[str],
) -> Iterator[Violation]:
    """Everything that cannot be true.

    Args:
        attestations: As they stand in the artifact.
        contract: ``{"digest", "content"}``.
        unreviewed: The artifact's own list.
    """
    yield from _missing(attestations, contract["content"])
    seen: dict[tuple[str, str, str], tuple[str, str]] = {}
    for data in attestations:
        a = Attestation.from_dict(data)
        if a.contract_digest not in ("", contract["digest"]):
            yield broken(a.who, "attested another contract", contract["digest"], a.contract_digest)
        if hidden := set(a.unreviewed) - set(unreviewed):
            yield broken(
                a.who,
                "unreviewed symbols that the artifact does not mention",
                "all in its list",
                ", ".join(sorted(hidden)),
            )
        if a.state not in ("active", "pending"):
            yield broken(a.who, "nothing is active in it", "active or pending", a.state)
        for name, version in a.other_packages(contract["content"].get("packages", {})).items():
            yield broken(
                a.who, f"ran another {name}", contract["content"]["packages"][name], version
            )
        yield from _manifest(a, contract["content"])
        # Trainers of one run may be of several adapters (the doctor's); within one, equal.
        place = (a.role, str(a.manifest.get("adapter")), str(a.manifest.get("side")))
        who, digest = seen.setdefault(place, (a.who, a.manifest_digest))
        if digest != a.manifest_digest:
            yield broken(
                a.who, f"its manifest is not that of {who}", digest, a.manifest_digest or "none"
            )


def _missing(
    attestations: Sequence[Mapping[str, Any]], contract: Mapping[str, Any]
) -> Iterator[Violation]:
    """Processes of the contract's topology of which nothing is told, where anything is."""
    profile = contract.get("profile")
    topology = profile.get("topology") if isinstance(profile, Mapping) else None
    present = {Process(data["role"], data["rank"]) for data in attestations}
    if not present or topology is None:
        return
    rollout, trainer = topology["rollout"], topology["trainer"]
    expected = rollout_processes(
        tensor_parallel=rollout["tensor"],
        pipeline_parallel=rollout["pipeline"],
        data_parallel=rollout["data"],
    )
    if any(process.role == "trainer" for process in present):
        expected += trainer_processes(math.prod(trainer[d] for d in _TRAINER_RANKS))
    for process in expected:
        if process not in present:
            yield broken(
                str(process),
                "did not attest",
                "every process of the contract's topology",
                ", ".join(map(str, sorted(present))),
            )


def _manifest(a: Attestation, contract: Mapping[str, Any]) -> Iterator[Violation]:
    m = a.manifest
    if missing := [part for part in _PARTS if part not in m]:
        yield broken(f"{a.who}: manifest", "parts are missing", "all parts", ", ".join(missing))
        return
    found = manifest_digest(m)
    for subject, stated in (("manifest", m["digest"]), ("manifest_digest", a.manifest_digest)):
        if stated != found:
            yield broken(
                f"{a.who}: {subject}",
                "not the digest of the manifest's content",
                found,
                str(stated),
            )
    identities = [f"{p['symbol']}[{p['key']}]" if p["key"] else p["symbol"] for p in m["patches"]]
    profile = contract.get("profile")
    head = profile.get("profile", {}) if isinstance(profile, Mapping) else {}
    packages = contract.get("packages", {})
    for subject, stated, expected in (
        ("manifest.adapter", m["adapter"], a.adapter),
        ("manifest.state", m["state"], a.state),
        ("manifest.pid", m["pid"], a.pid),
        ("manifest.python", m["python"], a.python or m["python"]),
        ("manifest.unreviewed", sorted(m["unreviewed"]), sorted(a.unreviewed)),
        ("manifest.reviewed", m["reviewed"], not m["unreviewed"]),
        ("manifest.slots", sorted(m["slots"]), sorted(identities)),
        ("manifest.hits", sorted(m["hits"]), sorted(identities)),
        ("manifest.side", m["side"], "trainer" if a.role == "trainer" else "rollout"),
        ("manifest.adapter", m["adapter"], head.get("adapter", m["adapter"])),
        ("manifest.profile", m["profile"], head.get("name", m["profile"])),
        *(
            (f"manifest.versions.{name}", version, packages[name])
            for name, version in m["versions"].items()
            if packages.get(name)
        ),
    ):
        if stated != expected:
            yield broken(
                f"{a.who}: {subject}",
                "not what the rest of the artifact says",
                repr(expected),
                repr(stated),
            )
