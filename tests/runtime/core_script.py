"""An engine whose core is another process: refused there, and killed; prints JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

MAP = "patchkit_adapters.qwen3_moe.weights:weight_map"


def said(action: Any) -> tuple[str, float]:
    begun = time.monotonic()
    try:
        action()
    except BaseException as e:
        return f"{type(e).__name__}: {e}", time.monotonic() - begun
    return "nothing was raised", time.monotonic() - begun


def main(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3MoeForCausalLM
    from vllm import LLM, SamplingParams
    from vllm.config import WeightTransferConfig
    from vllm.plugins import load_general_plugins

    from patchkit.runtime.extension import WORKER_EXTENSION
    from patchkit.runtime.liveness import EngineWatch, WatchedEngine
    from patchkit.runtime.state import EngineState
    from patchkit.runtime.sync import BACKEND, WeightSync, register_backend
    from patchkit.runtime.weights import tensors_receipt
    from patchkit_adapters.qwen3_moe.tiny import make_tiny_model

    model = make_tiny_model(folder / "model")
    register_backend()
    # A front end without patchkit: its plugins were loaded before the variable was set,
    # as in a server that somebody else started. The core is a new process and has it.
    load_general_plugins()
    os.environ["PATCHKIT_ENABLE"] = "1"
    llm = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=128,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        block_size=32,
        generation_config="vllm",
        worker_extension_cls=WORKER_EXTENSION,
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
    )
    hf = Qwen3MoeForCausalLM.from_pretrained(str(model), dtype=torch.float32)

    def receipt(version: int) -> Any:
        return tensors_receipt(
            "trainer", hf.named_parameters(), dtype=torch.bfloat16, version=version
        )

    path = folder / "v1.safetensors"
    save_file(
        {n: p.detach().to(torch.bfloat16).contiguous() for n, p in hf.named_parameters()},
        str(path),
    )

    def generate(**changes: Any) -> list[Any]:
        params = {"temperature": 1.0, "max_tokens": 4, "logprobs": 0, "ignore_eos": True}
        made = SamplingParams(**{**params, **changes}, detokenize=False)
        return llm.generate([{"prompt_token_ids": [5, 6, 7]}], made, use_tqdm=False)

    result: dict[str, Any] = {}
    sync = WeightSync(llm, weight_map=MAP)
    sync.begin(receipt(0))
    result["attested"] = [
        [a["state"], a["pid"] != os.getpid()] for a in llm.collective_rpc("patchkit_attest")
    ]
    good = generate()[0].outputs[0]
    result["good"] = [good.finish_reason, len(good.token_ids)]

    outputs: list[Any] = []
    raised, _ = said(lambda: outputs.extend(generate(temperature=0.7)))
    result["refused in the core"] = {
        "raised": raised,
        "outputs": [[o.outputs[0].finish_reason, len(o.outputs[0].token_ids)] for o in outputs],
    }
    again = generate()[0].outputs[0]
    result["again"] = [again.finish_reason, len(again.token_ids)]

    # Stuck, not dead: nobody but a clock can notice.
    (core,) = {a["pid"] for a in llm.collective_rpc("patchkit_attest")}
    watch = EngineWatch.of_run(os.environ["PATCHKIT_RUN_DIR"])
    os.kill(core, signal.SIGSTOP)
    result["stuck"] = said(
        lambda: watch.call("attest", llm.collective_rpc, "patchkit_attest", bound_s=2.0)
    )
    os.kill(core, signal.SIGCONT)
    time.sleep(0.5)
    result["after a pause"] = generate()[0].outputs[0].finish_reason

    # Killed while it has requests under way.
    state = EngineState(version=sync.version)
    watched = WatchedEngine(llm, watch, state)
    threading.Timer(1.0, os.kill, (core, signal.SIGKILL)).start()
    params = SamplingParams(temperature=1.0, max_tokens=110, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [5, 6, 7]}] * 1000  # far more than a second's work
    begun = time.monotonic()
    result["killed"] = said(lambda: watched.generate(prompts, params, use_tqdm=False))
    result["pid"] = core
    result["under way"] = llm.llm_engine.has_unfinished_requests()
    result["noticed after"] = time.monotonic() - begun - 1.0
    later = WeightSync(watched, weight_map=MAP, state=state)
    result["update"] = said(lambda: later.update(1, path, receipt(1)))
    result["later"] = said(lambda: state.require_usable("generate"))[0]
    result["version"] = state.version
    print("RESULT", json.dumps(result), flush=True)
    os._exit(0)  # the engine's own shutdown has nobody to talk to


if __name__ == "__main__":
    main(Path(sys.argv[1]))
