"""The verification artifact: what was compared, and everything needed to check it.

One JSON document and one sidecar with the tokens and log-probabilities of both
sides. Nothing in it has to be believed: the metrics are computed from the arrays,
the receipts are there piece by piece, and :func:`verify_artifact` does it all again.
"""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from patchkit.errors import ConfigurationError, PatchkitError, Violation, ViolationsError
from patchkit.runtime.all2all import DEFAULT as DEFAULT_ALL2ALL
from patchkit.runtime.attestation import Attestation
from patchkit.runtime.attested import check_attested
from patchkit.runtime.canonical import canonical_json, digest_of
from patchkit.runtime.files import write_atomically, writing
from patchkit.runtime.provenance import provenance
from patchkit.runtime.sidecar import SidecarError, floats, integers, read_sidecar, write_sidecar
from patchkit.runtime.sync import SyncRecord
from patchkit.runtime.weights import Receipt, compare_receipts

__all__ = [
    "PHASES",
    "Artifact",
    "ArtifactError",
    "Verified",
    "complete",
    "merge_artifacts",
    "refuse_to_overwrite",
    "verify_artifact",
]

SCHEMA = 1
KIND = "patchkit-verification"
MERGED = "patchkit-verification-merged"
PHASES = ("initial_checkpoint", "post_update_reload")

# What every round says of each token.
_TOKENS = ("sequences", "positions", "token_ids")

# Comparisons with the rollout: the first two must be exact, the last is for the
# reader: the unpatched replay of the same tokens, against what an unpatched engine
# scores them with, where that was made, and against the rollout otherwise.
REQUIRED = ("recompute", "first_forward")
BASELINE = "stock"
BASELINE_ROLLOUT = "stock_rollout"

_FIRST = 8


class ArtifactError(ViolationsError):
    """An artifact that does not hold what it says."""


class Verified(NamedTuple):
    """What a verification established.

    Attributes:
        verdict: In words; says *unreviewed* if anything was accepted so.
        exact: Whether every required comparison is.
        unreviewed: Symbols accepted without review.
        totals: Metrics per phase and comparison.
        runs: How many runs it covers.
    """

    verdict: str
    exact: bool
    unreviewed: tuple[str, ...]
    totals: dict[str, dict[str, dict[str, Any]]]
    runs: int = 1


class Artifact:
    """Collects the evidence of one run and writes it.

    Args:
        contract: The validated contract as plain data.
        unreviewed: Symbols that were accepted for this run without review.
    """

    def __init__(self, contract: Mapping[str, Any], *, unreviewed: Iterable[str] = ()) -> None:
        self._contract = json.loads(canonical_json(dict(contract)))
        self._unreviewed = {*unreviewed, *_accepted(self._contract)}
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
        comparisons = _comparisons(own)
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
        totals = {p: _totals(rounds) for p, rounds in self._rounds.items()}
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
        document["verdict"] = _verdict(totals, [document])
        _write(path, document)
        sidecar = path.parent / described["file"]
        if self._sidecar is not None and self._sidecar != sidecar:
            self._sidecar.unlink(missing_ok=True)
        self._sidecar = sidecar
        return path


def _accepted(contract: Mapping[str, Any]) -> set[str]:
    """What the contract accepted without a review, an admission or a compared run."""
    return (
        {*contract.get("unreviewed", {})}
        | {f"provider {module}" for module in contract.get("unadmitted", {})}
        | {f"all-to-all backend {name}" for name in contract.get("uncompared", {})}
    )


def _write(path: Path, document: dict[str, Any]) -> None:
    sealed = {**document, "digest": digest_of(document)}
    write_atomically(path, json.dumps(sealed, indent=1, sort_keys=True, allow_nan=False).encode())


# -- metrics, from the arrays alone --------------------------------------------------------


def _comparisons(own: Mapping[str, array[Any]]) -> dict[str, dict[str, Any]]:
    return {name: _compare(own, name) for name in (*REQUIRED, BASELINE) if name in own}


