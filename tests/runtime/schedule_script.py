"""The same requests under schedules that must not matter; prints JSON.

Greedy, so that the same tokens come out and every log-probability can be compared bit
for bit within one engine. Everything is token ids in and out.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

BLOCK = 32
# One token more than whole blocks: fully cached, a prefill of exactly one token is left.
WHOLE = 2 * BLOCK + 1
NEW = 32
BUDGET = 256


def bits(value: float) -> int:
    return int(struct.unpack("I", struct.pack("f", value))[0])


def main(folder: Path, *options: str) -> None:
    from vllm import LLM, SamplingParams

    from patchkit_adapters.qwen3_moe.tiny import make_tiny_model

    model = make_tiny_model(folder / "model")
    llm = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=256,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=64,
        block_size=BLOCK,
        num_gpu_blocks_override=160,
        generation_config="vllm",
        seed=0,
        disable_log_stats=False,
        max_logprobs=-1,
        hf_overrides={"head_dtype": "float32"} if "option" in options else {},
    )
    scheduler: Any = llm.llm_engine.engine_core.engine_core.scheduler
    steps: list[dict[str, int]] = []
    schedule = scheduler.schedule

    def recorded(*args: Any, **kwargs: Any) -> Any:
        made = schedule(*args, **kwargs)
        steps.append(dict(made.num_scheduled_tokens))
        return made

    scheduler.schedule = recorded
    prompts = [
        [(7 * i + 3 * k + i * k) % 500 + 5 for k in range(WHOLE if i == 0 else 20 + i % 50)]
        for i in range(64)
    ]
    params = SamplingParams(
        temperature=0.0, max_tokens=NEW, logprobs=0, ignore_eos=True, detokenize=False
    )

    def preemptions() -> int:
        return sum(int(m.value) for m in llm.get_metrics() if m.name == "vllm:num_preemptions")

    def same(request_id: str, output: Any) -> bool:
        return request_id == output.request_id or request_id.startswith(output.request_id + "-")

    def run(chosen: list[int], *, cold: bool = True, chunk: int = 0) -> dict[int, Any]:
        if cold:
            assert llm.reset_prefix_cache()
        scheduler.max_num_scheduled_tokens = chunk or BUDGET
        steps.clear()
        outputs = llm.generate(
            [{"prompt_token_ids": prompts[i]} for i in chosen], params, use_tqdm=False
        )
        return {
            i: {
                "tokens": list(o.outputs[0].token_ids),
                "bits": [
                    bits(entry[t].logprob)
                    for t, entry in zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True)
                ],
                "cached": o.num_cached_tokens,
                "prefill": [step[k] for step in steps for k in step if same(k, o)][: -NEW + 1],
                "beside": max(len(step) for step in steps) - 1,
            }
            for i, o in zip(chosen, outputs, strict=True)
        }

    alone = {i: run([i])[i] for i in (0, 17, 40, 63)}
    run([0])
    cached = run([0], cold=False)
    result: dict[str, Any] = {
        "alone": alone,
        "cached": cached[0],
        "chunks of 13": {i: run([i], chunk=13)[i] for i in (0, 40)},
        "chunks of 1 and 7": {0: run([0], chunk=7)[0], 17: run([17], chunk=1)[17]},
    }
    before = preemptions()
    together = run(list(range(64)))
    result["together"] = {i: together[i] for i in alone}
    result["preemptions"] = preemptions() - before
    backwards = run(list(range(64))[::-1])
    result["reversed"] = {i: backwards[i] for i in alone}
    # Whoever was preempted in one order was another one in the other.
    result["differ between orders"] = [
        i for i in together if any(together[i][k] != backwards[i][k] for k in ("tokens", "bits"))
    ]
    # Whole rows over the vocabulary, for a sample of positions.
    everything = SamplingParams(
        temperature=0.0, max_tokens=4, logprobs=-1, ignore_eos=True, detokenize=False
    )
    chosen = [0, 17]
    rows = llm.generate(
        [{"prompt_token_ids": prompts[i]} for i in chosen], everything, use_tqdm=False
    )
    result["rows"] = [
        {
            "prompt": prompts[i],
            "tokens": list(o.outputs[0].token_ids),
            "logprobs": [[e[t].logprob for t in range(len(e))] for e in o.outputs[0].logprobs],
        }
        for i, o in zip(chosen, rows, strict=True)
    ]
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
