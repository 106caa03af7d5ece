"""A process that ends, and one that is stuck, are noticed while something waits for them."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from evidence import attestation

from patchkit.errors import ConfigurationError
from patchkit.runtime.liveness import EngineLostError, EngineWatch, WatchedEngine
from patchkit.runtime.state import EnginePoisonedError, EngineState


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    made = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield made
    made.kill()
    made.wait()


def watch(process: subprocess.Popen[bytes], **bounds: float) -> EngineWatch:
    bounds = {"interval_s": 0.02, "grace_s": 0.1, **bounds}
    return EngineWatch([("worker 3", process.pid)], **bounds)


def test_an_answer_comes_through(process):
    seen = watch(process)
    assert seen.watching
    assert seen.call("add", lambda a, b: a + b, 1, b=2) == 3
    with pytest.raises(KeyError, match="its own"):
        seen.call("fail", lambda: {}["its own"])


def test_a_killed_process_ends_the_wait_and_is_named(process):
    seen = watch(process)
    threading.Timer(0.1, process.kill).start()
    begun = time.monotonic()
    with pytest.raises(EngineLostError) as e:
        seen.call("generate", threading.Event().wait)
    assert time.monotonic() - begun < 5
    assert e.value.lost == (f"worker 3 (pid {process.pid})",)
    assert "generate: the engine is lost" in str(e.value)
    # Nobody has collected its exit code yet; a dead child is dead all the same.
    with pytest.raises(EngineLostError):
        seen.call("again", lambda: 1)
    again = pickle.loads(pickle.dumps(e.value))
    assert (str(again), again.lost) == (str(e.value), e.value.lost)


def test_an_error_that_follows_from_the_loss_is_told_as_the_loss(process):
    seen = watch(process)

    def dies_under_it() -> None:
        process.kill()
        process.wait()
        raise RuntimeError("EngineCore encountered an issue")

    with pytest.raises(EngineLostError) as e:
        seen.call("update_weights", dies_under_it)
    assert isinstance(e.value.__cause__, RuntimeError)


def test_a_stuck_process_is_bounded_by_the_clock(process):
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(EngineLostError, match="every process is there, but none answered"):
        watch(process).call("generate", threading.Event().wait, bound_s=0.2)


def test_an_engine_in_this_process_is_called_directly():
    seen = EngineWatch([("worker 0", os.getpid())])
    assert not seen.watching
    assert seen.call("who", threading.current_thread) is threading.current_thread()


def test_a_process_that_had_gone_before_is_lost(process):
    process.kill()
    process.wait()
    assert watch(process).lost() == (f"worker 3 (pid {process.pid})",)


def test_engine_processes_of_this_host_are_found_by_what_they_attested(process):
    here = socket.gethostname()
    found = EngineWatch.of(
        [
            attestation(role="engine-core", rank=0, pid=process.pid, host=here),
            attestation(role="trainer", rank=0, pid=1, host=here),
            attestation(role="worker", rank=1, pid=1, host="elsewhere"),
        ],
        interval_s=0.02,
        grace_s=0.0,
    )
    process.kill()
    process.wait()
    assert found.lost() == (f"engine-core 0 (pid {process.pid})",)


def test_a_lost_engine_is_poisoned(process):
    class Engine:
        version = "a value, not a method"

        def generate(self) -> None:
            process.kill()
            threading.Event().wait()

    state = EngineState(version=4)
    engine = WatchedEngine(Engine(), watch(process), state)
    assert engine.version == "a value, not a method"
    assert not hasattr(engine, "update_weight_version")
    with pytest.raises(EngineLostError):
        engine.generate()
    with pytest.raises(EnginePoisonedError, match="worker 3") as e:
        state.require_usable("sample")
    assert "update to policy version" not in str(e.value)


@pytest.mark.parametrize("wrong", [{"interval_s": 0.0}, {"grace_s": -1.0}])
def test_times_that_make_no_sense(wrong):
    with pytest.raises(ConfigurationError):
        EngineWatch((), **wrong)