def _compare(own: Mapping[str, array[Any]], name: str) -> dict[str, Any]:
    reference = BASELINE_ROLLOUT if name == BASELINE and BASELINE_ROLLOUT in own else "rollout"
    a, b = own[reference], own[name]
    bits_a, bits_b = _bits(a), _bits(b)
    worst = [i for i in range(len(a)) if bits_a[i] != bits_b[i] or not math.isfinite(a[i] + b[i])]
    k3_sum = k3_max = max_absdiff = 0.0
    finite = len(a)
    for i in worst:
        if not (math.isfinite(a[i]) and math.isfinite(b[i])):
            finite -= 1
            continue
        d = b[i] - a[i]
        k3 = math.expm1(d) - d if d < 700 else 1e300  # JSON has no infinity
        k3_sum, k3_max = min(k3_sum + k3, 1e300), max(k3_max, k3)
        max_absdiff = max(max_absdiff, abs(d))
    return {
        "token_count": len(a),
        "mismatch_count": len(worst),
        "finite_count": finite,
        "max_absdiff": max_absdiff,
        "k3_mean": k3_sum / finite if finite else 0.0,
        "k3_max": k3_max,
        "first_mismatches": [
            {
                "sequence": own["sequences"][i],
                "position": own["positions"][i],
                "token_id": own["token_ids"][i],
                "rollout_bits": f"0x{bits_a[i]:08x}",
                "replay_bits": f"0x{bits_b[i]:08x}",
            }
            for i in worst[:_FIRST]
        ],
    }


def _bits(values: array[float]) -> array[int]:
    made = array("I")
    made.frombytes(values.tobytes())
    return made


def _totals(rounds: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        name: _add([r["comparisons"][name] for r in rounds if name in r["comparisons"]])
        for name in (*REQUIRED, BASELINE)
        if any(name in r["comparisons"] for r in rounds)
    }


