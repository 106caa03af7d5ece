"""What a real engine's output layer computes, with the adapter or with vLLM's option.

``head_script.py FOLDER MODEL patched|option``; prints JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(folder: Path, kind: str, how: str) -> None:
    import patchkit

    installation = None
    if how == "patched":
        installation = patchkit.install(adapter="fp32_lm_head")

    import torch
    from tiny_models import write_tiny
    from vllm import LLM, SamplingParams
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    model = write_tiny(kind, folder / "model")
    llm = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=256,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        block_size=32,
        generation_config="vllm",
        seed=0,
        hf_overrides={"head_dtype": "float32"} if how == "option" else {},
    )
    calls: list[tuple[Any, Any, Any]] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        calls.append((args[0], args[1].clone(), output.clone()))

    runner: Any = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    (processor,) = [m for m in runner.get_model().modules() if isinstance(m, LogitsProcessor)]
    hook = processor.register_forward_hook(keep)

    def generate(**changes: Any) -> Any:
        settings = {"temperature": 1.0, "max_tokens": 12, "logprobs": 0, "ignore_eos": True}
        params = SamplingParams(**{**settings, **changes}, detokenize=False)
        prompts = [{"prompt_token_ids": list(range(5, 5 + n))} for n in (3, 9, 30, 31, 40, 7)]
        return llm.generate(prompts, params, use_tqdm=False)

    result: dict[str, Any] = {}
    if installation is not None:
        with installation.canary() as canary:
            generate()
        result["hits"] = dict(canary.hits)
        result["manifest"] = installation.manifest.as_dict()["patches"]
        # Nothing but the output layer is changed: requests are nobody's business here.
        result["other temperature"] = len(generate(temperature=0.7, top_p=0.9))
    else:
        generate()
    hook.remove()

    rows = alone_differs = on_bf16_grid = off_by_ulps = elements = 0
    for head, hidden, logits in calls:
        plain = head.weight[: logits.shape[-1]]
        want = (hidden.double() @ plain.double().T).float()
        # Within the last bits of float32, of the largest term where terms cancel.
        bound = (hidden.abs().double() @ plain.abs().double().T).float() * 2**-22
        off_by_ulps += int(((logits - want).abs() > bound).sum())
        on_bf16_grid += int((logits.bfloat16().float() == logits).sum())
        elements += logits.numel()
        for row in range(len(hidden)):
            single = processor(head, hidden[row : row + 1])
            rows += 1
            alone_differs += int(not torch.equal(single[0], logits[row]))
    result |= {
        "dtype": sorted({str(x[2].dtype) for x in calls}),
        "width": sorted({x[2].shape[-1] for x in calls}),
        "largest batch": max(len(x[1]) for x in calls),
        "rows": rows,
        "rows that differ alone": alone_differs,
        "on bf16's grid": on_bf16_grid / elements,
        "wrong": off_by_ulps,
    }
    if installation is not None:
        installation.verify()
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
