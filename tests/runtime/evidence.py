"""A small honest run, to be tampered with."""

from __future__ import annotations

from pathlib import Path

from patchkit.engine import RuntimeManifest, manifest_digest
from patchkit.runtime.artifact import Artifact
from patchkit.runtime.attestation import Attestation
from patchkit.runtime.sync import SyncRecord
from patchkit.runtime.weights import ParameterReceipt, Piece, Receipt

CONTRACT = {
    "profile": {"profile": {"adapter": "toy", "name": "toy_cpu"}},
    "packages": {"up": "1.0", "other": None},
}


def receipt(holder: str, version: int, *pieces: Piece) -> Receipt:
    p = ParameterReceipt(name="w", dtype="bfloat16", shape=(4,), pieces=pieces)
    return Receipt(holder=holder, version=version, parameters={"w": p})


def refit(version: int, *, mode="enforce", bad: bool = False) -> SyncRecord:
    trainer = receipt("trainer", version, Piece((0,), (4,), 100 + version))
    workers = (
        receipt("worker 0", version, Piece((0,), (2,), 60)),
        receipt("worker 1", version, Piece((2,), (2,), 40 + version + bad)),
    )
    return SyncRecord(
        version=version,
        previous=version - 1 if version else None,
        mode=mode,
        caches="reset",
        trainer=trainer,
        workers=workers,
    )


def values(n: int, version: int) -> list[float]:
    return [-((i % 7) + 1) / (8 + version) for i in range(n)]


SYMBOL = "up.m:f"


def manifest(**changes) -> dict:
    """A runtime manifest as a process writes it, with the digest it should have."""
    patch = {
        "symbol": SYMBOL,
        "key": None,
        "action": "replace",
        "replacement": "toy.rollout:f",
        "required": True,
        "before": {"file": "up/m.py", "code": "b0"},
        "source_digest": "s0",
        "after": {"file": "toy/rollout.py", "code": "a0"},
    }
    made = RuntimeManifest(
        compared={
            "adapter": "toy",
            "side": "rollout",
            "profile": "toy_cpu",
            "versions": {"up": "1.0"},
            "unreviewed": {},
            "patches": [patch],
            "sources": {"toy.rollout": "f0"},
            "skipped": [],
        },
        told={
            "state": "active",
            "pid": 1,
            "python": "3.11.7",
            "time": 1.0,
            "reviewed": True,
            "slots": {SYMBOL: {"written": [SYMBOL]}},
            "hits": {SYMBOL: 3},
        },
    ).as_dict()
    made.update(changes)
    made["digest"] = manifest_digest(made)
    return made


def attestation(**changes) -> Attestation:
    """What one process said; ``unreviewed`` and the like are told by its manifest, too."""
    unreviewed = changes.get("unreviewed", ())
    own = manifest(
        unreviewed=dict.fromkeys(unreviewed, "d"),
        reviewed=not unreviewed,
        pid=changes.get("pid", 1),
        state=changes.get("state", "active"),
    )
    base = {
        "role": "worker",
        "rank": 0,
        "pid": 1,
        "host": "here",
        "adapter": "toy",
        "contract_digest": "",
        "manifest_digest": own["digest"],
        "manifest": own,
        "state": "active",
        "python": "3.11.7",
    }
    return Attestation(**{**base, **changes})


def build(
    *,
    tokens: int = 40,
    versions: int = 3,
    bad: bool = False,
    contract=CONTRACT,
    unreviewed=(),
    mode="enforce",
    attested: bool = True,
) -> Artifact:
    artifact = Artifact(contract, unreviewed=unreviewed)
    for version in range(versions):
        artifact.add_refit(refit(version, mode=mode))
        rollout = values(tokens, version)
        replay = list(rollout)
        if bad and version == 1:
            replay[5] += 0.25
        artifact.add_round(
            "post_update_reload" if version else "initial_checkpoint",
            version=version,
            sequences=[i // 10 for i in range(tokens)],
            positions=[7 + i % 10 for i in range(tokens)],
            token_ids=list(range(tokens)),
            rollout=rollout,
            recompute=rollout,
            first_forward=replay,
            stock=[v + 0.01 for v in rollout],
            start_versions=[version] * (tokens // 10),
            end_versions=[version] * (tokens // 10),
            notes={"seconds": 1.5},
        )
    if attested:
        artifact.add_attestations([attestation()])
    return artifact


def write(folder: Path, name: str = "run.json", **kwargs) -> Path:
    return build(**kwargs).write(folder / name)
