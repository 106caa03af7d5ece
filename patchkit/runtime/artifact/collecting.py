"""Collecting the evidence of one run."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from patchkit.errors import ConfigurationError
from patchkit.runtime.artifact.document import KIND, SCHEMA, accepted, write_document
from patchkit.runtime.artifact.figures import (
    BASELINE,
    BASELINE_ROLLOUT,
    PHASES,
    compared,
    totals_of,
    verdict_of,
)
from patchkit.runtime.attestation import Attestation
from patchkit.runtime.canonical import canonical_json, digest_of
from patchkit.runtime.provenance import provenance
from patchkit.runtime.sidecar import floats, integers, write_sidecar
from patchkit.runtime.sync import SyncRecord


class Artifact:
    """Collects the evidence of one run and writes it.

    Args:
        contract: The validated contract as plain data.
        unreviewed: Symbols that were accepted for this run without review.
    """

    def __init__(self, contract: Mapping[str, Any], *, unreviewed: Iterable[str] = ()) -> None:
        self._contract = json.loads(canonical_json(dict(contract)))
        self._unreviewed = {*unreviewed, *accepted(self._contract)}
        self._rounds: dict[str, list[dict[str, Any]]] = {p: [] for p in PHASES}
        self._arrays: dict[str, array[Any]] = {}
        self._refits: list[dict[str, Any]] = []
        self._attestations: list[dict[str, Any]] = []
        self._notes: dict[str, Any] = {}
        self._sidecar: Path | None = None

    def add_round(
        self,
        phase: str,
        *,
        version: int,
        sequences: Any,
        positions: Any,
        token_ids: Any,
        rollout: Any,
        recompute: Any,
        first_forward: Any,
        stock: Any = None,
        stock_rollout: Any = None,
        start_versions: Sequence[int] = (),
        end_versions: Sequence[int] = (),
        notes: Mapping[str, Any] | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Add the tokens of one policy version, all ranks together.

        Args:
            phase: One of :data:`PHASES`.
            version: The trainer's policy version.
            sequences: int64, per token.
            positions: int64, absolute, per token.
            token_ids: int64, per token.
            rollout: float32, per token.
            recompute: float32, per token.
            first_forward: float32, per token.
            stock: float32, per token; the unpatched replay, if it was made.
            stock_rollout: float32, per token; an unpatched engine's scores of the same
                tokens, to compare the unpatched replay with.
            start_versions: Per sequence, the engine's version at its start.
            end_versions: Per sequence, at its end.
            notes: Figures for the reader (times, cache hits, preemptions).

        Returns:
            The metrics of each comparison.
        """
        if phase not in PHASES:
            raise ConfigurationError(f"artifact: phase {phase!r} is none of {', '.join(PHASES)}")
        index = len(self._rounds[phase])
        own: dict[str, array[Any]] = {
            "sequences": integers(sequences),
            "positions": integers(positions),
            "token_ids": integers(token_ids),
            "rollout": floats(rollout, "rollout"),
            "recompute": floats(recompute, "recompute"),
            "first_forward": floats(first_forward, "first_forward"),
        }
        for name, values in ((BASELINE, stock), (BASELINE_ROLLOUT, stock_rollout)):
            if values is not None:
                own[name] = floats(values, name)
        lengths = {name: len(values) for name, values in own.items()}
        if len(set(lengths.values())) != 1:
            raise ConfigurationError(f"artifact: arrays of one round differ in length: {lengths}")
        prefix = f"{phase}/{index}"
        self._arrays.update({f"{prefix}/{name}": values for name, values in own.items()})
        comparisons = compared(own)
        self._rounds[phase].append(
            {
                "version": version,
                "arrays": prefix,
                "start_versions": list(start_versions),
                "end_versions": list(end_versions),
                "comparisons": comparisons,
                "notes": dict(notes or {}),
            }
        )
        return comparisons

    def add_refit(self, record: SyncRecord) -> None:
        """Add a weight-sync transaction (the initial adoption too)."""
        self._refits.append(record.as_dict())

    def add_attestations(self, attestations: Iterable[Attestation]) -> None:
        """Add what the processes of the run said about themselves."""
        for a in attestations:
            self._attestations.append(a.as_dict())
            self._unreviewed.update(a.unreviewed)

    def note(self, **notes: Any) -> None:
        """Add figures for the reader; they are part of no claim."""
        self._notes.update(notes)

    def write(self, path: str | Path) -> Path:
        """Write the sidecar, then the document; a reader never sees half of it."""
        path = Path(path)
        # The sidecar first: a document never refers to a file that is not there.
        described = write_sidecar(path.parent, path.stem, self._arrays)
        totals = {p: totals_of(rounds) for p, rounds in self._rounds.items()}
        unreviewed = sorted(self._unreviewed)
        document: dict[str, Any] = {
            "kind": KIND,
            "schema": SCHEMA,
            "unreviewed": unreviewed,
            "contract": {"digest": digest_of(self._contract), "content": self._contract},
            "phases": {
                p: {"totals": totals[p], "rounds": rounds} for p, rounds in self._rounds.items()
            },
            "refits": self._refits,
            "attestations": self._attestations,
            "notes": self._notes,
            "provenance": provenance(),
            "sidecar": described,
        }
        document["verdict"] = verdict_of(totals, [document])
        write_document(path, document)
        sidecar = path.parent / described["file"]
        if self._sidecar is not None and self._sidecar != sidecar:
            self._sidecar.unlink(missing_ok=True)
        self._sidecar = sidecar
        return path
