"""With the plugin installed and not enabled, vLLM is exactly vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.stack]

SAMPLE = """
import json, os, sys
from vllm import LLM, SamplingParams
llm = LLM(model=sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16",
          max_model_len=128, max_num_batched_tokens=64, max_num_seqs=8, block_size=32, seed=0)
prompts = [{"prompt_token_ids": list(range(3, 3 + n))} for n in (1, 9, 70)]
out = llm.generate(prompts, SamplingParams(temperature=1.0, max_tokens=24, logprobs=2, seed=None,
                   detokenize=False, ignore_eos=True), use_tqdm=False)
answer = {
    "outputs": [[list(o.outputs[0].token_ids),
                 [{str(t): lp.logprob for t, lp in e.items()} for e in o.outputs[0].logprobs]]
                for o in out],
    "plugin": "patchkit_vllm_plugin" in sys.modules,
    "patchkit": sorted(m for m in sys.modules if m.split(".")[0].startswith("patchkit")
                       and m != "patchkit_vllm_plugin"),
}
with open(sys.argv[2], "w") as f:
    json.dump(answer, f)
"""


def sample(model: Path, out: Path, **environment: str) -> dict:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PATCHKIT_", "VLLM_"))}
    variables = {
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    run = subprocess.run(
        [sys.executable, "-c", SAMPLE, str(model), str(out)],
        env={**clean, **variables, **environment},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(out.read_text())


def test_outputs_are_bit_identical_and_patchkit_is_not_imported(
    tiny_model: Path, tmp_path: Path
) -> None:
    # Other settings of ours must not wake it: only PATCHKIT_ENABLE=1 does.
    installed = sample(
        tiny_model, tmp_path / "with.json", PATCHKIT_ADAPTER="qwen3_moe", PATCHKIT_PROFILE="x"
    )
    without = sample(tiny_model, tmp_path / "without.json", VLLM_PLUGINS="")
    assert installed["plugin"] is True
    assert without["plugin"] is False
    assert installed["patchkit"] == without["patchkit"] == []
    assert installed["outputs"] == without["outputs"]
