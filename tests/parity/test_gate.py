"""All ranks pass together or raise together, in real gloo processes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))

from ranks import die, run_ranks  # noqa: E402

from patchkit.errors import ConfigurationError  # noqa: E402
from patchkit.parity import gate as gate_module  # noqa: E402
from patchkit.parity.gate import (  # noqa: E402
    GateClosedError,
    ParityError,
    ParityGate,
    RankLostError,
)
from patchkit.parity.oracle import SelectedLogprobs  # noqa: E402

pytestmark = pytest.mark.stack


def tokens(*values: float) -> SelectedLogprobs:
    n = len(values)
    return SelectedLogprobs(
        logprobs=torch.tensor(values, dtype=torch.float32),
        sequences=torch.zeros(n, dtype=torch.int64),
        positions=torch.arange(10, 10 + n),
        token_ids=torch.arange(n),
    )


def fill(step, *, bad: bool = False, skip: bool = False, empty: bool = False, version: int = 1):
    step.start_versions = step.end_versions = version
    step.rollout = tokens() if empty else tokens(-1.0, -2.0)
    step.recompute = None if skip else tokens() if empty else tokens(-1.0, -2.5 if bad else -2.0)
    step.first_forward = tokens() if empty else tokens(-1.0, -2.0)


def scenario(rank: int, what: str) -> dict:
    """One passage in which rank 1 (of 0, 1, 2) is special; then a good one, where possible."""
    gate = ParityGate(timeout_s=3.0, grace_s=1.0)
    special = rank == 1
    backward = False
    raised = None
    begun = time.monotonic()
    try:
        with gate.step(version=2 if special and what == "version" else 1) as step:
            if special and what == "die":
                die()
            if what == "die in a collective":
                torch.distributed.barrier()
                if special:
                    die()
                torch.distributed.all_reduce(torch.ones(1))
            if special and what == "stuck":
                time.sleep(8)
            if special and what == "exception":
                raise RuntimeError("out of memory, say")
            if special and what == "exit":
                raise SystemExit("asked to stop")
            fill(
                step,
                bad=special and what == "mismatch",
                skip=special and what == "skip",
                empty=what == "nothing" or (special and what == "empty-rank"),
                version=0 if special and what == "stale" else step.version,
            )
        backward = True
    except BaseException as e:
        raised = e
    seconds = time.monotonic() - begun
    again = None
    if what not in ("exit",):
        try:
            with gate.step(version=1) as step:
                fill(step)
            again = step.report.recompute.token_count
        except Exception as e:
            again = type(e).__name__
    return {
        "backward": backward,
        "raised": type(raised).__name__,
        "text": str(raised),
        "cause": type(raised.__cause__).__name__ if raised else None,
        "again": again,
        "seconds": seconds,
        "bound": gate.bound_s,
        "missing": list(getattr(raised, "missing", ())),
    }


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("mismatch", ["rank 1: rollout and recompute", "position 11", "0xc0200000"]),
        ("skip", ["rank 1: recompute", "it was skipped on this rank"]),
        ("exception", ["rank 1: this step", "RuntimeError", "out of memory, say"]),
        ("stale", ["rank 1: policy version at the rollout's start", "sequence 0: version 0"]),
        ("version", ["policy version of the ranks", "rank 0: 1, rank 1: 2, rank 2: 1"]),
        ("nothing", ["all ranks", "no token was compared"]),
    ],
)
def test_one_rank_takes_all_out_together(tmp_path, what, words):
    outcomes = run_ranks(3, tmp_path, scenario, what)
    for outcome in outcomes:
        value = outcome["value"]
        assert value["raised"] == "ParityError", value
        assert not value["backward"]
        assert all(w in value["text"] for w in words), value["text"]
        assert value["again"] == 6, "the gate works for the next step"
    if what == "exception":
        assert [o["value"]["cause"] for o in outcomes] == ["NoneType", "RuntimeError", "NoneType"]


@pytest.mark.parametrize(("what", "count"), [("good", 6), ("empty-rank", 4)])
def test_all_pass_together(tmp_path, what, count):
    for outcome in run_ranks(3, tmp_path, scenario, what):
        assert outcome["value"]["backward"], outcome["value"]["text"]


@pytest.mark.parametrize("what", ["die", "die in a collective", "stuck"])
def test_a_lost_rank_is_named_within_the_bound(tmp_path, what):
    outcomes = run_ranks(3, tmp_path, scenario, what, within_s=40)
    survivors = [outcomes[0], outcomes[2]]
    assert (outcomes[1] is None) == what.startswith("die")
    for outcome in survivors:
        value = outcome["value"]
        assert value["raised"] == "RankLostError", value
        assert value["missing"] == [1]
        assert "rank(s) 1 did not arrive" in value["text"]
        assert value["seconds"] < value["bound"] + 0.5
        assert value["again"] == "GateClosedError"
    if what == "stuck":
        assert outcomes[1]["value"]["raised"] == "RankLostError", "it learns when it arrives"


def test_a_rank_that_is_asked_to_stop_tells_the_others(tmp_path):
    outcomes = run_ranks(2, tmp_path, scenario, "exit")
    assert outcomes[0]["value"]["raised"] == "ParityError"
    assert "SystemExit" in outcomes[0]["value"]["text"]
    assert outcomes[1]["value"]["raised"] == "SystemExit"


def two_gates(rank: int) -> list[int]:
    gates = [ParityGate(timeout_s=5), ParityGate(timeout_s=5)]
    counts = []
    for gate in (*gates, *reversed(gates)):
        with gate.step(version=1) as step:
            fill(step)
        counts.append(step.report.recompute.token_count)
    return counts


def test_two_gates_do_not_disturb_each_other(tmp_path):
    assert [o["value"] for o in run_ranks(2, tmp_path, two_gates)] == [[4] * 4] * 2


def many_violations(rank: int) -> str:
    from patchkit.errors import Violation

    gate = ParityGate(timeout_s=5)
    try:
        gate.agree(
            [Violation(subject=f"s{i}", problem="p" * 5000) for i in range(20 * (rank + 1))],
        )
    except ParityError as e:
        return str(e)
    return "passed"


def test_a_flood_of_violations_is_cut_and_says_so(tmp_path):
    for outcome in run_ranks(2, tmp_path, many_violations):
        text = outcome["value"]
        assert len(text) < 60_000
        assert "rank 0: s0" in text
        assert "more violations, not sent" in text


def test_one_process_needs_no_group():
    gate = ParityGate()
    with gate.step(version=1) as step:
        fill(step)
    assert step.report.recompute.exact
    with pytest.raises(ParityError, match="skipped"), gate.step(version=1) as step:
        fill(step, skip=True)


def test_a_gate_from_before_the_group_is_refused(monkeypatch):
    """It would let one rank run backward while another raises."""
    gate = ParityGate()
    monkeypatch.setattr(gate_module, "_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ConfigurationError, match="built before"), gate.step(version=1) as step:
        fill(step)


def test_versions_must_be_given():
    gate = ParityGate()
    with pytest.raises(ParityError, match="not given"), gate.step(version=1) as step:
        fill(step)
        step.start_versions = None


def test_metrics_speak_for_themselves():
    """Whoever meets the others by hand cannot leave out what the oracle found."""
    with pytest.raises(ParityError) as e, ParityGate().step(version=1) as step:
        fill(step, bad=True)
    with pytest.raises(ParityError) as again:
        ParityGate().agree([], oracle=step.oracle, version=1)
    assert again.value.violations == e.value.violations
    with pytest.raises(ParityError) as once:
        ParityGate().agree(step.oracle.violations, oracle=step.oracle, version=1)
    assert once.value.violations == e.value.violations


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan")])
def test_a_gate_without_a_bound_is_refused(timeout):
    with pytest.raises(ConfigurationError, match="bound"):
        ParityGate(timeout_s=timeout)


def test_errors_travel_to_the_driver():
    import pickle

    with pytest.raises(ParityError) as e, ParityGate().step(version=1) as step:
        fill(step, bad=True)
    for error in (e.value, RankLostError([1], 5.0, "gone", 0), GateClosedError()):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert str(again) == str(error)
    assert pickle.loads(pickle.dumps(e.value)).report == e.value.report


def test_a_closed_gate_says_how_to_go_on():
    assert "Restart the process group" in str(GateClosedError())
