"""Profile ``pipelinerl_v1`` on a real asynchronous engine, from preflight to artifact; prints JSON.

The contract comes before torch, the engine is the one the profile describes, and weights
change while requests are under way.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from patchkit.engine import find_adapter
from patchkit.runtime.contract import Contract, observe, preflight
from patchkit.runtime.profile import Profile, load_profile

PROMPTS = [list(range(5, 5 + n)) for n in (10, 37, 21)]
TOKENS = 300


def judge(profile: Profile, model: Path, folder: Path) -> Contract:
    machine = observe(profile, model)
    return preflight(profile, machine, opt_in=True, run_dir=folder / "attestations")


async def main(folder: Path, contract: Contract, model: Path) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from patchkit.runtime.artifact import Artifact, verify_artifact
    from patchkit.runtime.async_engine import AsyncControl
    from patchkit.runtime.attestation import collect_attestations, rollout_processes
    from patchkit.runtime.engine_gate import require_engine
    from patchkit.runtime.extension import WORKER_EXTENSION
    from patchkit.runtime.liveness import EngineWatch
    from patchkit.runtime.sync import WeightSync, WeightSyncError, register_backend
    from patchkit.runtime.versions import (
        TrajectoryRefusedError,
        lag_report,
        output_spans,
        require_on_policy,
    )

    profile = contract.profile
    register_backend()
    arguments = profile.engine_arguments(str(model))
    arguments |= {"skip_tokenizer_init": True, "worker_extension_cls": WORKER_EXTENSION}
    arguments |= {"disable_log_stats": True}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    loop, run = asyncio.get_running_loop(), folder / "attestations"
    control = AsyncControl(engine, loop, watch=EngineWatch.of_run(run))
    settings = await asyncio.to_thread(require_engine, control, profile)
    await asyncio.to_thread(control.collective_rpc, "patchkit_attest")
    attested = collect_attestations(
        run,
        rollout_processes(),
        contract_digest=contract.digest,
        environment=contract.environment.compared,
    )
    result: dict[str, Any] = {
        "on_policy contract": contract.on_policy,
        "settings": settings[0],
        "attested": [[a.role, a.state, a.adapter] for a in attested],
        "patched": sorted({p["symbol"] for a in attested for p in a.manifest["patches"]}),
    }

    weights = profile.content.weights
    sync = WeightSync(control, mode=weights.receipts, caches=weights.caches, in_flight=True)
    records = [await asyncio.to_thread(sync.begin)]
    seen = {"tokens": 0}

    async def generate(number: int, prompt: list[int], tokens: int, **changes: Any) -> Any:
        params = SamplingParams(
            **{"temperature": 1.0, "max_tokens": tokens, "logprobs": 0, **changes},
            ignore_eos=True,
            detokenize=False,
        )
        last = None
        salted = {"prompt_token_ids": prompt, "cache_salt": sync.salt()}
        async for last in engine.generate(salted, params, f"{number}-{sync.version}"):
            seen["tokens"] = max(seen["tokens"], len(last.outputs[0].token_ids))
        assert last is not None
        return last

    try:
        await generate(99, PROMPTS[0], 4, temperature=0.7)
        result["refused"] = "nothing was raised"
    except ValueError as e:
        result["refused"] = str(e)

    running = [asyncio.create_task(generate(i, p, TOKENS)) for i, p in enumerate(PROMPTS)]
    for version in (1, 2):
        while seen["tokens"] < 50 * version:
            await asyncio.sleep(0.005)
        path = folder / f"v{version}" / "model.safetensors"
        records.append(await asyncio.to_thread(sync.update, version, path))
        result[f"unfinished after update {version}"] = control.has_unfinished_requests()
    outputs = [o.outputs[0] for o in await asyncio.gather(*running)]
    spans = [output_spans(o) for o in outputs]
    result["versions"] = [[s.version for s in x] for x in spans]
    result["covered"] = [x[-1].end for x in spans]
    lag = lag_report(spans, 2)
    result["lag"] = lag.as_dict()
    try:
        require_on_policy(spans, 2)
        result["as on-policy"] = "nothing was raised"
    except TrajectoryRefusedError as e:
        result["as on-policy"] = str(e)

    # The engine's own log-probabilities under version 2, for a fresh engine to repeat.
    scored = await generate(7, PROMPTS[1], 1, prompt_logprobs=0)
    result["scores"] = [next(iter(e.values())).logprob for e in scored.prompt_logprobs[1:]]

    artifact = Artifact(contract.as_dict())
    for record in records:
        artifact.add_refit(record)
    artifact.add_attestations(attested)
    artifact.note(lag=lag.as_dict())
    result["verdict"] = verify_artifact(artifact.write(folder / "artifact.json")).verdict

    # The core is killed with requests under way: each of them ends, and the next call says who.
    seen["tokens"] = 0
    running = [asyncio.create_task(generate(i, p, TOKENS)) for i, p in enumerate(PROMPTS)]
    while seen["tokens"] < 50:
        await asyncio.sleep(0.005)
    pid = attested[0].pid
    os.kill(pid, signal.SIGKILL)
    begun = time.monotonic()
    ended = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 60)
    result["killed"] = [type(e).__name__ for e in ended]
    path = folder / "v2" / "model.safetensors"
    try:
        await asyncio.to_thread(sync.update, 3, path)
        result["update"] = "nothing was raised"
    except WeightSyncError as e:
        result["update"] = str(e)
    result["noticed after"] = time.monotonic() - begun
    result["poisoned"] = sync.state.poisoned
    result["named"] = f"pid {pid}"
    return result


def score(model: Path) -> list[float]:
    """The same scores from an engine that was started with these weights."""
    os.environ.update(PATCHKIT_ENABLE="", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    import patchkit

    patchkit.install(adapter="fp32_lm_head")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        block_size=32,
        enable_prefix_caching=False,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
    )
    params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    (made,) = llm.generate([{"prompt_token_ids": PROMPTS[1]}], params, use_tqdm=False)
    return [next(iter(e.values())).logprob for e in made.prompt_logprobs[1:]]


if __name__ == "__main__":
    where, what = Path(sys.argv[1]), sys.argv[2]
    if what == "score":
        print("RESULT", json.dumps(score(where / "v2")), flush=True)
    else:
        # Before anything imports torch.
        profiles = find_adapter("fp32_lm_head").profiles
        assert profiles is not None
        agreed = judge(load_profile(profiles / "pipelinerl_v1.toml"), where / "model", where)
        agreed.environment.apply()
        answers = asyncio.run(main(where, agreed, where / "model"))
        print("RESULT", json.dumps(answers), flush=True)
        os._exit(0)  # the client of a killed core has nobody to say goodbye to
