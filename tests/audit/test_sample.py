"""The sample project: every patch found, nothing else, every verdict right."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from audit_sample import EXPECTED, NEEDS_CODE

from patchkit.audit import Report, audit

HERE = Path(__file__).parent
OLD, NEW = "vllm 0.26.0", "vllm 0.32.0"


def check(report: Report, *, with_code: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Compare a report with what was checked by hand, and print precision and recall."""
    found = {(f.target, f.key): f for f in report.findings}
    expected = {(target, key): row for target, key, *row in EXPECTED}
    right = found.keys() & expected.keys()
    precision = len(right) / len(found)
    recall = len(right) / len(expected)
    wrong = []
    judged = 0
    for key in sorted(right, key=str):
        action, at_old, at_new, place = expected[key]
        finding = found[key]
        verdicts = {v.version: v for v in finding.verdicts}
        if finding.action != action:
            wrong.append(f"{key}: {finding.action}, expected {action}")
        if key[0] in NEEDS_CODE and not with_code:
            continue
        for label, kind in ((OLD, at_old), (NEW, at_new)):
            if kind is None:
                continue
            judged += 1
            verdict = verdicts[label]
            if verdict.kind.value != kind:
                wrong.append(f"{key} at {label}: {verdict.kind}, expected {kind}: {verdict.text}")
        if place is not None and verdicts[NEW].new_symbol != place:
            wrong.append(f"{key}: now {verdicts[NEW].new_symbol}, expected {place}")
    with capsys.disabled():
        print(
            f"\naudit sample: {len(found)} found of {len(expected)}, precision {precision:.2f}, "
            f"recall {recall:.2f}, {judged - len(wrong)} of {judged} verdicts right"
        )
    assert sorted(map(str, found.keys() - expected.keys())) == []
    assert sorted(map(str, expected.keys() - found.keys())) == []
    assert wrong == []
    assert len(expected) >= 40


def test_sample_against_facts(capsys: pytest.CaptureFixture[str]) -> None:
    report = audit(
        HERE / "sample",
        old=str(HERE / "facts" / "vllm-0.26.0"),
        new=str(HERE / "facts" / "vllm-0.32.0"),
    )
    check(report, with_code=False, capsys=capsys)
    assert report.skipped_tests == 1
    assert report.blind_spots == ()
    by_target = {f.target: f for f in report.findings}
    # Through the plugin, through Ray's hook, or not at all.
    plugin = by_target["vllm.v1.engine.async_llm:AsyncLLM.pause_generation"].workers
    assert plugin == ("vllm.general_plugins: rl_stack = rl_stack.plugin:register",)
    hook = by_target["vllm/v1/executor/ray_executor.py"].workers
    assert hook == ("worker_process_setup_hook: rl_stack.driver:setup_worker",)
    # Ray imports the hook's module in each worker: what stands at its top runs there, too.
    assert by_target["vllm.plugins:load_general_plugins"].workers == hook
    assert by_target["vllm.model_executor.layers.linear:ReplicatedLinear"].workers == ()
    # A name that is rebound in one module is kept by those that imported it before.
    aliases = {
        v.version: v.alias_sites for v in by_target["vllm.plugins:load_general_plugins"].verdicts
    }
    assert "vllm.engine.arg_utils:load_general_plugins" in aliases[OLD]
    # A method is not rebound: whoever has the class sees it.
    method = by_target["vllm.v1.engine.async_llm:AsyncLLM.collective_rpc"]
    assert all(v.alias_sites == () for v in method.verdicts)
    assert by_target["vllm.v1.worker.gpu.sample.sampler:Sampler.__call__"].versions == ">=0.30"
    pause = next(
        v
        for v in by_target["vllm.v1.engine.async_llm:AsyncLLM.pause_generation"].verdicts
        if v.version == NEW
    )
    assert pause.parameter == "wait_for_inflight_requests"


@pytest.mark.nightly
def test_sample_against_wheels(capsys: pytest.CaptureFixture[str]) -> None:
    """The same against the releases themselves; PATCHKIT_WHEELS names a folder with both."""
    folder = os.environ.get("PATCHKIT_WHEELS")
    if not folder:
        pytest.skip("PATCHKIT_WHEELS is not set")
    wheels = {
        version: next(p for p in sorted(Path(folder).glob(f"vllm*-{version}-*.whl")))
        for version in ("0.26.0", "0.32.0")
    }
    report = audit(HERE / "sample", old=str(wheels["0.26.0"]), new=str(wheels["0.32.0"]))
    check(report, with_code=True, capsys=capsys)