def _add(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    finite = sum(p["finite_count"] for p in parts)
    weighted = sum(p["k3_mean"] * p["finite_count"] for p in parts)
    return {
        "token_count": sum(p["token_count"] for p in parts),
        "mismatch_count": sum(p["mismatch_count"] for p in parts),
        "finite_count": finite,
        "max_absdiff": max(p["max_absdiff"] for p in parts),
        "k3_mean": weighted / finite if finite else 0.0,
        "k3_max": max(p["k3_max"] for p in parts),
        "first_mismatches": [m for p in parts for m in p["first_mismatches"]][:_FIRST],
    }


def _exact(totals: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> bool:
    return all(
        name in totals.get(phase, {})
        and totals[phase][name]["token_count"] > 0
        and totals[phase][name]["mismatch_count"] == 0
        for phase in PHASES
        for name in REQUIRED
    )


def _verdict(
    totals: Mapping[str, Mapping[str, Mapping[str, Any]]], runs: Sequence[Mapping[str, Any]]
) -> str:
    """The figures in words, with every reservation that the runs carry."""
    tokens = sum(t.get("recompute", {}).get("token_count", 0) for t in totals.values())
    bad = sum(t[name]["mismatch_count"] for t in totals.values() for name in REQUIRED if name in t)
    if _exact(totals):
        verdict = f"exact: {tokens:,} tokens, 0 mismatches in both phases"
    elif bad:
        verdict = f"not exact: {bad:,} mismatches in {tokens:,} tokens"
    else:
        lacking = [p for p in PHASES if not totals.get(p, {}).get("recompute")]
        verdict = f"incomplete: no tokens compared in {', '.join(lacking) or 'some comparison'}"
    return "; ".join([verdict, *_reservations(runs)])


def _reservations(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if unreviewed := {s for run in runs for s in run["unreviewed"]}:
        yield f"UNREVIEWED: {len(unreviewed)} symbol(s) accepted without review"
    if modes := {r["mode"] for run in runs for r in run["refits"]} - {"enforce"}:
        yield f"weight receipts not enforced ({', '.join(sorted(modes))})"
    if any(r.get("in_flight") for run in runs for r in run["refits"]):
        yield "NOT ON-POLICY: weights changed under running requests"
    if not all(run["attestations"] for run in runs):
        yield "no process attested what was installed in it"


# -- verification --------------------------------------------------------------------------


def load_artifact(path: str | Path) -> dict[str, Any]:
    """Read the document; refuses what is no artifact or was altered."""
    path = Path(path)
    try:
        document = json.loads(path.read_text())
    except OSError as e:
        raise ConfigurationError(f"artifact {path}: cannot be read ({e.strerror})") from e
    except (ValueError, RecursionError) as e:
        raise ArtifactError(
            f"artifact {path} is refused",
            [_broken("document", "torn or altered: no JSON", "a whole document", str(e))],
        ) from e
    if not isinstance(document, dict) or document.get("kind") not in (KIND, MERGED):
        raise ConfigurationError(f"artifact {path}: not a verification artifact of patchkit")
    if document.get("schema") != SCHEMA:
        raise ConfigurationError(
            f"artifact {path}: schema {document.get('schema')}, this patchkit reads {SCHEMA}"
        )
    body = {k: v for k, v in document.items() if k != "digest"}
    if digest_of(body) != document.get("digest"):
        raise ArtifactError(
            f"artifact {path} is refused",
            [
                _broken(
                    "document",
                    "altered: its digest is not that of its content",
                    str(document.get("digest")),
                    digest_of(body),
                )
            ],
        )
    return document


def verify_artifact(path: str | Path) -> Verified:
    """Recompute everything that can be recomputed.

    Raises:
        ArtifactError: With everything that is missing, altered or contradictory.
            An artifact that honestly says "not exact" is *verified* by this; look
            at :attr:`Verified.exact`.
        ConfigurationError: If it is no artifact.
    """
    path = Path(path)
    document = load_artifact(path)
    merged = document["kind"] == MERGED
    with complete(path):
        if merged:
            violations = _check_merged(path, document)
        else:
            violations = [*_check_rounds(path, document), *_check_rest(document)]
        if violations:
            raise ArtifactError(f"artifact {path} is refused", violations)
        totals = {p: document["phases"][p]["totals"] for p in PHASES}
        return Verified(
            verdict=document["verdict"],
            exact=_exact(totals),
            unreviewed=tuple(document["unreviewed"]),
            totals=totals,
            runs=len(document["runs"]) if merged else 1,
        )


@contextmanager
def complete(path: Path) -> Iterator[None]:
    """Read parts of a document whose digest is right, and whose parts may still be any.

    Raises:
        ArtifactError: One is missing, or has another form.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, struct.error) as e:
        problem, found = "a part is missing, or another thing", f"{type(e).__name__} {e}"
        raise ArtifactError(
            f"artifact {path} is refused",
            [_broken("document", problem, "all parts of a run", found)],
        ) from e


def _check_rounds(path: Path, document: Mapping[str, Any]) -> Iterator[Violation]:
    try:
        arrays = read_sidecar(path.parent, document["sidecar"])
    except SidecarError as e:
        yield _broken("sidecar", "the arrays cannot be used", "the file described", str(e))
        return
    used: set[str] = set()
    for phase in PHASES:
        rounds = document["phases"][phase]["rounds"]
        for number, r in enumerate(rounds):
            where = f"{phase}, round {number}"
            prefix = r["arrays"] + "/"
            own = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
            if used.intersection(taken := {k for k in arrays if k.startswith(prefix)}):
                yield _broken(where, "its arrays are another round's", "its own", r["arrays"])
            used |= taken
            if missing := {*_TOKENS, "rollout", *REQUIRED} - set(own):
                yield _broken(where, "arrays are missing", "all arrays", ", ".join(sorted(missing)))
                continue
            if len(lengths := {len(values) for values in own.values()}) > 1:
                yield _broken(
                    where, "its arrays differ in length", "one entry per token", str(lengths)
                )
                continue
            tokens = len(own["rollout"])
            if (once := len(set(zip(own["sequences"], own["positions"], strict=True)))) < tokens:
                yield _broken(
                    where, "tokens are counted more than once", f"{once} tokens", str(tokens)
                )
            again = _comparisons(own)
            for name in sorted({*again, *r["comparisons"]}):
                if not _same(again.get(name), r["comparisons"].get(name)):
                    yield _broken(
                        f"{where}, {name}",
                        "the metrics are not those of the arrays",
                        _short(again.get(name)),
                        _short(r["comparisons"].get(name)),
                    )
            for label in ("start_versions", "end_versions"):
                if wrong := sorted({v for v in r[label] if v != r["version"]}):
                    yield _broken(
                        f"{where}, {label}",
                        "not the trainer's policy version",
                        str(r["version"]),
                        str(wrong),
                    )
            if len(set(own["sequences"])) != len(r["start_versions"]) or len(
                r["start_versions"]
            ) != len(r["end_versions"]):
                yield _broken(
                    where,
                    "not every sequence has a start and an end version",
                    f"{len(set(own['sequences']))} of each",
                    f"{len(r['start_versions'])} and {len(r['end_versions'])}",
                )
        if not _same(_totals(rounds), document["phases"][phase]["totals"]):
            yield _broken(phase, "the totals are not the sum of the rounds", "the sum", "another")
    if extra := set(arrays) - used:
        yield _broken("sidecar", "arrays that no round refers to", "none", str(sorted(extra)[:4]))


def _check_rest(document: Mapping[str, Any]) -> Iterator[Violation]:
    contract = document["contract"]
    yield from _check_contract(contract)
    if hidden := _accepted(contract["content"]) - set(document["unreviewed"]):
        yield _broken(
            "unreviewed",
            "accepted without a review, an admission or a compared run, and not mentioned",
            ", ".join(sorted(hidden)),
            ", ".join(document["unreviewed"]) or "nothing",
        )
    yield from _check_all2all(contract["content"])
    totals = {p: document["phases"][p]["totals"] for p in PHASES}
    if document["verdict"] != (expected := _verdict(totals, [document])):
        yield _broken("verdict", "not what the figures say", expected, document["verdict"])
    committed: list[int] = []
    for record in document["refits"]:
        version = record["version"]
        if committed and version <= committed[-1]:
            yield _broken("refits", "versions do not increase", f"> {committed[-1]}", str(version))
        committed.append(version)
        yield from _check_refit(record)
    for phase in PHASES:
        for number, r in enumerate(document["phases"][phase]["rounds"]):
            if r["version"] not in committed:
                yield _broken(
                    f"{phase}, round {number}",
                    "no transaction committed this version",
                    f"one of {committed}",
                    str(r["version"]),
                )
            elif (phase == PHASES[0]) != (r["version"] == committed[0]):
                yield _broken(
                    f"{phase}, round {number}",
                    "the version belongs to the other phase",
                    f"{PHASES[0]} is version {committed[0]}, {PHASES[1]} any later one",
                    str(r["version"]),
                )
    yield from check_attested(document["attestations"], contract, document["unreviewed"])


def _check_contract(contract: Mapping[str, Any]) -> Iterator[Violation]:
    if digest_of(contract["content"]) != contract["digest"]:
        yield _broken("contract", "not the digest of its content", contract["digest"], "another")


def _check_all2all(contract: Mapping[str, Any]) -> Iterator[Violation]:
    """A contract says the backend twice: it and its profile must agree, and its exception."""
    profile = contract.get("profile")
    engine = profile.get("engine", {}) if isinstance(profile, Mapping) else {}
    asked = engine.get("all2all_backend", DEFAULT_ALL2ALL)
    for label, stated in (
        ("all2all_backend", contract.get("all2all_backend", asked)),
        *(("uncompared", name) for name in contract.get("uncompared", {})),
    ):
        if stated != asked:
            yield _broken(f"contract, {label}", "not the profile's backend", asked, str(stated))


def _check_refit(record: Mapping[str, Any]) -> Iterator[Violation]:
    where = f"refit to version {record['version']}"
    if record["trainer"] is None and record["mode"] == "enforce":
        yield _broken(where, "enforced without a trainer's receipt", "a receipt", "none")
    if record["mode"] == "off" or record["trainer"] is None:
        return
    trainer = Receipt.from_dict(record["trainer"])
    workers = [Receipt.from_dict(w) for w in record["workers"]]
    for r in (trainer, *workers):
        if r.version != record["version"]:
            yield _broken(
                f"{where}: {r.holder}",
                "its receipt is of another version",
                str(record["version"]),
                str(r.version),
            )
    found = compare_receipts(trainer, workers)
    if record["mode"] == "log":
        if bool(found) != bool(record["violations"]):
            yield _broken(
                where,
                "its logged differences are not those of its receipts",
                f"{len(found)}",
                f"{len(record['violations'])}",
            )
        return
    for v in found:
        yield Violation(
            subject=f"{where}: {v.subject}",
            problem=v.problem,
            expected=v.expected,
            found=v.found,
            remedy=v.remedy,
        )


def _same(a: Any, b: Any) -> bool:
    """Equal, but for the last digits of sums of transcendental functions."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(
            math.isclose(a[k], b[k], rel_tol=1e-9) if k.startswith("k3") else _same(a[k], b[k])
            for k in a
        )
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def _short(comparison: Mapping[str, Any] | None) -> str:
    if comparison is None:
        return "absent"
    return (
        f"{comparison['mismatch_count']} of {comparison['token_count']} mismatches, "
        f"max |difference| {comparison['max_absdiff']:.6e}"
    )


def _broken(subject: str, problem: str, expected: str, found: str) -> Violation:
    return Violation(
        subject=subject,
        problem=problem,
        expected=expected,
        found=found,
        remedy="trust nothing of it: get the file again from its origin, or run again",
    )


# -- merging -------------------------------------------------------------------------------


def refuse_to_overwrite(target: str | Path, evidence: Iterable[str | Path]) -> None:
    """Whatever is written must not replace an artifact that it is made of, nor its arrays.

    Raises:
        ConfigurationError: It would.
    """
    place = Path(target).resolve()
    for file in map(Path, evidence):
        document = load_artifact(file)
        if document["kind"] == MERGED:
            refuse_to_overwrite(target, [file.parent / run["file"] for run in document["runs"]])
            read = [file]
        else:
            read = [file, file.parent / document["sidecar"]["file"]]
        if place in [f.resolve() for f in read]:
            raise ConfigurationError(
                f"{target}: is part of the evidence in artifact {file}, which would be lost; "
                "name another file with --output"
            )


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
            _broken("runs", "one run was given twice, as a copy", "different runs", "equal digests")
        )
    if violations:
        raise ArtifactError(f"{len(contracts)} contracts cannot be merged", violations)
    totals, unreviewed = _sum_up(documents)
    merged = {
        "kind": MERGED,
        "schema": SCHEMA,
        "verdict": _verdict(totals, documents),
        "unreviewed": unreviewed,
        "contract": documents[0]["contract"],
        "phases": {p: {"totals": totals[p]} for p in PHASES},
        "runs": [
            {"file": str(_relative(Path(p), target.parent)), **_told(d)}
            for p, d in zip(paths, documents, strict=True)
        ],
        "provenance": provenance(),
    }
    with writing(target):
        _write(target, merged)
    return target


def _sum_up(
    documents: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, dict[str, dict[str, Any]]], list[str]]:
    totals = {
        p: _totals([{"comparisons": d["phases"][p]["totals"]} for d in documents]) for p in PHASES
    }
    return totals, sorted({s for d in documents for s in d["unreviewed"]})


