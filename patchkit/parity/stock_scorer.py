"""A stock vLLM engine in a process of its own that scores given tokens.

What patchkit's numbers are shown beside: the same vLLM, the same tokens, no patch.
Runs as ``python -m patchkit.parity.stock_scorer`` and is asked through
:class:`StockScorer`: one JSON object a line in, one a line out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from patchkit.errors import PatchkitError
from patchkit.parity.workload import Rollout


class StockScorer:
    """The driver's end.

    Args:
        arguments: Of ``vllm.LLM``; the model folder is given with every request.
        environment: Variables of the process, patchkit's taken out.
        log: File that gets the process's standard error.
    """

    def __init__(
        self, arguments: Mapping[str, Any], *, environment: Mapping[str, str], log: Path
    ) -> None:
        self._log = log
        self._arguments = dict(arguments)
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "patchkit.parity.stock_scorer"],
                env={k: v for k, v in environment.items() if not k.startswith("PATCHKIT_")},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )

    def send(self, model: Path, rollouts: Sequence[Rollout]) -> None:
        """Ask for the scores of these tokens under this checkpoint."""
        request = {
            "arguments": {**self._arguments, "model": str(model)},
            "sequences": [[list(r.prompt), list(r.tokens)] for r in rollouts],
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def receive(self) -> list[list[float]]:
        """Selected-token log-probabilities, one list per sequence.

        Raises:
            PatchkitError: The process ended; carries the end of its log.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait(10)
            tail = self._log.read_text(errors="replace")[-2000:]
            raise PatchkitError(f"stock scorer: process ended with exit code {code}\n{tail}")
        answer: list[list[float]] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)


def _score(llm: Any, sequences: Sequence[tuple[list[int], list[int]]]) -> list[list[float]]:
    from vllm import SamplingParams

    outputs = llm.generate(
        [{"prompt_token_ids": prompt + tokens} for prompt, tokens in sequences],
        SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False),
        use_tqdm=False,
    )
    return [
        [output.prompt_logprobs[len(prompt) + i][token].logprob for i, token in enumerate(tokens)]
        for (prompt, tokens), output in zip(sequences, outputs, strict=True)
    ]


def main() -> None:
    """Serve requests from standard input until it closes."""
    # Libraries print to standard output; the answers need it for themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM

    for line in sys.stdin:
        request = json.loads(line)
        # A fresh engine for every checkpoint: on CPU, stock vLLM corrupts expert
        # weights when it reloads them into a running engine.
        llm = LLM(**request["arguments"])
        answers.write(json.dumps(_score(llm, request["sequences"])) + "\n")
        answers.flush()
        llm.llm_engine.engine_core.shutdown()
        del llm


if __name__ == "__main__":
    main()
