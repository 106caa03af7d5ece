"""Adding up verified runs of one contract."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from patchkit.errors import ConfigurationError, Violation
from patchkit.files import writing
from patchkit.runtime.artifact.document import (
    MERGED,
    SCHEMA,
    ArtifactError,
    broken,
    load_artifact,
    refuse_to_overwrite,
    told,
    write_document,
)
from patchkit.runtime.artifact.figures import PHASES, sum_up, verdict_of
from patchkit.runtime.artifact.verification import verify_artifact
from patchkit.runtime.provenance import provenance


def merge_artifacts(paths: Sequence[str | Path], target: str | Path) -> Path:
    """Add up verified runs of one contract.

    The runs stay where they are; the merged artifact names them by file and digest,
    relative to its own folder, and its verification verifies them again.

    Raises:
        ArtifactError: If a run does not verify, or belongs to another contract.
        ConfigurationError: If ``target`` is one of the runs, or its arrays, or cannot be written.
    """
    target = Path(target)
    if len({Path(p).resolve() for p in paths}) < len(paths) or not paths:
        raise ConfigurationError("artifact merge: give each run once, and at least one")
    documents = []
    for p in map(Path, paths):
        if load_artifact(p)["kind"] == MERGED:
            raise ConfigurationError(f"artifact merge: {p} is merged already; give its runs")
        verify_artifact(p)
        documents.append(load_artifact(p))
    refuse_to_overwrite(target, paths)
    contracts = {d["contract"]["digest"] for d in documents}
    violations = [
        Violation(
            subject=str(p),
            problem="a run of another contract",
            expected=documents[0]["contract"]["digest"],
            found=d["contract"]["digest"],
            remedy="merge only runs of one contract; their figures are not of one claim",
        )
        for p, d in zip(paths, documents, strict=True)
        if d["contract"]["digest"] != documents[0]["contract"]["digest"]
    ]
    if len({d["digest"] for d in documents}) < len(documents):
        violations.append(
            broken("runs", "one run was given twice, as a copy", "different runs", "equal digests")
        )
    if violations:
        raise ArtifactError(f"{len(contracts)} contracts cannot be merged", violations)
    totals, unreviewed = sum_up(documents)
    merged = {
        "kind": MERGED,
        "schema": SCHEMA,
        "verdict": verdict_of(totals, documents),
        "unreviewed": unreviewed,
        "contract": documents[0]["contract"],
        "phases": {p: {"totals": totals[p]} for p in PHASES},
        "runs": [
            {"file": str(_relative(Path(p), target.parent)), **told(d)}
            for p, d in zip(paths, documents, strict=True)
        ],
        "provenance": provenance(),
    }
    with writing(target):
        write_document(target, merged)
    return target


def _relative(path: Path, folder: Path) -> Path:
    try:
        return path.resolve().relative_to(folder.resolve())
    except ValueError:
        return path.resolve()
