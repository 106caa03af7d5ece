"""Compiled code stays with its patch set, and a process that would share it is refused."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from patchkit.engine import Adapter, Patch, install, load_evidence
from patchkit.runtime import caches, reach
from patchkit.runtime.attestation import Attestation, Process, compare_attestations

DIGEST = "0123456789abcdef" * 2
OURS = "patchkit-0123456789abcdef"


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "vllm"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "patchkit-mine"))
    for name in ("vllm.envs", "vllm.compilation.counter"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def environ(folder: Path) -> dict[str, str | None]:
    import os

    return {
        k: os.environ.get(k, "").replace(str(folder), "~") or None for k in caches.CACHE_VARIABLES
    }


def test_inside_the_users_own_folders_and_back(folders: Path) -> None:
    before = caches.key_caches(DIGEST)
    assert environ(folders) == {
        "VLLM_CACHE_ROOT": f"~/vllm/{OURS}",
        "TORCHINDUCTOR_CACHE_DIR": f"~/patchkit-mine/{OURS}",  # a user's folder keeps its name
    }
    caches.key_caches(DIGEST)
    assert environ(folders)["VLLM_CACHE_ROOT"] == f"~/vllm/{OURS}", "a worker inherits it"
    caches.restore_caches(before)
    assert environ(folders)["VLLM_CACHE_ROOT"] == "~/vllm"


def test_a_root_that_vllm_has_read_for_good_is_refused(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = types.SimpleNamespace(VLLM_CACHE_ROOT=str(folders / "vllm"))
    monkeypatch.setitem(sys.modules, "vllm.envs", read)  # type: ignore[arg-type]
    with pytest.raises(caches.SharedCacheError, match="VLLM_CACHE_ROOT: vLLM has read it") as e:
        caches.key_caches(DIGEST)
    assert str(folders / "vllm" / OURS) in str(e.value)
    assert environ(folders)["VLLM_CACHE_ROOT"] == "~/vllm", "nothing is left changed"


def worker(**environment: str) -> Attestation:
    return Attestation(
        role="worker",
        rank=0,
        pid=1,
        host="here",
        adapter="toy",
        contract_digest="c",
        manifest_digest=DIGEST,
        state="active",
        environment={"PATCHKIT_ENABLE": "1", **environment},
    )


@pytest.mark.parametrize(
    ("root", "inductor", "wrong"),
    [
        (f"/c/{OURS}", f"/i/{OURS}", []),
        (f"/c/{OURS}", f"/c/{OURS}/torch_compile_cache/x/inductor_cache", []),
        ("/c", f"/i/{OURS}", ["VLLM_CACHE_ROOT"]),
        (f"/c/{OURS}", "/i", ["TORCHINDUCTOR_CACHE_DIR"]),
        ("/c/patchkit-aaaaaaaaaaaaaaaa", "/i", ["VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR"]),
        (f"/elsewhere/{OURS}", f"/i/{OURS}", ["VLLM_CACHE_ROOT"]),
    ],
)
def test_every_worker_attests_its_folders(root: str, inductor: str, wrong: list[str]) -> None:
    found = compare_attestations(
        [worker(VLLM_CACHE_ROOT=root, TORCHINDUCTOR_CACHE_DIR=inductor)],
        [Process("worker", 0)],
        environment={"VLLM_CACHE_ROOT": "/c"} if root != "/c" else None,
    )
    assert [v.problem.split()[0] for v in found] == wrong
    assert all("worker 0 (pid 1" in v.subject for v in found)


# -- what was traced counts where the artefact is loaded ------------------------------


@pytest.fixture
def artefact(folders: Path, monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A vLLM that says what it saved and loaded, and where its artefact lies."""
    caches.key_caches(DIGEST)
    folder = folders / "vllm" / OURS / "torch_compile_cache" / "model"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor_cache"))
    counter = types.SimpleNamespace(num_aot_artifacts_saved=0, num_aot_artifacts_loaded=0)
    module = types.SimpleNamespace(compilation_counter=counter)
    monkeypatch.setitem(sys.modules, "vllm.compilation.counter", module)  # type: ignore[arg-type]
    counter.folder = folder
    return counter


class Run:
    """A counted run of an installation: what its canary would tell."""

    def __init__(self, hits: dict[str, int], traced: dict[str, int]) -> None:
        self.hits, self.traced = hits, traced
        self.manifest = types.SimpleNamespace(digest=DIGEST)

    def canary(self, *, watch_calls: bool) -> Run:
        return self

    def __enter__(self) -> None: ...
    def stop(self) -> None: ...


def count(hits: dict[str, int], traced: dict[str, int]) -> dict[str, int]:
    reach.start_canary(Run(hits, traced))
    try:
        return reach.end_canary()
    finally:
        assert reach.end_canary() is not None
        reach._canary = None


def test_only_what_was_traced_is_kept_and_only_a_loaded_artefact_asks_for_it(artefact) -> None:
    cold = {"m:compiled": 5, "m:eager": 2}
    assert count(cold, {"m:compiled": 5}) == cold
    assert not artefact.folder.exists(), "nothing was compiled, so there is nothing to keep"
    artefact.num_aot_artifacts_saved = 1
    assert count(cold, {"m:compiled": 5}) == cold
    assert load_evidence(artefact.folder, DIGEST) == {"m:compiled": 5}

    artefact.num_aot_artifacts_saved = 0
    assert count({"m:compiled": 0, "m:eager": 0}, {}) == {"m:compiled": 0, "m:eager": 0}
    assert reach.evident() == (), "an eager run does not live on what a compiled one has traced"

    artefact.num_aot_artifacts_loaded = 1
    warm = count({"m:compiled": 0, "m:eager": 0}, {})
    assert warm == {"m:compiled": 5, "m:eager": 0}
    assert reach.evident() == ("m:compiled",)


def test_without_an_artefact_of_vllms_there_is_no_evidence(artefact, monkeypatch) -> None:
    artefact.num_aot_artifacts_saved = artefact.num_aot_artifacts_loaded = 1
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(artefact.folder.parents[3] / "elsewhere"))
    assert caches.artefact_folder() is None
    assert count({"m:f": 0}, {"m:f": 3}) == {"m:f": 0}


@pytest.mark.stack
def test_a_trace_is_told_from_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "traced_toy.py").write_text(
        "def f(x): return x + 1\ndef g(x): return x + 2\ndef ours(x): return x + 10\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    import traced_toy  # type: ignore[import-not-found]

    words = {"reason": "a test", "consequence": "none", "until": "never", "action": "replace"}
    patches = (
        Patch(symbol="traced_toy:f", replacement="traced_toy:ours", **words),
        Patch(symbol="traced_toy:g", replacement="traced_toy:ours", **words),
    )
    with install(Adapter(name="traced_toy", rollout=patches), "rollout") as inst:
        compiled = torch.compile(lambda x: traced_toy.f(x), backend="eager", fullgraph=True)
        with inst.canary() as canary:
            assert compiled(torch.zeros(1)).item() == 10
            compiled(torch.zeros(1))
            assert traced_toy.g(torch.zeros(1)).item() == 10
        assert canary.hits == {"traced_toy:f": 1, "traced_toy:g": 1}
        assert canary.traced == {"traced_toy:f": 1}