def _relative(path: Path, folder: Path) -> Path:
    try:
        return path.resolve().relative_to(folder.resolve())
    except ValueError:
        return path.resolve()


def _check_merged(path: Path, document: Mapping[str, Any]) -> list[Violation]:
    contract = document["contract"]
    violations = list(_check_contract(contract))
    documents: list[dict[str, Any]] = []
    for run in document["runs"]:
        file = path.parent / run["file"]
        try:
            d = load_artifact(file)
            if d["kind"] == MERGED:
                violations.append(_broken(str(file), "merged itself", "a run", MERGED))
                continue
            verify_artifact(file)
        except PatchkitError as e:
            violations.append(_broken(str(file), "does not verify", "a verified run", str(e)))
            continue
        if d["digest"] in {known["digest"] for known in documents}:
            violations.append(_broken(str(file), "counted twice", "each run once", d["digest"]))
        if d["contract"]["digest"] != contract["digest"]:
            violations.append(
                _broken(
                    str(file),
                    "a run of another contract",
                    contract["digest"],
                    d["contract"]["digest"],
                )
            )
        if run != (told := {"file": run["file"], **_told(d)}):
            violations.append(_broken(str(file), "another run", str(told), str(run)))
        documents.append(d)
    if not violations:
        totals, unreviewed = _sum_up(documents)
        stated = {p: document["phases"][p]["totals"] for p in PHASES}
        if not _same(totals, stated) or unreviewed != document["unreviewed"]:
            violations.append(_broken("totals", "not the sum of the runs", "the sum", "another"))
        if document["verdict"] != (expected := _verdict(totals, documents)):
            violations.append(
                _broken("verdict", "not what the figures say", expected, document["verdict"])
            )
    return violations


def _told(run: Mapping[str, Any]) -> dict[str, Any]:
    """What a merged artifact says of a run."""
    return {
        "digest": run["digest"],
        "verdict": run["verdict"],
        "created": run["provenance"]["created"],
    }
