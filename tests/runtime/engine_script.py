"""One real engine, driven through everything the runtime promises; prints JSON.

Run as a program: an engine must be alone in its process, and its workers import
this file again.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from patchkit.runtime.extension import WorkerExtension

MAP = "patchkit_adapters.qwen3_moe.weights:weight_map"


class Saboteur(WorkerExtension):
    """A worker that can be told to damage its own weights."""

    def sabotage(self, rank: int) -> None:
        if self.rank == rank:  # type: ignore[attr-defined]
            model = self.model_runner.get_model()  # type: ignore[attr-defined]
            model.model.layers[1].self_attn.qkv_proj.weight.data[3, 5] += 1

    def rearrange(self, rank: int) -> None:
        """What packing for a kernel does: the same numbers, in other places."""
        if self.rank == rank:  # type: ignore[attr-defined]
            experts = self.model_runner.get_model().model.layers[1].mlp.experts  # type: ignore[attr-defined]
            w13 = getattr(experts, "routed_experts", experts).w13_weight.data
            w13.copy_(w13.roll(1, dims=1))


class Sabotaged:
    """An engine one of whose workers is damaged between loading and the receipts."""

    def __init__(self, llm: Any, rank: int, how: str) -> None:
        self._llm, self._rank, self._how = llm, rank, how

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update(weight_version)
        self._llm.collective_rpc(self._how, args=(self._rank,))


def said(action: Any) -> str:
    try:
        action()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "nothing was raised"


def main(folder: Path, tp: int) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3MoeForCausalLM
    from vllm import LLM, SamplingParams
    from vllm.config import WeightTransferConfig

    from patchkit.runtime.attestation import (
        AttestationError,
        collect_attestations,
        rollout_processes,
    )
    from patchkit.runtime.state import EngineState
    from patchkit.runtime.sync import BACKEND, WeightSync, register_backend
    from patchkit.runtime.weights import tensors_receipt
    from patchkit_adapters.qwen3_moe.tiny import make_tiny_model

    model = make_tiny_model(folder / "model")
    register_backend()
    llm = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=256,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        block_size=32,
        tensor_parallel_size=tp,
        generation_config="vllm",
        seed=0,
        worker_extension_cls="engine_script.Saboteur",
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
    )
    result: dict[str, Any] = {}
    llm.collective_rpc("patchkit_attest")
    run = Path(os.environ["PATCHKIT_RUN_DIR"])
    try:
        found = collect_attestations(run, rollout_processes(tensor_parallel=tp))
    except AttestationError as e:
        result["attestation"] = str(e)
        print("RESULT", json.dumps(result))
        return
    result["attested"] = [[a.role, a.rank, a.state] for a in found]
    result["caches"] = [
        a.environment["VLLM_CACHE_ROOT"].endswith(f"/patchkit-{a.manifest_digest[:16]}")
        for a in found
    ]
    result["files"] = sorted({p.name.rsplit("-", 1)[0] for p in run.iterdir()})

    hf = Qwen3MoeForCausalLM.from_pretrained(str(model), dtype=torch.float32)

    def receipt(version: int) -> Any:
        return tensors_receipt(
            "trainer", hf.named_parameters(), dtype=torch.bfloat16, version=version
        )

    def deliver(version: int) -> Path:
        path = folder / f"v{version}.safetensors"
        save_file(
            {n: p.detach().to(torch.bfloat16).contiguous() for n, p in hf.named_parameters()},
            str(path),
        )
        return path

    def generate(salt: str | None = None, **changes: Any) -> list[Any]:
        prompt: dict[str, Any] = {"prompt_token_ids": list(range(5, 75))}
        if salt is not None:
            prompt["cache_salt"] = salt
        params = {"temperature": 1.0, "max_tokens": 8, "logprobs": 0, "ignore_eos": True}
        made = SamplingParams(**{**params, **changes}, detokenize=False)
        return llm.generate([prompt], made, use_tqdm=False)

    def spans(outputs: list[Any]) -> list[Any]:
        return [[s.version, s.start, s.end] for s in outputs[0].outputs[0].weight_versions]

    sync = WeightSync(llm, weight_map=MAP)
    sync.begin(receipt(0))
    first, again = generate(), generate()
    result["version 0"] = spans(first)
    result["cached"] = again[0].num_cached_tokens
    result["salts"] = [
        generate(salt)[0].num_cached_tokens for salt in ("one", "one", "two", "two", "one")
    ]

    result["refused"] = {
        str(changes): said(lambda changes=changes: generate(**changes))
        for changes in (
            {"temperature": 0.7, "top_p": 0.9},
            {"min_tokens": 3},
            {"logit_bias": {7: 1.0}},
            {"bad_words": []},
        )
    }
    result["still works"] = spans(generate())

    with torch.no_grad():
        for p in hf.parameters():
            p.mul_(1.01)
    record = sync.update(1, deliver(1), receipt(1))
    result["seconds"] = record.seconds
    result["receipts"] = [r.holder for r in record.workers]
    result["parameters"] = len(record.trainer.parameters) if record.trainer else 0
    after = generate()
    result["version 1"] = spans(after)
    result["cached after the update"] = after[0].num_cached_tokens
    result["twice"] = said(lambda: sync.update(1, deliver(1), receipt(1)))
    result["usable after a refusal"] = spans(generate())

    # A salt instead of a reset: what is cached stays, for whoever gives the old salt.
    salted = WeightSync(llm, weight_map=MAP, state=sync.state, caches="salt")
    old = salted.salt()
    generate(old)
    before = generate(old)[0].num_cached_tokens
    with torch.no_grad():
        for p in hf.parameters():
            p.mul_(1.01)
    salted.update(2, deliver(2), receipt(2))
    result["salted"] = {
        "before": before,
        "new salt": generate(salted.salt())[0].num_cached_tokens,
        "new salt again": generate(salted.salt())[0].num_cached_tokens,
        "old salt": generate(old)[0].num_cached_tokens,
        "version": spans(generate(salted.salt())),
    }

    for how in ("rearrange", "sabotage"):
        # Each on a state of its own: the first would poison the second.
        state = EngineState(version=2)
        broken = WeightSync(Sabotaged(llm, tp - 1, how), weight_map=MAP, state=state)
        result[f"{how}d"] = said(lambda broken=broken: broken.update(3, deliver(3), receipt(3)))
    result["later"] = said(lambda: state.require_usable("generate"))
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
