"""What happens when one patch is left out: each must be needed, or be proven elsewhere.

A patch whose absence nobody notices is either superfluous or protected by luck. For
every patch of an adapter's profile this samples with a real engine and replays on the
exact path, once complete and once without that patch, and counts the tokens that
differ. Leaving one out may also make the engine or the replay fail: that is noticed,
too. Processes are forked from one that has imported everything, so a case costs an
engine start and a second of sampling.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from patchkit.engine import Adapter, Patch, find_adapter, inspect_plan, resolve_reference
from patchkit.errors import PatchkitError
from patchkit.parity import rollout_engine as engines
from patchkit.parity.workload import mixed_prompts
from patchkit.runtime.environment import Environment
from patchkit.runtime.profile import Profile, load_profile

_SEQUENCES = 12
_NEW_TOKENS = 36


# Prompt, sampled tokens, log-probabilities of the engine.
Sequences = list[tuple[list[int], list[int], list[float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationCase:
    """One patch left out, or none.

    Attributes:
        symbol: The patch's identity; empty for the complete adapter.
        side: "rollout" or "trainer"; empty for the complete adapter.
        tokens: Tokens compared.
        mismatches: Tokens whose float32 log-probabilities differ.
        error: What was raised instead of a result; empty if nothing.
    """

    symbol: str
    side: str
    tokens: int = 0
    mismatches: int = 0
    error: str = ""

    @property
    def noticed(self) -> bool:
        return bool(self.mismatches or self.error)


Answer = tuple[AblationCase, Sequences | None]


def without(adapter: Adapter, side: str, symbol: str) -> Adapter:
    """The same adapter with one patch less.

    It declares no submodules any more: a refusal because of a class that lost its patch
    would count as noticed, whatever the bits are.
    """
    kept = tuple(p for p in adapter.patches(side) if p.identity != symbol)
    if side == "rollout":
        return replace(adapter, rollout=kept, modules=())
    return replace(adapter, trainer=kept, modules=())


def ablate(adapter_name: str, profile: str | None = None) -> list[AblationCase]:
    """Run every case; the complete adapter comes first.

    The calling process must not have imported torch: it forks.
    """
    adapter = find_adapter(adapter_name)
    chosen = adapter.profile(profile)
    assert adapter.profiles is not None
    profile_file = load_profile(adapter.profiles / f"{chosen}.toml")
    Environment(
        {
            **engines.environment(1),
            **profile_file.engine_environment(),
            # The plugin stays asleep: each case installs its own variant.
            "PATCHKIT_ENABLE": "",
        }
    ).apply()
    rollout = [p.patch for p in inspect_plan(adapter, "rollout", profile=chosen).patches]
    trainer = [p.patch for p in inspect_plan(adapter, "trainer", profile=chosen).patches]
    with tempfile.TemporaryDirectory(prefix="patchkit-ablation-") as folder:
        model = Path(folder) / "model"
        resolve_reference(adapter.tiny_model)(model, seed=1)
        _import_everything()
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:

            def run(case: AblationCase, sequences: Sequences | None) -> Answer:
                return _forked(adapter, case, profile_file, model, sequences)

            first = pool.submit(run, AblationCase(symbol="", side=""), None)
            samplings = [
                pool.submit(run, AblationCase(symbol=p.identity, side="rollout"), None)
                for p in _required(rollout)
            ]
            complete, sequences = first.result()
            replays = [
                pool.submit(run, AblationCase(symbol=p.identity, side="trainer"), sequences)
                for p in _required(trainer)
                if sequences
            ]
            return [complete, *(job.result()[0] for job in (*samplings, *replays))]


def _required(patches: Sequence[Patch]) -> list[Patch]:
    # The others stand at doors (request admission, checkpointing) that a replay of
    # admitted requests does not tell apart; they have tests of their own.
    return [p for p in patches if p.required and not p.symbol.startswith("vllm.v1.engine")]


def _import_everything() -> None:
    import torch
    import transformers.models.auto.modeling_auto  # noqa: F401
    import vllm  # noqa: F401

    torch.set_num_threads(1)


def _forked(
    adapter: Adapter,
    case: AblationCase,
    profile: Profile,
    model: Path,
    sequences: Sequences | None,
) -> Answer:
    """Run one case in a child process; without sequences, it samples its own.

    Raises:
        PatchkitError: The process ended by itself and said nothing: that is a fault of
            the trial, and not a patch that was missed.
    """
    if case.side:
        adapter = without(adapter, case.side, case.symbol)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            os.close(read)
            _silence()
            done, sampled = _child(adapter, case, profile, model, sequences)
            with os.fdopen(write, "wb") as pipe:
                pipe.write(orjson.dumps([asdict(done), sampled]))
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not data:
        if os.WIFSIGNALED(status):
            # Native code that read what a missing patch left in another layout.
            return replace(case, error=f"killed by signal {os.WTERMSIG(status)}"), None
        raise PatchkitError(
            f"ablation: the process without {case.symbol or 'nothing'} ended with status "
            f"{os.waitstatus_to_exitcode(status)} and gave no answer"
        )
    done, sampled = orjson.loads(data)
    return AblationCase(**done), sampled


def _silence() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def _child(
    adapter: Adapter,
    case: AblationCase,
    profile: Profile,
    model: Path,
    sequences: Sequences | None,
) -> Answer:
    import patchkit

    try:
        # Both sides before the engine: afterwards its objects are frozen, and
        # installing is refused.
        patchkit.install(adapter=adapter, side="trainer", profile=profile.name)
        if sequences is None:
            patchkit.install(adapter=adapter, side="rollout", profile=profile.name)
            sequences = _sample(profile, model)
        return _replayed(case, resolve_reference(adapter.logprobs), model, sequences), sequences
    except BaseException as error:  # SystemExit, too: an engine that gives up is an answer
        return replace(case, error=f"{type(error).__name__}: {error}"[:300]), None


def _sample(profile: Profile, model: Path) -> Sequences:
    """Sample with the engine of this process, patched as it is."""
    from vllm import LLM, SamplingParams

    config = orjson.loads((model / "config.json").read_bytes())
    llm: Any = LLM(**engines.engine_arguments(profile, model, weight_updates=False))
    prompts = mixed_prompts(_SEQUENCES, vocabulary=config["vocab_size"], seed=3, longest=150)
    outputs = llm.generate(
        [{"prompt_token_ids": list(p)} for p in prompts],
        SamplingParams(
            temperature=1.0, max_tokens=_NEW_TOKENS, logprobs=0, detokenize=False, ignore_eos=True
        ),
        use_tqdm=False,
    )
    found: Sequences = []
    for prompt, output in zip(prompts, outputs, strict=True):
        sampled = list(output.outputs[0].token_ids)
        entries = zip(sampled, output.outputs[0].logprobs, strict=True)
        found.append((list(prompt), sampled, [entry[token].logprob for token, entry in entries]))
    return found


def _replayed(
    case: AblationCase, select: Callable[..., Any], model: Path, sequences: Sequences
) -> AblationCase:
    """Replay on the exact path in this process and compare."""
    import torch
    from transformers import AutoModelForCausalLM

    import patchkit

    trainer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    mismatches = tokens = 0
    for prompt, sampled, logprobs in sequences:
        ids = torch.tensor([prompt + sampled])
        with torch.no_grad(), patchkit.exact_context():
            logits = trainer(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            found = select(logits, torch.tensor(sampled))
        wanted = torch.tensor(logprobs)
        mismatches += int((found.view(torch.int32) != wanted.view(torch.int32)).sum())
        tokens += len(sampled)
    return replace(case, tokens=tokens, mismatches=mismatches)
