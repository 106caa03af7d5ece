"""What is run together: waves of runs that fit the memory of the GPUs side by side."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of ``benchmarks/gpu.py`` (or the conformance tests) in a wave.

    Attributes:
        name: Of its results.
        arguments: Of ``benchmarks/gpu.py``; the first is the part.
        environment: Variables of its own.
        limit_s: When it is ended.
    """

    name: str
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    limit_s: float = 480.0


def _on(*gpus: int) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in gpus)}


def _exact(name: str, *arguments: str, gpu: int | None = None, limit_s: float = 480.0) -> Run:
    return Run(
        name=name,
        # A refusal is noted, and costs the run its artifact; what differs is seen all the same.
        arguments=("exact", "--anyway", *arguments),
        environment={} if gpu is None else _on(gpu),
        limit_s=limit_s,
    )


_TWO = ("--tensor-parallel", "2", "--cache-gib", "0.5")
_SGD = ("--optimizer", "sgd", "--learning-rate", "20")
_LEAN = (*_SGD, "--budget", "4096")  # so that several runs fit one GPU's memory
_FREE = ("--kind", "tp_independent", "--fingerprint", *_LEAN)
_FOUR_SLICES = ("--kind", "tp_independent_4", "--fingerprint", "--prompts", "128,96", *_LEAN)
_DEEP = ("--model", "/dev/shm/patchkit-deep")

MODEL = Run(name="model", arguments=("model",), environment=_on(0), limit_s=120)
DEEP_MODEL = Run(
    name="model-48-layers",
    arguments=("model", *_DEEP, "--layers", "48", "--no-weights"),
    limit_s=60,
)
TESTS = Run(name="tests", arguments=("tests",), environment=_on(1), limit_s=240)


def _start(kind: str, ending: str, *arguments: str, gpus: tuple[int, ...]) -> Run:
    return Run(
        name=f"start-{kind}-{ending}",
        arguments=("start", "--kind", kind, *arguments),
        environment=_on(*gpus),
        limit_s=300,
    )


# Two workers: the engine's own topologies, and the profile that does not show them. A
# fourth does not fit: each takes 30 to 36 GiB of both GPUs.
RANKS = (
    _exact("exact-vllm_bi-tp2", *_TWO, "--kind", "vllm_bi", *_LEAN),
    _exact("exact-vllm_bi-tp2-ep", *_TWO, "--kind", "vllm_bi", *_LEAN, "--expert-parallel"),
    _exact("exact-tp_independent-tp2", *_TWO, *_FREE),
)
# By the time the claims load their trainers, the engines that only start are gone again.
ALONE = (
    _exact("exact-tp_independent-tp2-ep", *_TWO, *_FREE, "--expert-parallel"),
    _exact("exact-vllm_bi-tp1", "--kind", "vllm_bi", "--budget", "4096", gpu=0),
    _exact("exact-tp_independent-tp1", *_FREE, gpu=1),
    _exact("exact-tp_independent_4-tp1", *_FOUR_SLICES, gpu=1),
    _start("vllm_bi", "1", gpus=(0,)),
    _start("vllm_bi_fast", "1", gpus=(0,)),
    _start("tp_independent_4", "1", gpus=(1,)),
)
# Cold, all at once: so they are replicas, too.
STARTS = tuple(_start("vllm_bi", str(number), gpus=(int(number == 5),)) for number in range(1, 6))
DEEP = (
    _exact(
        "exact-vllm_bi-tp2-48-layers",
        *(*_DEEP, "--tensor-parallel", "2", "--kind", "vllm_bi"),
        *("--prompts", "152,152,152,152", "--cache-gib", "2.5"),
        *_LEAN,
        limit_s=575,
    ),
)


def _grpo(kind: str, gpu: int) -> Run:
    return Run(
        name=f"grpo-{kind}",
        arguments=("grpo", "--kind", kind),
        environment=_on(gpu),
        limit_s=300,
    )


SPEED = tuple(
    Run(
        name=f"throughput-{concurrent}",
        arguments=(
            *("throughput", "--concurrent", concurrent, "--seconds", "15"),
            *("--kinds", "stock,batch_invariant,vllm_bi,tp_independent"),
        ),
        environment=_on(gpu),
        limit_s=590,
    )
    for gpu, concurrent in enumerate(("64", "256"))
)

# Four workers. A configuration's 1,000,000 tokens and ten updates take two runs.
_FOUR = ("--kind", "tp_independent_4", "--tensor-parallel", "4")
_WITH_AND_WITHOUT_EP: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("", ()),
    ("-ep", ("--expert-parallel",)),
)
FOUR_CLAIMS = tuple(
    _exact(
        f"exact-tp_independent_4-tp4{ending}-{half}",
        *(*_DEEP, *_FOUR, *more, "--seed", str(half)),
        *("--prompts", ",".join(["164"] * 6), "--cache-gib", "2.5"),
        *_LEAN,
        limit_s=590,
    )
    for ending, more in _WITH_AND_WITHOUT_EP
    for half in (1, 2)
)
FOUR_BITS = tuple(
    _start("tp_independent_4", name, *arguments, gpus=gpus)
    for name, gpus, arguments in (
        ("tp1", (0,), ()),
        ("tp2", (1, 2), ("--tensor-parallel", "2")),
        ("tp4", (0, 1, 2, 3), ("--tensor-parallel", "4")),
        ("ep4", (0, 1, 2, 3), ("--tensor-parallel", "4", "--expert-parallel")),
    )
)
FOUR_SPEED = tuple(
    Run(
        name=f"throughput-tp4{ending}",
        arguments=(
            *("throughput", *_DEEP, "--tensor-parallel", "4", *more),
            *("--kinds", "stock,batch_invariant,tp_independent_4", "--seconds", "15"),
        ),
        limit_s=590,
    )
    for ending, more in _WITH_AND_WITHOUT_EP
)

PLANS: dict[str, tuple[tuple[Run, ...], ...]] = {
    "one": (
        (MODEL,),
        (
            _exact("exact-vllm_bi-tp1", "--kind", "vllm_bi", *_LEAN, gpu=0),
            _exact("exact-tp_independent-tp1", *_FREE, gpu=0),
            _exact("exact-tp_independent_4-tp1", *_FOUR_SLICES, gpu=0),
        ),
        (_grpo("stock", 0),),
        (_grpo("vllm_bi", 0),),
    ),
    "tests": ((TESTS,),),
    "ranks": ((MODEL,), RANKS),
    "alone": ((MODEL,), ALONE),
    "starts": ((MODEL,), STARTS),
    "deep": ((DEEP_MODEL,), DEEP),
    "grpo": ((MODEL,), (_grpo("stock", 0), _grpo("vllm_bi", 1))),
    "speed": ((MODEL,), SPEED),
    "four": (
        (MODEL, DEEP_MODEL),
        FOUR_BITS,
        *((claim,) for claim in FOUR_CLAIMS),
        *((speed,) for speed in FOUR_SPEED),
    ),
}
