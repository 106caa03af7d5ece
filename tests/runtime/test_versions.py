"""Versions per token, lag, and a barrier between requests and updates."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from types import SimpleNamespace

import pytest

from patchkit.errors import ConfigurationError
from patchkit.runtime.versions import (
    BarrierTimeoutError,
    Span,
    TrajectoryRefusedError,
    UpdateBarrier,
    lag_report,
    output_spans,
    require_on_policy,
)


def output(tokens: int, *spans):
    given = [SimpleNamespace(version=v, start=a, end=b) for v, a, b in spans] or None
    return SimpleNamespace(token_ids=[0] * tokens, weight_versions=given)


def test_what_the_engine_says():
    assert output_spans(output(5, ("1", 0, 3), ("2", 3, 5))) == (Span(1, 0, 3), Span(2, 3, 5))
    assert output_spans(output(0)) == ()


@pytest.mark.parametrize(
    "given",
    [
        output(3),
        output(3, ("default", 0, 3)),
        output(3, ("1", 0, 2)),
        output(3, ("1", 1, 3)),
        output(3, ("1", 0, 2), ("2", 1, 3)),
        SimpleNamespace(token_ids=[1]),
    ],
)
def test_an_engine_that_does_not_say(given):
    with pytest.raises(TrajectoryRefusedError, match="no policy version for every token"):
        output_spans(given)


def test_on_policy_sequences():
    assert require_on_policy([[Span(3, 0, 2)], [Span(3, 0, 9)]], 3) == ([3, 3], [3, 3])


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([Span(2, 0, 4)], "sequence 1: is stale"),
        ([Span(4, 0, 4)], "sequence 1: is ahead of the trainer"),
        ([Span(2, 0, 1), Span(3, 1, 4)], "tokens 0 to 1: version 2, tokens 1 to 4: version 3"),
        ([], "sequence 1: has no tokens"),
    ],
)
def test_others_are_refused_by_number(spans, words):
    with pytest.raises(TrajectoryRefusedError, match=words):
        require_on_policy([[Span(3, 0, 2)], spans], 3)


def test_lag_is_counted_by_token():
    report = lag_report([[Span(3, 0, 2), Span(5, 2, 10)], [Span(5, 0, 10)]], 5)
    assert report.histogram == {2: 2, 0: 18}
    assert (report.tokens, report.largest, report.mixed) == (20, 2, 1)
    assert report.mean == pytest.approx(0.2)
    assert not report.on_policy
    assert lag_report([[Span(5, 0, 3)]], 5).on_policy
    assert not lag_report([], 5).on_policy
    assert not lag_report([[Span(6, 0, 3)]], 5).on_policy


# -- the barrier --------------------------------------------------------------------------


def hold(barrier: UpdateBarrier, release: threading.Event) -> threading.Thread:
    inside = threading.Event()

    def run() -> None:
        with barrier.request():
            inside.set()
            release.wait(10)

    thread = threading.Thread(target=run)
    thread.start()
    assert inside.wait(5)
    return thread


def test_an_update_waits_and_requests_wait_for_it():
    barrier = UpdateBarrier(timeout_s=5)
    release = threading.Event()
    thread = hold(barrier, release)
    events: list[str] = []

    def update() -> None:
        with barrier.update():
            events.append("update begins")
            time.sleep(0.1)
            events.append("update ends")

    def late() -> None:
        with barrier.request():
            events.append("late request")

    updater = threading.Thread(target=update)
    updater.start()
    time.sleep(0.05)
    latecomer = threading.Thread(target=late)
    latecomer.start()
    time.sleep(0.05)
    assert events == []
    release.set()
    for t in (thread, updater, latecomer):
        t.join(5)
    assert events == ["update begins", "update ends", "late request"]
    assert barrier.running == 0


def test_what_does_not_end_stops_the_update_and_nothing_else():
    barrier = UpdateBarrier(timeout_s=0.1)
    release = threading.Event()
    thread = hold(barrier, release)
    begun = time.monotonic()
    with pytest.raises(BarrierTimeoutError, match=r"1 request\(s\) still run"), barrier.update():
        pytest.fail("the update must not run")
    assert time.monotonic() - begun < 2
    with barrier.request():
        pass
    release.set()
    thread.join(5)
    with barrier.update():
        pass


def test_requests_can_be_cancelled():
    release = threading.Event()
    barrier = UpdateBarrier(timeout_s=0.05, cancel=release.set)
    thread = hold(barrier, release)
    with barrier.update():
        assert barrier.running == 0
    thread.join(5)


def test_a_cancel_that_does_nothing_is_told():
    barrier = UpdateBarrier(timeout_s=0.05, cancel=lambda: None, grace_s=0.05)
    release = threading.Event()
    thread = hold(barrier, release)
    with pytest.raises(BarrierTimeoutError, match="were cancelled, but did not end"):
        with barrier.update():
            pass
    release.set()
    thread.join(5)


def test_a_failed_update_lets_requests_start_again():
    barrier = UpdateBarrier(timeout_s=1)
    with pytest.raises(RuntimeError, match="broke"), barrier.update():
        raise RuntimeError("broke")
    with barrier.request():
        assert barrier.running == 1


def test_two_updates_take_turns():
    barrier = UpdateBarrier(timeout_s=5)
    inside, most = 0, 0
    lock = threading.Lock()

    def update() -> None:
        nonlocal inside, most
        with barrier.update():
            with lock:
                inside += 1
                most = max(most, inside)
            time.sleep(0.01)
            with lock:
                inside -= 1

    threads = [threading.Thread(target=update) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(5)
    assert most == 1


def test_coroutines():
    async def main() -> list[str]:
        barrier = UpdateBarrier(timeout_s=5)
        events: list[str] = []

        async def request(name: str, seconds: float) -> None:
            async with barrier.arequest():
                await asyncio.sleep(seconds)
                events.append(name)

        async def update() -> None:
            await asyncio.sleep(0.02)
            async with barrier.aupdate():
                events.append("update")
                await asyncio.sleep(0.02)

        async def late() -> None:
            await asyncio.sleep(0.04)
            await request("late", 0)

        await asyncio.gather(request("early", 0.1), update(), late())
        return events

    assert asyncio.run(main()) == ["early", "update", "late"]


@pytest.mark.parametrize("kwargs", [{"timeout_s": -1}, {"timeout_s": float("inf")}])
def test_a_barrier_without_a_bound_is_refused(kwargs):
    with pytest.raises(ConfigurationError):
        UpdateBarrier(**kwargs)


def test_the_error_travels():
    error = BarrierTimeoutError(2, 1.5, True)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
