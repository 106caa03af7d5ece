"""The artifact holds what it says, or is refused with the part that does not."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from evidence import CONTRACT, attestation, build, manifest, refit, write

from patchkit.errors import ConfigurationError
from patchkit.files import write_atomically
from patchkit.runtime.artifact import (
    Artifact,
    ArtifactError,
    merge_artifacts,
    verify_artifact,
)
from patchkit.runtime.artifact.attested import check_attested
from patchkit.runtime.artifact.figures import totals_of
from patchkit.runtime.canonical import canonical_json, digest_of
from patchkit.runtime.sidecar import SidecarError, read_sidecar, write_sidecar


def reseal(path: Path, change) -> None:
    """Alter the document as somebody would who also repairs its digest."""
    document = json.loads(path.read_text())
    del document["digest"]
    change(document)
    document["digest"] = digest_of(document)
    path.write_text(json.dumps(document))


def test_an_honest_run_verifies(tmp_path):
    path = write(tmp_path)
    found = verify_artifact(path)
    assert found.exact
    assert found.verdict == "exact: 120 tokens, 0 mismatches in both phases"
    assert found.totals["initial_checkpoint"]["recompute"]["token_count"] == 40
    assert found.totals["post_update_reload"]["stock"]["mismatch_count"] == 80
    assert {p.name for p in tmp_path.iterdir()} == {
        "run.json",
        json.loads(path.read_text())["sidecar"]["file"],
    }


def test_metrics_are_those_of_the_parity_gate(tmp_path):
    torch = pytest.importorskip("torch")
    from patchkit.parity.metrics import compare_logprobs

    a, b = -torch.rand(500) * 5, -torch.rand(500) * 5
    b[::2] = a[::2]
    b[7] = -0.0
    a[7] = 0.0
    artifact = Artifact({})
    mine = artifact.add_round(
        "initial_checkpoint",
        version=0,
        sequences=torch.zeros(500, dtype=torch.int64),
        positions=torch.arange(500),
        token_ids=torch.arange(500),
        rollout=a,
        recompute=b,
        first_forward=a,
    )["recompute"]
    theirs = compare_logprobs(a, b, positions=range(500), token_ids=range(500)).as_dict()
    assert mine["mismatch_count"] == theirs["mismatch_count"]
    assert mine["max_absdiff"] == theirs["max_absdiff"]
    for key in ("k3_mean", "k3_max"):
        assert mine[key] == pytest.approx(theirs[key], rel=1e-12)
    assert mine["first_mismatches"] == [
        {k: m[k] for k in ("sequence", "position", "token_id", "rollout_bits", "replay_bits")}
        for m in theirs["first_mismatches"]
    ]


def test_a_mismatch_is_told_and_still_verifies(tmp_path):
    found = verify_artifact(write(tmp_path, bad=True))
    assert not found.exact
    assert found.verdict == "not exact: 1 mismatches in 120 tokens"


def test_the_unpatched_pair_can_be_compared_with_itself(tmp_path):
    artifact = Artifact({})
    made = artifact.add_round(
        "initial_checkpoint",
        version=0,
        sequences=[0, 0],
        positions=[0, 1],
        token_ids=[1, 1],
        rollout=[-1.0, -2.0],
        recompute=[-1.0, -2.0],
        first_forward=[-1.0, -2.0],
        stock=[-1.5, -2.5],
        stock_rollout=[-1.5, -2.0],
    )
    assert made["stock"]["mismatch_count"] == 1
    assert made["recompute"]["mismatch_count"] == 0


def test_not_finite_is_a_mismatch(tmp_path):
    artifact = Artifact({})
    same = [-1.0, math.nan, -math.inf]
    made = artifact.add_round(
        "initial_checkpoint",
        version=0,
        sequences=[0, 0, 0],
        positions=[0, 1, 2],
        token_ids=[1, 1, 1],
        rollout=same,
        recompute=same,
        first_forward=[1e30, -1.0, -1.0],
    )
    assert (made["recompute"]["mismatch_count"], made["recompute"]["finite_count"]) == (2, 1)
    artifact.write(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"versions": 1}, "incomplete: no tokens compared in post_update_reload"),
        ({"versions": 0}, "incomplete: no tokens compared in initial_checkpoint, post_update"),
        ({"unreviewed": ["m:f", "m:g"]}, "UNREVIEWED: 2 symbol(s)"),
        ({"mode": "log"}, "weight receipts not enforced (log)"),
        ({"attested": False}, "no process attested"),
    ],
)
def test_reservations_are_in_the_verdict(tmp_path, kwargs, words):
    assert words in verify_artifact(write(tmp_path, **kwargs)).verdict


def test_in_flight_updates_are_never_on_policy(tmp_path):
    artifact = build(versions=0)
    artifact.add_refit(dataclasses.replace(refit(0), in_flight=True))
    assert "NOT ON-POLICY" in verify_artifact(artifact.write(tmp_path / "a.json")).verdict


def test_what_a_process_accepted_unreviewed_shows(tmp_path):
    artifact = build(attested=False)
    artifact.add_attestations([attestation(rank=1, unreviewed=("m:f",))])
    found = verify_artifact(artifact.write(tmp_path / "a.json"))
    assert found.unreviewed == ("m:f",)
    assert "UNREVIEWED" in found.verdict


def test_what_the_contract_accepted_unreviewed_shows(tmp_path):
    """Whoever attested: a trainer's drifted symbol is none of the workers'."""
    path = write(tmp_path, contract={**CONTRACT, "unreviewed": {"m:f": "d"}})
    found = verify_artifact(path)
    assert found.unreviewed == ("m:f",)
    assert "UNREVIEWED: 1 symbol(s)" in found.verdict
    reseal(path, set_to([], "unreviewed"))
    with pytest.raises(ArtifactError, match="not mentioned"):
        verify_artifact(path)


# -- tampering ----------------------------------------------------------------------------


def sidecar_of(path: Path) -> Path:
    return path.parent / json.loads(path.read_text())["sidecar"]["file"]


def test_one_altered_byte_of_the_document(tmp_path):
    path = write(tmp_path)
    path.write_text(path.read_text().replace('"toy"', '"Toy"', 1))
    with pytest.raises(ArtifactError, match="altered: its digest"):
        verify_artifact(path)


@pytest.mark.parametrize("how", ["missing", "flipped", "cut", "other"])
def test_a_sidecar_that_is_not_the_one_described(tmp_path, how):
    path = write(tmp_path)
    sidecar = sidecar_of(path)
    data = bytearray(sidecar.read_bytes())
    if how == "missing":
        sidecar.unlink()
    elif how == "flipped":
        data[-1] ^= 1
        sidecar.write_bytes(data)
    elif how == "cut":
        sidecar.write_bytes(data[:-8])
    else:
        sidecar.write_bytes(sidecar_of(write(tmp_path, "other.json", tokens=10)).read_bytes())
    with pytest.raises(ArtifactError, match="sidecar"):
        verify_artifact(path)


def flip_comparison(d):
    d["phases"]["initial_checkpoint"]["rounds"][0]["comparisons"]["recompute"]["token_count"] = 41


def hide_mismatches(d):
    for phase in d["phases"].values():
        for part in [phase["totals"], *(r["comparisons"] for r in phase["rounds"])]:
            part["stock"]["mismatch_count"] = 0


def drop(*keys):
    def change(d):
        for key in keys[:-1]:
            d = d[key]
        del d[keys[-1]]

    return change


def set_to(value, *keys):
    def change(d):
        for key in keys[:-1]:
            d = d[key]
        d[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (flip_comparison, "metrics are not those of the arrays"),
        (hide_mismatches, "initial_checkpoint, round 0, stock"),
        (set_to("exact: 9 tokens", "verdict"), "not what the figures say"),
        (set_to(7, "refits", 1, "version"), "versions do not increase|no transaction committed"),
        (set_to([], "refits"), "no transaction committed|a part is missing"),
        (
            set_to(
                "00000000000000ff", "refits", 1, "workers", 1, "parameters", "w", "pieces", 0, 2
            ),
            "refit to version 1: w",
        ),
        (drop("refits", 1, "workers", 1), "do not cover it once"),
        (set_to(None, "refits", 1, "trainer"), "enforced without a trainer's receipt"),
        (set_to(0, "refits", 1, "trainer", "version"), "trainer: its receipt is of another"),
        (set_to(0, "refits", 1, "workers", 1, "version"), "worker 1: its receipt is of another"),
        (drop("phases", "post_update_reload", "rounds", 1), "no round refers|totals"),
        (drop("attestations"), "a part is missing"),
        (set_to({}, "contract", "content"), "not the digest of its content"),
        (set_to([0] * 4, "phases", "post_update_reload", "rounds", 0, "end_versions"), "end_vers"),
        (set_to([], "phases", "post_update_reload", "rounds", 0, "end_versions"), "every sequence"),
        (set_to("../run.json", "sidecar", "file"), "without a folder"),
        (set_to("x", "attestations", 0, "contract_digest"), "attested another contract"),
        (set_to(["m:f"], "attestations", 0, "unreviewed"), "does not mention"),
        (set_to({"up": "2.0"}, "attestations", 0, "packages"), "ran another up"),
    ],
)
def test_a_repaired_digest_does_not_help(tmp_path, change, words):
    path = write(tmp_path)
    reseal(path, change)
    with pytest.raises(ArtifactError, match=words):
        verify_artifact(path)


FIRST = "initial_checkpoint/0"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a.pop(f"{FIRST}/positions"), "arrays are missing(?s:.)*positions"),
        (lambda a: a.pop(f"{FIRST}/token_ids"), "arrays are missing(?s:.)*token_ids"),
        (lambda a: a[f"{FIRST}/token_ids"].pop(), "differ in length"),
        (lambda a: a[f"{FIRST}/recompute"].append(-9.0), "differ in length"),
        (lambda a: a[f"{FIRST}/positions"].__setitem__(1, 7), "more than once(?s:.)*39 tokens"),
    ],
)
def test_arrays_that_do_not_say_which_tokens_were_compared(tmp_path, change, words):
    path = write(tmp_path)

    def alter(document):
        arrays = read_sidecar(tmp_path, document["sidecar"])
        change(arrays)
        document["sidecar"] = write_sidecar(tmp_path, "run", arrays)

    reseal(path, alter)
    with pytest.raises(ArtifactError, match=words):
        verify_artifact(path)


def test_a_round_that_is_there_twice(tmp_path):
    path = write(tmp_path)

    def twice(document):
        phase = document["phases"]["post_update_reload"]
        phase["rounds"].append(phase["rounds"][0])
        phase["totals"] = totals_of(phase["rounds"])

    reseal(path, twice)
    with pytest.raises(ArtifactError, match="another round's"):
        verify_artifact(path)


def attested(*keys: object):
    """A change somewhere in the first attestation."""
    *way, value = keys
    return set_to(value, "attestations", 0, *way)


MANIFEST_PARTS = sorted(set(manifest()) - {"schema", "time"})


@pytest.mark.parametrize("part", MANIFEST_PARTS)
def test_each_part_of_a_runtime_manifest_that_is_missing_is_named(tmp_path, part):
    path = write(tmp_path)
    reseal(path, drop("attestations", 0, "manifest", part))
    with pytest.raises(ArtifactError, match=rf"parts are missing(?s:.)*{part}") as e:
        verify_artifact(path)
    assert e.value.violations[0].subject == "worker 0 (pid 1 on here): manifest"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        # What the digest covers, whoever repaired the document's own.
        (attested("manifest", "patches", 0, "after", "code", "x"), "manifest: not the digest"),
        (attested("manifest", "patches", 0, "before", "code", "x"), "manifest: not the digest"),
        (attested("manifest", "patches", 0, "source_digest", "x"), "manifest: not the digest"),
        (attested("manifest", "patches", 0, "required", False), "manifest: not the digest"),
        (attested("manifest", "patches", 0, "replacement", "x:f"), "manifest: not the digest"),
        (attested("manifest", "patches", 0, "action", "wrap"), "manifest: not the digest"),
        (attested("manifest", "patches", []), "manifest: not the digest"),
        (attested("manifest", "sources", "toy.rollout", "x"), "manifest: not the digest"),
        (attested("manifest", "skipped", ["up.m:g <1"]), "manifest: not the digest"),
        (attested("manifest", "versions", "up", "2.0"), "manifest: not the digest"),
        (attested("manifest", "profile", "other"), "manifest: not the digest"),
        (attested("manifest", "side", "trainer"), "manifest: not the digest"),
        (attested("manifest", "adapter", "other"), "manifest: not the digest"),
        (attested("manifest", "unreviewed", {"m:f": "d"}), "manifest: not the digest"),
        (attested("manifest", "added", "later"), "manifest: not the digest"),
        (attested("manifest", "digest", "x"), "manifest: not the digest"),
        (attested("manifest_digest", "x"), "manifest_digest: not the digest"),
        (attested("manifest", {}), "manifest: parts are missing"),
        # What it does not, and is told twice.
        (attested("manifest", "state", "undone"), r"manifest\.state"),
        (attested("state", "undone"), "nothing is active in it"),
        (attested("state", "pending"), r"manifest\.state"),
        (attested("manifest", "pid", 2), r"manifest\.pid"),
        (attested("pid", 2), r"manifest\.pid"),
        (attested("manifest", "python", "3.12.0"), r"manifest\.python"),
        (attested("manifest", "reviewed", False), r"manifest\.reviewed"),
        (attested("manifest", "slots", {}), r"manifest\.slots"),
        (attested("manifest", "hits", {"up.m:g": 3}), r"manifest\.hits"),
        (attested("adapter", "other"), r"manifest\.adapter"),
        (attested("role", "trainer"), r"manifest\.side"),
    ],
)
def test_what_a_process_attested_is_recomputed(tmp_path, change, words):
    path = write(tmp_path)
    reseal(path, change)
    with pytest.raises(ArtifactError, match=words) as e:
        verify_artifact(path)
    assert any("pid" in v.subject for v in e.value.violations), "the process is named"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"profile": "other"}, r"manifest\.profile"),
        ({"adapter": "other"}, r"manifest\.adapter"),
        ({"versions": {"up": "1.1"}}, r"manifest\.versions\.up"),
    ],
)
def test_a_manifest_with_its_own_right_digest_is_held_against_the_contract(
    tmp_path, changes, words
):
    artifact = build(attested=False)
    other = manifest(**changes)
    artifact.add_attestations(
        [
            attestation(
                manifest=other,
                manifest_digest=other["digest"],
                adapter=changes.get("adapter", "toy"),
            )
        ]
    )
    path = artifact.write(tmp_path / "run.json")
    with pytest.raises(ArtifactError, match=words) as e:
        verify_artifact(path)
    assert len(e.value.violations) == 1


def test_workers_of_one_run_with_different_manifests(tmp_path):
    other = manifest(sources={"toy.rollout": "edited"})
    artifact = build()
    artifact.add_attestations(
        [attestation(rank=1, manifest=other, manifest_digest=other["digest"])]
    )
    with pytest.raises(ArtifactError, match="its manifest is not that of worker 0"):
        verify_artifact(artifact.write(tmp_path / "run.json"))


ONE = {"tensor": 1, "expert": 1, "pipeline": 1, "context": 1, "data": 1}
TWO = {"rollout": {**ONE, "tensor": 2}, "trainer": {**ONE, "data": 2}}
WORKERS = [("worker", 0), ("worker", 1)]
TRAINERS = [("trainer", 0), ("trainer", 1)]


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        (WORKERS, []),
        ([*WORKERS, *TRAINERS, ("driver", 0)], []),
        (WORKERS[:1], ["worker 1"]),
        (TRAINERS, ["worker 0", "worker 1"]),
        ([*WORKERS, TRAINERS[1]], ["trainer 0"]),
        ([], []),  # the verdict says so
    ],
)
def test_a_process_of_the_topology_that_did_not_attest(present, missing):
    told = [attestation(role=role, rank=rank).as_dict() for role, rank in present]
    contract = {"digest": "c", "content": {"profile": {"topology": TWO}}}
    found = [v for v in check_attested(told, contract, []) if v.problem == "did not attest"]
    assert [v.subject for v in found] == missing


@pytest.mark.parametrize("text", ["", "{", '{"kind": "x"}', "[]", '{"kind": 1}', "[" * 99999])
def test_what_is_no_artifact(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises((ArtifactError, ConfigurationError)):
        verify_artifact(path)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        verify_artifact(tmp_path / "never.json")


def test_writing_again_replaces_both_files(tmp_path):
    artifact = build(versions=1)
    artifact.write(tmp_path / "a.json")
    artifact.add_refit(refit(1))
    artifact.note(more="later")
    artifact.add_round(
        "post_update_reload",
        version=1,
        sequences=[0],
        positions=[1],
        token_ids=[2],
        rollout=[-1.0],
        recompute=[-1.0],
        first_forward=[-1.0],
        start_versions=[1],
        end_versions=[1],
    )
    path = artifact.write(tmp_path / "a.json")
    assert verify_artifact(path).exact
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("wrong", ["dtype", "length", "phase"])
def test_unusable_rounds(wrong):
    torch = pytest.importorskip("torch")
    kwargs = {
        "version": 0,
        "sequences": [0],
        "positions": [0],
        "token_ids": [0],
        "rollout": [-1.0],
        "recompute": torch.tensor([-1.0], dtype=torch.bfloat16 if wrong == "dtype" else None),
        "first_forward": [-1.0, -2.0] if wrong == "length" else [-1.0],
    }
    with pytest.raises((ConfigurationError, SidecarError), match=r"float32|length|none of"):
        Artifact({}).add_round("later" if wrong == "phase" else "initial_checkpoint", **kwargs)


# -- merging ------------------------------------------------------------------------------


def test_merging_adds_up(tmp_path):
    a, b = write(tmp_path, "a.json"), write(tmp_path, "b.json", tokens=20, unreviewed=["m:f"])
    found = verify_artifact(merge_artifacts([a, b], tmp_path / "all.json"))
    assert (found.runs, found.exact) == (2, True)
    assert found.totals["initial_checkpoint"]["recompute"]["token_count"] == 60
    assert "UNREVIEWED" in found.verdict


def test_one_bad_run_makes_the_sum_bad(tmp_path):
    a, b = write(tmp_path, "a.json"), write(tmp_path, "b.json", bad=True)
    assert not verify_artifact(merge_artifacts([a, b], tmp_path / "all.json")).exact


@pytest.mark.parametrize("what", ["contract", "twice", "copy", "altered", "nested", "none"])
def test_what_cannot_be_merged(tmp_path, what):
    a = write(tmp_path, "a.json")
    runs = [a, write(tmp_path, "b.json", tokens=20)]
    if what == "contract":
        runs[1] = write(tmp_path, "b.json", contract={"adapter": "other"})
    elif what == "twice":
        runs[1] = a
    elif what == "copy":
        runs[1] = tmp_path / "c.json"
        runs[1].write_text(a.read_text())
    elif what == "altered":
        sidecar_of(a).unlink()
    elif what == "nested":
        runs[1] = merge_artifacts(runs, tmp_path / "m.json")
    else:
        runs = []
    with pytest.raises((ArtifactError, ConfigurationError)):
        merge_artifacts(runs, tmp_path / "all.json")
    assert not (tmp_path / "all.json").exists()


@pytest.mark.parametrize("what", ["document", "link", "arrays"])
def test_merging_never_replaces_what_it_adds_up(tmp_path, what):
    a, b = write(tmp_path, "a.json"), write(tmp_path, "b.json", tokens=20)
    target = a if what == "document" else sidecar_of(a)
    if what == "link":
        target = tmp_path / "link.json"
        target.symlink_to(a)
    with pytest.raises(ConfigurationError, match="part of the evidence"):
        merge_artifacts([a, b], target)
    assert verify_artifact(a).exact


def test_merging_into_a_folder_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot be written"):
        merge_artifacts([write(tmp_path)], tmp_path)


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    read, written = os.pipe()
    assert write_atomically(f"/proc/self/fd/{written}", b"x").is_fifo()
    assert os.read(read, 9) == b"x"
    for end in (read, written):
        os.close(end)


@pytest.mark.parametrize("what", ["gone", "exchanged", "totals"])
def test_a_merged_artifact_is_checked_against_its_runs(tmp_path, what):
    a, b = write(tmp_path, "a.json"), write(tmp_path, "b.json", tokens=20)
    merged = merge_artifacts([a, b], tmp_path / "all.json")
    if what == "gone":
        b.unlink()
    elif what == "exchanged":
        write(tmp_path, "b.json", tokens=30)
    else:
        reseal(
            merged,
            set_to(9, "phases", "initial_checkpoint", "totals", "recompute", "token_count"),
        )
    with pytest.raises(ArtifactError, match=r"b\.json|sum of the runs"):
        verify_artifact(merged)


def double(d):
    d["runs"].append(d["runs"][0])
    for phase in d["phases"].values():
        for figures in phase["totals"].values():
            for key in ("token_count", "finite_count", "mismatch_count"):
                figures[key] *= 2
            figures["first_mismatches"] = (figures["first_mismatches"] * 2)[:8]
    d["verdict"] = d["verdict"].replace("120", "240")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_to({"adapter": "other"}, "contract", "content"), "not the digest of its content"),
        (double, "counted twice"),
        (set_to("exact: 9 tokens", "runs", 0, "verdict"), "another run"),
        (set_to("all.json", "runs", 0, "file"), "merged itself"),
        (drop("runs", 0, "created"), "another run"),
        (drop("contract"), "a part is missing"),
    ],
)
def test_a_repaired_digest_does_not_help_a_merged_one_either(tmp_path, change, words):
    merged = merge_artifacts([write(tmp_path)], tmp_path / "all.json")
    reseal(merged, change)
    with pytest.raises(ArtifactError, match=words):
        verify_artifact(merged)


def test_the_folder_can_be_moved(tmp_path):
    (tmp_path / "one").mkdir()
    a, b = write(tmp_path / "one", "a.json"), write(tmp_path / "one", "b.json", tokens=20)
    merge_artifacts([a, b], tmp_path / "one/all.json")
    (tmp_path / "one").rename(tmp_path / "two")
    assert verify_artifact(tmp_path / "two/all.json").runs == 2


# -- the command --------------------------------------------------------------------------


def cli(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-c",
            "from patchkit.cli import main; main()",
            "artifact",
            *map(str, args),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_command(tmp_path):
    good, bad = write(tmp_path, "good.json"), write(tmp_path, "bad.json", bad=True)
    done = cli("verify", good)
    assert done.returncode == 0, done.stderr
    assert "exact: 120 tokens" in done.stdout
    done = cli("verify", bad, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["verified"] is True
    assert json.loads(done.stdout)["exact"] is False
    sidecar_of(good).unlink()
    done = cli("verify", good)
    assert done.returncode == 1
    assert "sidecar" in done.stderr
    done = cli("verify", good, "--json")
    assert json.loads(done.stdout)["violations"][0]["subject"] == "sidecar"
    assert cli("verify", tmp_path / "never.json").returncode == 2
    assert cli("merge", bad, "-o", tmp_path / "m.json").returncode == 1


# -- dying in the middle -------------------------------------------------------------------


def write_for_ever(artifact: Artifact, target: Path, ready: int) -> None:
    """The child: rewrites one artifact until it is killed."""
    turn = 0
    while True:
        artifact.note(turn=turn)
        artifact.add_round(**ROUND)
        artifact.write(target)
        turn += 1
        if turn == 1:
            os.write(ready, b"x")


ROUND = {
    "phase": "post_update_reload",
    "version": 2,
    "sequences": [0] * 50,
    "positions": list(range(50)),
    "token_ids": [1] * 50,
    "rollout": [-1.0] * 50,
    "recompute": [-1.0] * 50,
    "first_forward": [-1.0] * 50,
    "start_versions": [2],
    "end_versions": [2],
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked writer")
def test_no_torn_file_over_200_kills(tmp_path):
    """A writer is killed 200 times at random moments; each time all that lies there is whole.

    The sidecar changes at every turn, so a document that refers to the wrong one
    would show, too.
    """
    import random

    rng = random.Random(0)
    target = tmp_path / "run.json"
    turns = set()
    begun = time.monotonic()
    build(tokens=50).write(tmp_path / "timed" / "run.json")
    # A few turns of this machine, as busy as it is: a kill has to be able to hit a later one.
    longest = max(0.02, 3 * (time.monotonic() - begun))
    for _ in range(200):
        here, there = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                write_for_ever(build(tokens=50), target, there)
            finally:
                os._exit(1)
        os.read(here, 1)
        time.sleep(rng.random() * longest)
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        os.close(here)
        os.close(there)
        assert verify_artifact(target).exact
        turns.add(json.loads(target.read_text())["notes"]["turn"])
    assert len(turns) > 1, "all kills hit one moment: the test would show little"


def test_canonical_json_is_one_form():
    assert canonical_json({"b": 1, "a": [0.1, "é"]}) == '{"a":[0.1,"é"],"b":1}'.encode()
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical_json(math.nan)


ROOT = Path(__file__).parents[2]
PUBLISHED = sorted((ROOT / "docs/gpu-results/artifacts").glob("*.tar.xz"))


@pytest.mark.parametrize("archive", PUBLISHED, ids=lambda p: p.name.partition(".")[0])
def test_what_was_published_goes_on_verifying(tmp_path, archive):
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    (path,) = tmp_path.glob("*.artifact.json")
    assert verify_artifact(path).exact
    assert f"`{json.loads(path.read_text())['digest']}`" in (ROOT / "docs/gpu.md").read_text()


def test_there_is_something_published():
    assert PUBLISHED
