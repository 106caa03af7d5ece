"""Weights that change under running requests, on a real asynchronous engine."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

MAP = "patchkit_adapters.qwen3_moe.weights:weight_map"


async def main(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3MoeForCausalLM
    from vllm import SamplingParams
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from patchkit.runtime.async_engine import AsyncControl
    from patchkit.runtime.extension import WORKER_EXTENSION
    from patchkit.runtime.sync import BACKEND, WeightSync, register_backend
    from patchkit.runtime.versions import UpdateBarrier, lag_report, output_spans
    from patchkit.runtime.weights import tensors_receipt
    from patchkit_adapters.qwen3_moe.tiny import make_tiny_model

    model = make_tiny_model(folder / "model")
    register_backend()
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=1024,
            max_num_batched_tokens=64,
            max_num_seqs=4,
            block_size=32,
            generation_config="vllm",
            worker_extension_cls=WORKER_EXTENSION,
            weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        )
    )
    hf = Qwen3MoeForCausalLM.from_pretrained(str(model), dtype=torch.float32)

    def receipt(version: int) -> Any:
        return tensors_receipt(
            "trainer", hf.named_parameters(), dtype=torch.bfloat16, version=version
        )

    def deliver(version: int) -> Path:
        with torch.no_grad():
            for p in hf.parameters():
                p.mul_(1.01)
        path = folder / f"v{version}.safetensors"
        save_file(
            {n: p.detach().to(torch.bfloat16).contiguous() for n, p in hf.named_parameters()},
            str(path),
        )
        return path

    seen = {"tokens": 0}

    async def generate(number: int, tokens: int, salt: str) -> Any:
        params = SamplingParams(
            temperature=1.0, max_tokens=tokens, logprobs=0, ignore_eos=True, detokenize=False
        )
        last = None
        prompt = {"prompt_token_ids": list(range(5, 15)), "cache_salt": salt}
        async for last in engine.generate(prompt, params, f"{salt}-{number}"):
            seen["tokens"] = len(last.outputs[0].token_ids)
        assert last is not None
        return last.outputs[0]

    control = AsyncControl(engine, asyncio.get_running_loop())
    sync = WeightSync(control, weight_map=MAP, caches="salt", in_flight=True)
    result: dict[str, Any] = {}
    await asyncio.to_thread(sync.begin, receipt(0))
    running = [asyncio.create_task(generate(i, 600, sync.salt())) for i in range(3)]
    while seen["tokens"] < 5:
        await asyncio.sleep(0.01)
    record = await asyncio.to_thread(sync.update, 1, deliver(1), receipt(1))
    result["unfinished after the update"] = control.has_unfinished_requests()
    outputs = await asyncio.gather(*running)
    spans = [output_spans(o) for o in outputs]
    result["lengths"] = [len(o.token_ids) for o in outputs]
    result["versions"] = [[s.version for s in x] for x in spans]
    result["lag"] = lag_report(spans, 1).as_dict()
    result["in_flight"] = record.in_flight

    # The other way: a barrier keeps requests and updates apart.
    barrier = UpdateBarrier(timeout_s=60)
    apart = WeightSync(control, weight_map=MAP, state=sync.state)

    async def behind_the_barrier(number: int) -> Any:
        async with barrier.arequest():
            return await generate(number, 40, f"apart-{number}")

    async def update() -> None:
        await asyncio.sleep(0.05)
        path, expected = await asyncio.to_thread(lambda: (deliver(2), receipt(2)))
        async with barrier.aupdate():
            await asyncio.to_thread(apart.update, 2, path, expected)

    first = [asyncio.create_task(behind_the_barrier(i)) for i in range(3)]
    await asyncio.gather(update(), *first)
    late = await behind_the_barrier(9)
    result["apart"] = [[s.version for s in output_spans(t.result())] for t in first]
    result["late"] = [s.version for s in output_spans(late)]
    try:
        control.start_weight_update()
        result["own loop"] = "nothing was raised"
    except Exception as e:
        result["own loop"] = str(e)
    print("RESULT", json.dumps(result), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
