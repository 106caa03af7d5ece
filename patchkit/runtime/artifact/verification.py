"""Verifying an artifact: everything that can be recomputed, again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from patchkit.errors import PatchkitError, Violation
from patchkit.runtime.all2all import DEFAULT as DEFAULT_ALL2ALL
from patchkit.runtime.artifact.attested import check_attested
from patchkit.runtime.artifact.document import (
    MERGED,
    ArtifactError,
    accepted,
    broken,
    complete,
    load_artifact,
    told,
)
from patchkit.runtime.artifact.figures import (
    PHASES,
    REQUIRED,
    TOKENS,
    compared,
    is_exact,
    same_figures,
    sum_up,
    totals_of,
    verdict_of,
)
from patchkit.runtime.canonical import digest_of
from patchkit.runtime.sidecar import SidecarError, read_sidecar
from patchkit.runtime.weights import Receipt, compare_receipts


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
            exact=is_exact(totals),
            unreviewed=tuple(document["unreviewed"]),
            totals=totals,
            runs=len(document["runs"]) if merged else 1,
        )


def _check_rounds(path: Path, document: Mapping[str, Any]) -> Iterator[Violation]:
    try:
        arrays = read_sidecar(path.parent, document["sidecar"])
    except SidecarError as e:
        yield broken("sidecar", "the arrays cannot be used", "the file described", str(e))
        return
    used: set[str] = set()
    for phase in PHASES:
        rounds = document["phases"][phase]["rounds"]
        for number, r in enumerate(rounds):
            where = f"{phase}, round {number}"
            prefix = r["arrays"] + "/"
            own = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
            if used.intersection(taken := {k for k in arrays if k.startswith(prefix)}):
                yield broken(where, "its arrays are another round's", "its own", r["arrays"])
            used |= taken
            if missing := {*TOKENS, "rollout", *REQUIRED} - set(own):
                yield broken(where, "arrays are missing", "all arrays", ", ".join(sorted(missing)))
                continue
            if len(lengths := {len(values) for values in own.values()}) > 1:
                yield broken(
                    where, "its arrays differ in length", "one entry per token", str(lengths)
                )
                continue
            tokens = len(own["rollout"])
            if (once := len(set(zip(own["sequences"], own["positions"], strict=True)))) < tokens:
                yield broken(
                    where, "tokens are counted more than once", f"{once} tokens", str(tokens)
                )
            again = compared(own)
            for name in sorted({*again, *r["comparisons"]}):
                if not same_figures(again.get(name), r["comparisons"].get(name)):
                    yield broken(
                        f"{where}, {name}",
                        "the metrics are not those of the arrays",
                        _short(again.get(name)),
                        _short(r["comparisons"].get(name)),
                    )
            for label in ("start_versions", "end_versions"):
                if wrong := sorted({v for v in r[label] if v != r["version"]}):
                    yield broken(
                        f"{where}, {label}",
                        "not the trainer's policy version",
                        str(r["version"]),
                        str(wrong),
                    )
            if len(set(own["sequences"])) != len(r["start_versions"]) or len(
                r["start_versions"]
            ) != len(r["end_versions"]):
                yield broken(
                    where,
                    "not every sequence has a start and an end version",
                    f"{len(set(own['sequences']))} of each",
                    f"{len(r['start_versions'])} and {len(r['end_versions'])}",
                )
        if not same_figures(totals_of(rounds), document["phases"][phase]["totals"]):
            yield broken(phase, "the totals are not the sum of the rounds", "the sum", "another")
    if extra := set(arrays) - used:
        yield broken("sidecar", "arrays that no round refers to", "none", str(sorted(extra)[:4]))


def _check_rest(document: Mapping[str, Any]) -> Iterator[Violation]:
    contract = document["contract"]
    yield from _check_contract(contract)
    if hidden := accepted(contract["content"]) - set(document["unreviewed"]):
        yield broken(
            "unreviewed",
            "accepted without a review, an admission or a compared run, and not mentioned",
            ", ".join(sorted(hidden)),
            ", ".join(document["unreviewed"]) or "nothing",
        )
    yield from _check_all2all(contract["content"])
    totals = {p: document["phases"][p]["totals"] for p in PHASES}
    if document["verdict"] != (expected := verdict_of(totals, [document])):
        yield broken("verdict", "not what the figures say", expected, document["verdict"])
    committed: list[int] = []
    for record in document["refits"]:
        version = record["version"]
        if committed and version <= committed[-1]:
            yield broken("refits", "versions do not increase", f"> {committed[-1]}", str(version))
        committed.append(version)
        yield from _check_refit(record)
    for phase in PHASES:
        for number, r in enumerate(document["phases"][phase]["rounds"]):
            if r["version"] not in committed:
                yield broken(
                    f"{phase}, round {number}",
                    "no transaction committed this version",
                    f"one of {committed}",
                    str(r["version"]),
                )
            elif (phase == PHASES[0]) != (r["version"] == committed[0]):
                yield broken(
                    f"{phase}, round {number}",
                    "the version belongs to the other phase",
                    f"{PHASES[0]} is version {committed[0]}, {PHASES[1]} any later one",
                    str(r["version"]),
                )
    yield from check_attested(document["attestations"], contract, document["unreviewed"])


def _check_contract(contract: Mapping[str, Any]) -> Iterator[Violation]:
    if digest_of(contract["content"]) != contract["digest"]:
        yield broken("contract", "not the digest of its content", contract["digest"], "another")


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
            yield broken(f"contract, {label}", "not the profile's backend", asked, str(stated))


def _check_refit(record: Mapping[str, Any]) -> Iterator[Violation]:
    where = f"refit to version {record['version']}"
    if record["trainer"] is None and record["mode"] == "enforce":
        yield broken(where, "enforced without a trainer's receipt", "a receipt", "none")
    if record["mode"] == "off" or record["trainer"] is None:
        return
    trainer = Receipt.from_dict(record["trainer"])
    workers = [Receipt.from_dict(w) for w in record["workers"]]
    for r in (trainer, *workers):
        if r.version != record["version"]:
            yield broken(
                f"{where}: {r.holder}",
                "its receipt is of another version",
                str(record["version"]),
                str(r.version),
            )
    found = compare_receipts(trainer, workers)
    if record["mode"] == "log":
        if bool(found) != bool(record["violations"]):
            yield broken(
                where,
                "its logged differences are not those of its receipts",
                f"{len(found)}",
                f"{len(record['violations'])}",
            )
        return
    for v in found:
        yield replace(v, subject=f"{where}: {v.subject}")


def _check_merged(path: Path, document: Mapping[str, Any]) -> list[Violation]:
    contract = document["contract"]
    violations = list(_check_contract(contract))
    documents: list[dict[str, Any]] = []
    for run in document["runs"]:
        file = path.parent / run["file"]
        try:
            d = load_artifact(file)
            if d["kind"] == MERGED:
                violations.append(broken(str(file), "merged itself", "a run", MERGED))
                continue
            verify_artifact(file)
        except PatchkitError as e:
            violations.append(broken(str(file), "does not verify", "a verified run", str(e)))
            continue
        if d["digest"] in {known["digest"] for known in documents}:
            violations.append(broken(str(file), "counted twice", "each run once", d["digest"]))
        if d["contract"]["digest"] != contract["digest"]:
            violations.append(
                broken(
                    str(file),
                    "a run of another contract",
                    contract["digest"],
                    d["contract"]["digest"],
                )
            )
        if run != (expected := {"file": run["file"], **told(d)}):
            violations.append(broken(str(file), "another run", str(expected), str(run)))
        documents.append(d)
    if not violations:
        totals, unreviewed = sum_up(documents)
        stated = {p: document["phases"][p]["totals"] for p in PHASES}
        if not same_figures(totals, stated) or unreviewed != document["unreviewed"]:
            violations.append(broken("totals", "not the sum of the runs", "the sum", "another"))
        if document["verdict"] != (verdict := verdict_of(totals, documents)):
            violations.append(
                broken("verdict", "not what the figures say", verdict, document["verdict"])
            )
    return violations


def _short(comparison: Mapping[str, Any] | None) -> str:
    if comparison is None:
        return "absent"
    return (
        f"{comparison['mismatch_count']} of {comparison['token_count']} mismatches, "
        f"max |difference| {comparison['max_absdiff']:.6e}"
    )
