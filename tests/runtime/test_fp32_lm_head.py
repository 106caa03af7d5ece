"""A float32 output layer: what vLLM's option gives, and what the adapter adds to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from patchkit.engine import find_adapter
from patchkit_adapters.fp32_lm_head import PIPELINERL, adapter

pytestmark = pytest.mark.stack

HERE = Path(__file__).parent
HIDDEN, VOCABULARY, ROWS = 256, 300, 257


def test_it_is_found_by_its_name_and_alone():
    assert find_adapter("fp32_lm_head") is adapter
    assert adapter.trainer == ()
    assert adapter.profile_names == (PIPELINERL,)
    outside = [p.symbol for p in adapter.rollout if not p.profiles]
    assert {s.rpartition(":")[2] for s in outside} == {
        "LogitsProcessor._apply_head",
        "LogitsProcessor._get_logits",
    }


def plain_method() -> Any:
    return type("UnquantizedEmbeddingMethod", (), {})()


def operands() -> tuple[Any, Any]:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    return torch.randn(ROWS, HIDDEN).bfloat16(), torch.randn(VOCABULARY, HIDDEN).bfloat16()


def rows_of(run: Any) -> Any:
    from patchkit.parity.conformance import RowOperator, examine

    x, weight = operands()
    return examine(
        RowOperator(name="lm_head, float32", run=run, inputs={"x": x}, weights={"weight": weight})
    )


def test_the_option_of_vllm_is_not_batch_invariant_on_a_cpu():
    """The reason for the patch. When this fails, the patch has lost it: delete it."""
    pytest.importorskip("vllm")
    code = f"""
import sys; sys.path.insert(0, {str(HERE)!r})
import torch
from types import SimpleNamespace as N
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from test_fp32_lm_head import rows_of
def option(x, weight):
    head = N(quant_method=UnquantizedEmbeddingMethod(), weight=weight)
    return LogitsProcessor._apply_head(N(head_dtype=torch.float32), head, x, None)
report = rows_of(option)
print("RESULT", sorted({{f.check for f in report.findings}} & {{"batch size", "alone", "splits"}}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    assert "RESULT ['alone', 'batch size', 'splits']" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("which", ["apply_head", "get_logits"])
def test_the_replacement_passes_every_row_check(which: str):
    pytest.importorskip("torch")
    from patchkit_adapters.fp32_lm_head import rollout

    processor = SimpleNamespace(org_vocab_size=VOCABULARY, _gather_logits=lambda logits: logits)

    def run(x: Any, weight: Any) -> Any:
        head = SimpleNamespace(quant_method=plain_method(), weight=weight)
        if which == "apply_head":
            return rollout.apply_head(processor, head, x, None)
        return rollout.get_logits(processor, x, head, None)

    report = rows_of(run)
    report.raise_if_failed()
    assert sum(report.trials.values()) > 40


def test_what_older_versions_do_around_it_stays():
    """Gathered before the padding is cut off; ranks that get nothing return nothing."""
    torch = pytest.importorskip("torch")
    from patchkit_adapters.fp32_lm_head.rollout import get_logits

    x, weight = operands()
    head = SimpleNamespace(quant_method=plain_method(), weight=weight)
    seen = []

    def gather(logits: Any) -> Any:
        seen.append(logits)
        return torch.cat([logits, logits], dim=-1)

    processor = SimpleNamespace(org_vocab_size=VOCABULARY + 7, _gather_logits=gather)
    made = get_logits(processor, x, head, None)
    assert seen[0].shape == (ROWS, VOCABULARY)
    assert (made.shape, made.dtype) == ((ROWS, VOCABULARY + 7), torch.float32)
    processor._gather_logits = lambda logits: None
    assert get_logits(processor, x, head, None) is None


def test_a_bias_is_added_in_float32_and_wide_layers_are_exact_trees():
    torch = pytest.importorskip("torch")
    from patchkit_adapters.fp32_lm_head.rollout import apply_head

    torch.manual_seed(1)
    x, weight = torch.randn(3, 16384).bfloat16(), torch.randn(8, 16384).bfloat16()
    bias = torch.randn(8).bfloat16()
    head = SimpleNamespace(quant_method=plain_method(), weight=weight)
    plain, biased = apply_head(None, head, x, None), apply_head(None, head, x, bias)
    assert torch.equal(biased, plain + bias.float())
    want = (x.double() @ weight.double().T).float()
    assert (plain - want).abs().max() <= want.abs().max() * 2**-20
    assert torch.equal(apply_head(None, head, x[1:2], None), plain[1:2])


def test_a_quantised_output_layer_is_refused_by_its_method():
    from patchkit_adapters.fp32_lm_head.rollout import QuantizedHeadError, apply_head

    x, weight = operands()
    head = SimpleNamespace(quant_method=type("Fp8LinearMethod", (), {})(), weight=weight)
    with pytest.raises(QuantizedHeadError, match=r"quantised \(Fp8LinearMethod\)"):
        apply_head(None, head, x, None)


def engine(folder: Path, model: str, how: str) -> dict[str, Any]:
    pytest.importorskip("vllm")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PATCHKIT_", "VLLM_"))}
    done = subprocess.run(
        [sys.executable, str(HERE / "head_script.py"), str(folder), model, how],
        env={
            **clean,
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
        },
        capture_output=True,
        text=True,
        timeout=200,
    )
    lines = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("RESULT "))


MODELS = [
    pytest.param("llama", id="llama with tied embeddings"),
    pytest.param("qwen2", marks=pytest.mark.nightly),
    pytest.param("qwen3_moe", marks=pytest.mark.nightly),
]


@pytest.mark.e2e
@pytest.mark.parametrize("model", MODELS)
def test_on_a_real_engine_a_row_alone_has_the_bits_of_the_batch(tmp_path: Path, model: str):
    made = engine(tmp_path, model, "patched")
    (hits,) = made["hits"].values()
    assert hits > 10
    (patch,) = made["manifest"]
    assert patch["replacement"] == "patchkit_adapters.fp32_lm_head.rollout:apply_head"
    assert made["dtype"] == ["torch.float32"]
    assert made["largest batch"] > 1
    assert made["rows"] > 100
    assert made["rows that differ alone"] == 0
    assert made["on bf16's grid"] < 0.01, "the logits would be bf16 numbers"
    assert made["wrong"] == 0
    assert made["other temperature"] == 6, "installed alone, it judges no request"


@pytest.mark.e2e
@pytest.mark.nightly
def test_on_a_real_engine_the_option_alone_depends_on_the_batch(tmp_path: Path):
    made = engine(tmp_path, "llama", "option")
    assert made["dtype"] == ["torch.float32"]
    assert made["wrong"] == 0, "its precision is right"
    assert made["rows that differ alone"] > 0


@pytest.mark.nightly
def test_the_conformance_suite_is_green():
    """Manifests, undo, plugin, rows of the replacements, reached, and needed."""
    done = subprocess.run(
        [sys.executable, "-m", "patchkit", "conformance", "fp32_lm_head", "--json"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    stages = {s["stage"]: s["status"] for s in json.loads(done.stdout)["stages"]}
    assert set(stages.values()) == {"passed"}
    assert {"rows", "reached", "ablation"} <= set(stages)
