"""Missing, different and extra processes are each named."""

from __future__ import annotations

import dataclasses
import json
import threading
import time

import pytest

from patchkit.runtime.attestation import (
    Attestation,
    AttestationError,
    Process,
    attest,
    collect_attestations,
    compare_attestations,
    read_attestations,
    rollout_processes,
    trainer_processes,
    write_attestation,
)

EXPECTED = rollout_processes(tensor_parallel=2, data_parallel=2)


def made(rank: int, **changes) -> Attestation:
    base = Attestation(
        role="worker",
        rank=rank,
        pid=100 + rank,
        host="here",
        adapter="toy",
        contract_digest="c",
        manifest_digest="m",
        state="active",
        environment={"OMP_NUM_THREADS": "1"},
    )
    return dataclasses.replace(base, **changes)


def fill(folder, **by_rank) -> None:
    for rank in range(4):
        for a in by_rank.get(f"r{rank}", [made(rank)]):
            write_attestation(folder, a)


def collect(folder, **kwargs):
    return collect_attestations(
        folder, EXPECTED, contract_digest="c", environment={"OMP_NUM_THREADS": "1"}, **kwargs
    )


def test_all_as_expected(tmp_path):
    fill(tmp_path)
    write_attestation(tmp_path, made(0, role="driver", manifest_digest="other", state="broken"))
    # The front end's modules are never imported in a worker: nothing there can run unpatched.
    write_attestation(tmp_path, made(3, state="pending"))
    assert [a.rank for a in collect(tmp_path)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("by_rank", "words"),
    [
        ({"r2": []}, ["worker 2: did not attest", "VLLM_PLUGINS"]),
        ({"r1": [made(1, manifest_digest="x")]}, ["worker 1 (pid 101", "manifest differs"]),
        ({"r1": [made(1, contract_digest="x")]}, ["worker 1 (pid 101", "another contract"]),
        ({"r1": [made(1, contract_digest="")]}, ["another contract", "found:    none"]),
        ({"r3": [made(3, state="broken")]}, ["worker 3", "not active", "broken"]),
        ({"r3": [made(3, state="undone")]}, ["worker 3", "not active", "undone"]),
        ({"r3": [made(3, state="absent", manifest_digest="")]}, ["worker 3", "absent"]),
        ({"r0": [made(0), made(7)]}, ["worker 7 (pid 107", "nobody expected it"]),
        ({"r0": [made(0), made(0, pid=5)]}, ["worker 0 (pid 5", "more than once"]),
        (
            {"r2": [dataclasses.replace(made(2), rank=-1)]},
            ["worker 2: did not attest", "of unknown rank"],
        ),
        ({"r2": [made(2, environment={})]}, ["worker 2", "OMP_NUM_THREADS", "not set"]),
        (
            {"r2": [made(2, environment={"OMP_NUM_THREADS": "4"})]},
            ["another value of OMP_NUM_THREADS", "found:    4"],
        ),
    ],
)
def test_each_difference_is_named(tmp_path, by_rank, words):
    fill(tmp_path, **by_rank)
    with pytest.raises(AttestationError) as e:
        collect(tmp_path)
    assert all(w in str(e.value) for w in words), str(e.value)


@pytest.mark.parametrize("name", ["adapter", "profile"])
def test_what_an_earlier_contract_installed_is_not_the_later_ones(tmp_path, name):
    asked = {
        "OMP_NUM_THREADS": "1",
        "PATCHKIT_ADAPTER": "toy",
        "PATCHKIT_PROFILE": "exact",
    }
    good = {"adapter": "toy", "profile": "exact"}
    fill(tmp_path, r1=[made(1, environment=asked, manifest=good)])
    assert collect(tmp_path)
    fill(tmp_path, r1=[made(1, environment=asked, manifest={**good, name: "earlier"})])
    with pytest.raises(AttestationError, match=f"worker 1(?s:.)*another {name} installed"):
        collect(tmp_path)


def test_packages_of_another_version_are_named(tmp_path):
    """On another machine, where the patched code may be the same, and the kernels are not."""
    given = {"OMP_NUM_THREADS": "1", "PATCHKIT_PACKAGES": '{"torch": "2.13.0", "vllm": "0.32.0"}'}
    fill(tmp_path, r1=[made(1, environment=given, packages={"torch": "2.13.0"})])
    assert collect(tmp_path)
    fill(tmp_path, r1=[made(1, environment=given, packages={"torch": "2.14.0"})])
    with pytest.raises(AttestationError, match=r"worker 1(?s:.)*another torch(?s:.)*2\.14\.0"):
        collect(tmp_path)
    other = made(0, role="trainer", environment=given, packages={"vllm": "0.31.0"})
    assert compare_attestations([other], trainer_processes(1)) == [], "a trainer may have another"


def test_nobody_at_all_names_all(tmp_path):
    with pytest.raises(AttestationError) as e:
        collect(tmp_path / "never")
    assert len(e.value.violations) == 4


def test_contracts_are_compared_among_each_other_too(tmp_path):
    fill(tmp_path, r3=[made(3, contract_digest="x")])
    with pytest.raises(AttestationError, match=r"worker 3.*contract differs"):
        collect_attestations(tmp_path, EXPECTED)


def test_waits_for_late_ones_but_not_longer(tmp_path):
    fill(tmp_path, r1=[])
    late = threading.Timer(0.3, write_attestation, (tmp_path, made(1)))
    late.start()
    assert len(collect(tmp_path, timeout_s=5)) == 4
    late.join()
    begun = time.monotonic()
    with pytest.raises(AttestationError):
        collect_attestations(tmp_path, [Process("worker", 9)], timeout_s=0.3)
    assert 0.3 <= time.monotonic() - begun < 1.5


def test_a_rank_learnt_later_replaces_the_file(tmp_path):
    write_attestation(tmp_path, dataclasses.replace(made(1), rank=-1))
    write_attestation(tmp_path, made(1))
    assert [p.name for p in tmp_path.iterdir()] == ["worker-1-101.json"]


@pytest.mark.parametrize("text", ["{", '{"schema": 99}', "[]", '{"schema": 1}'])
def test_an_unreadable_file_is_refused(tmp_path, text):
    (tmp_path / "worker-0-1.json").write_text(text)
    with pytest.raises(AttestationError, match=r"worker-0-1\.json"):
        read_attestations(tmp_path)


def test_a_process_without_an_installation_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATCHKIT_RUN_DIR", str(tmp_path))
    assert attest(role="worker", rank=0)["state"] == "absent"
    assert json.loads(next(tmp_path.iterdir()).read_text())["state"] == "absent"


def test_trainer_ranks_attest_like_workers(tmp_path):
    for rank in range(2):
        write_attestation(tmp_path, made(rank, role="trainer"))
    assert len(collect_attestations(tmp_path, trainer_processes(2))) == 2
    with pytest.raises(AttestationError, match="trainer 2: did not attest"):
        collect_attestations(tmp_path, trainer_processes(3))


def test_a_damaged_installation_does_not_attest(tmp_path, monkeypatch):
    class Damaged:
        def verify(self):
            raise RuntimeError("a slot holds something else")

    monkeypatch.setenv("PATCHKIT_RUN_DIR", str(tmp_path))
    with pytest.raises(RuntimeError, match="something else"):
        attest(role="worker", rank=0, installation=Damaged())
    assert list(tmp_path.iterdir()) == []
