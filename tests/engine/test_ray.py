"""Ray workers: each installs by itself; pickling carries references and never a patch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from patchkit.engine import install
from patchkit.engine.errors import ProcessBoundError

ROOT = Path(__file__).parents[2]

UPSTREAM = """
def greet(): return "stock"
class Greeter:
    def greet(self): return "stock"
"""
OURS = """
from patchkit.engine import Adapter, Patch
words = dict(reason="a test", consequence="none", until="never")
adapter = Adapter(name="ray_toy", rollout=(
    Patch(symbol="ray_upstream:greet", action="replace", replacement="ray_ours:greet", **words),
    Patch(symbol="ray_upstream:Greeter.greet", action="replace",
          replacement="ray_ours:method", **words),
))
def greet(): return "patched"
def method(self): return "patched"
"""
# Imported by the actors' processes by name, as a run's own modules are.
ACTOR = """
import os
class Worker:
    def __init__(self):
        self.installation = None
        if os.environ.get("PATCHKIT_ENABLE") == "1":
            from patchkit.engine import install
            self.installation = install(os.environ["PATCHKIT_ADAPTER"], "rollout")
    def digest(self):
        return self.installation.manifest.digest if self.installation else None
    def call(self, thing):
        return thing()
    def of_what(self, greeter):
        import ray_upstream
        return type(greeter) is ray_upstream.Greeter, greeter.greet()
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    info = tmp_path / "ray_toy-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ray-toy\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[patchkit.adapters]\nray_toy = ray_ours:adapter\n")
    for name, text in (("ray_upstream", UPSTREAM), ("ray_ours", OURS), ("ray_actor", ACTOR)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=80_000_000,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        yield ray
    finally:
        ray.shutdown()


def test_actors_install_by_themselves_and_patches_do_not_travel(cluster: Any) -> None:
    import ray_actor  # type: ignore[import-not-found]
    import ray_upstream  # type: ignore[import-not-found]

    from patchkit.runtime.environment import Environment

    ray = cluster
    environment = Environment({"PATCHKIT_ENABLE": "1", "PATCHKIT_ADAPTER": "ray_toy"})
    remote = ray.remote(ray_actor.Worker)
    with install("ray_toy", "rollout") as inst:
        assert ray_upstream.greet() == "patched"
        given = remote.options(num_cpus=0, runtime_env=environment.ray_runtime_env()).remote()
        without = remote.options(num_cpus=0).remote()
        pairs = [(w.digest.remote(), w.call.remote(ray_upstream.greet)) for w in (given, without)]
        pairs += [(w.of_what.remote(ray_upstream.Greeter()),) for w in (given, without)]
        answers = [tuple(ray.get(list(pair), timeout=60)) for pair in pairs]
        assert answers[0] == (inst.manifest.digest, "patched")
        assert answers[1] == (None, "stock"), "a function travels by reference, its patch does not"
        assert answers[2] == ((True, "patched"),), "so does a class"
        assert answers[3] == ((True, "stock"),)
        with pytest.raises(ProcessBoundError, match="ray_toy"):
            ray.put(inst)
    # Undone here, installed there: what the actor does is its own process's matter.
    assert ray_upstream.greet() == "stock"
    assert ray.get(given.call.remote(ray_upstream.greet), timeout=60) == "patched"
