"""One compiled engine, started and asked once; prints JSON. Run as a program.

vLLM does not load compiled models on a CPU: its platform chooses a mode whose
artefacts it cannot read back. Elsewhere, the mode used here is the default.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def compile_as_on_a_gpu() -> None:
    """Keep vLLM's own backend, without the one pass that needs operators of CUDA's."""
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import CompilationMode
    from vllm.platforms.cpu import CpuPlatform

    chosen = CpuPlatform.check_and_update_config

    def check_and_update_config(config: Any) -> None:
        chosen(config)
        config.compilation_config.mode = CompilationMode.VLLM_COMPILE

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)
    FixFunctionalizationPass.__call__ = lambda self, graph: None  # inductor does it itself


def main(model: Path, how: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.compilation.counter import compilation_counter

    from patchkit.runtime.reach import end_canary, evident

    compile_as_on_a_gpu()
    if how == "without":
        from patchkit.engine import install

        install("warm_toy", "rollout")
    llm = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=False,
        compilation_config={"compile_sizes": []},
        dtype="bfloat16",
        max_model_len=64,
        max_num_batched_tokens=64,
        max_num_seqs=2,
        block_size=32,
        generation_config="vllm",
        seed=0,
    )
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=0, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": list(range(5, 25))}], params, use_tqdm=False)
    entries = output.outputs[0].logprobs
    result = {
        "logprobs": [next(iter(entry.values())).logprob for entry in entries],
        "compiled": compilation_counter.num_inductor_compiles,
        "loaded": compilation_counter.num_aot_artifacts_loaded,
        "hits": end_canary(),
        "evident": evident(),
        "inductor": os.environ.get("TORCHINDUCTOR_CACHE_DIR"),
    }
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
