"""A buffer of the checkpoint that training changed arrives in the running engine, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.stack, pytest.mark.timeout(300)]

# The receipts are enforced: `update` raises unless what was loaded is what was sent.
UPDATE = """
import sys
from pathlib import Path
from patchkit.parity.demo_setup import DemoSettings, set_up

if __name__ == "__main__":
    folder, planted = Path(sys.argv[1]), sys.argv[2] == "planted"
    setup = set_up(DemoSettings(adapter="glm4_moe", folder=folder, sequences=2, stock=False))
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    from patchkit.parity.rollout_engine import RolloutEngine
    from patchkit.runtime.weights import tensors_receipt

    engine = RolloutEngine(
        setup.contract.profile, setup.model, weight_map=setup.adapter.weight_map, num_blocks=40
    )
    trainer = AutoModelForCausalLM.from_pretrained(setup.model, dtype=torch.bfloat16)

    def receipt(version):
        return tensors_receipt("trainer", trainer.state_dict().items(), version=version)

    def move():
        for name, buffer in trainer.named_buffers():
            if name.endswith("e_score_correction_bias"):
                assert buffer.dtype == torch.float32
                buffer.add_(torch.randn(buffer.shape))

    engine.sync.begin(receipt(0), version=0)
    before = engine.generate([[5, 6, 7]], [24])[0][0]
    move()
    state = {name: value.contiguous() for name, value in trainer.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    if planted:
        move()
    engine.sync.update(1, folder / "model.safetensors", receipt(1))
    after = engine.generate([[5, 6, 7]], [24])[0][0]
    engine.close()
    same = (before.tokens, before.logprobs) == (after.tokens, after.logprobs)
    print("the same policy" if same else "another policy")
"""


def update(folder: Path, kind: str) -> subprocess.CompletedProcess[str]:
    script = folder / "update.py"
    script.write_text(UPDATE)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PATCHKIT_", "VLLM_"))}
    return subprocess.run(
        [sys.executable, str(script), str(folder), kind],
        capture_output=True,
        text=True,
        env=clean,
        timeout=250,
        check=False,
    )


def test_a_changed_correction_bias_arrives_and_has_a_say(tmp_path: Path) -> None:
    run = update(tmp_path, "sound")
    assert run.returncode == 0, run.stderr[-3000:]
    assert "another policy" in run.stdout


@pytest.mark.nightly
def test_a_correction_bias_that_is_not_what_was_sent_is_refused(tmp_path: Path) -> None:
    run = update(tmp_path, "planted")
    assert run.returncode != 0
    assert "e_score_correction_bias" in run.stderr
    assert "loaded weights differ from the trainer's" in run.stderr
