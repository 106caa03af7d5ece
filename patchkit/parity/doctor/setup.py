"""What has to stand before the doctor imports torch: model, profile, environment.

This module imports nothing heavy. The exact pair runs under the adapter's contract, as
the demo does; the stock pair runs in an environment in which nothing of patchkit is
installed, with the profile's engine settings so that both can be compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patchkit.engine import Adapter, adapter_names, find_adapter
from patchkit.errors import ConfigurationError, PatchkitError
from patchkit.parity import rollout_engine as engines
from patchkit.parity.tiny_checkpoint import make_tiny_checkpoint
from patchkit.runtime.contract import Contract, observe, preflight, read_model_config
from patchkit.runtime.environment import Environment
from patchkit.runtime.profile import Profile, load_profile

__all__ = ["DoctorError", "DoctorSettings", "DoctorSetup", "Workload", "set_up"]

Observer = Callable[[str], None]
PAIRS = ("exact", "stock")


class DoctorError(PatchkitError):
    """The doctor could not examine the pair; the message says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is sampled.

    Attributes:
        sequences: How many.
        new_tokens: Per sequence.
        longest: Longest prompt.
    """

    sequences: int = 6
    new_tokens: int = 12
    longest: int = 72


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorSettings:
    """What to examine.

    Attributes:
        folder: For the model, logs and attestations; one new folder a run.
        pair: "exact" (the adapter on both sides) or "stock" (nothing installed).
        adapter: Its name. A stock pair needs none where ``model`` is given.
        profile: Which of its profiles; the default one if empty.
        model: Checkpoint; the adapter's tiny random model if None.
        workload: What is sampled.
        ranks: FSDP ranks of the trainer.
        tensor_parallel_size: vLLM workers; their shards are put together.
        seed: Of weights, prompts and sampling.
        tensor_bytes: Values held beside the digests, per side and rank.
        model_changes: Settings of the tiny model that differ from the adapter's.
        attention: ``attn_implementation`` of the trainer.
    """

    folder: Path
    pair: str = "exact"
    adapter: str = "qwen3_moe"
    profile: str = ""
    model: Path | None = None
    workload: Workload = Workload()
    ranks: int = 1
    tensor_parallel_size: int = 1
    seed: int = 0
    tensor_bytes: int = 256 << 20
    model_changes: dict[str, Any] = field(default_factory=dict)
    attention: str = "sdpa"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorSetup:
    """A pair that may start.

    Attributes:
        settings: What was asked for.
        adapter: The adapter; None for a stock pair of a model without one.
        profile: Its profile; None likewise.
        folder: Absolute.
        model: The checkpoint.
        config: Content of its ``config.json``.
        contract: Of the exact pair.
        trainer_environment: Variables of the trainer's processes.
    """

    settings: DoctorSettings
    adapter: Adapter | None
    profile: Profile | None
    folder: Path
    model: Path
    config: dict[str, Any]
    contract: Contract | None
    trainer_environment: dict[str, str]


def set_up(settings: DoctorSettings, observe_stage: Observer = lambda stage: None) -> DoctorSetup:
    """Make or find the model, validate the profile, and set this process's environment.

    Raises:
        ConfigurationError: What was asked for cannot be examined.
        ContractError: With everything that stands against the profile.
    """
    _refuse_unless_examinable(settings)
    adapter = find_adapter(settings.adapter) if settings.adapter else None
    profile = _profile(settings, adapter)
    folder = settings.folder.absolute()
    model = settings.model.absolute() if settings.model else folder / "checkpoint-0"
    if settings.model is None:
        observe_stage("make a tiny model with random weights")
        assert adapter is not None  # _refuse_unless_examinable
        _make_model(adapter, model, settings)
    config = read_model_config(model / "config.json")
    if config is None:
        raise ConfigurationError(
            f"doctor: {model} has no config.json; --model takes the folder of a Hugging Face "
            "checkpoint"
        )
    contract = None
    if settings.pair == "exact":
        assert adapter is not None and profile is not None
        observe_stage(f"check profile {profile.name!r} against this machine")
        contract = preflight(
            profile, observe(profile, model), opt_in=True, run_dir=folder / "attestations"
        )
        contract.environment.apply()
        variables = contract.environment.variables
    else:
        variables = profile.engine_environment() if profile else {"OMP_NUM_THREADS": "1"}
        Environment({**variables, "PATCHKIT_ENABLE": ""}).apply()
    Environment(engines.environment(settings.tensor_parallel_size)).apply()
    # Counting calls is the demo's business; here it would only cost time.
    os.environ.pop("PATCHKIT_CANARY", None)
    return DoctorSetup(
        settings=settings,
        adapter=adapter,
        profile=profile,
        folder=folder,
        model=model,
        config=config,
        contract=contract,
        trainer_environment={**variables, "PATCHKIT_ENABLE": ""},
    )


def _refuse_unless_examinable(settings: DoctorSettings) -> None:
    if settings.pair not in PAIRS:
        raise ConfigurationError(f"doctor: pair {settings.pair!r} is none of {', '.join(PAIRS)}")
    if settings.pair == "exact" and not settings.adapter:
        raise ConfigurationError(
            "doctor: the exact pair needs an adapter; name one (installed: "
            f"{', '.join(adapter_names()) or 'none'}), or examine the stock pair with --stock"
        )
    if not settings.adapter and settings.model is None:
        raise ConfigurationError(
            "doctor: neither an adapter nor a model was named; give --adapter (its tiny model "
            "is used) or --model with the folder of a checkpoint"
        )


def _profile(settings: DoctorSettings, adapter: Adapter | None) -> Profile | None:
    if adapter is None:
        return None
    needed: tuple[str, ...] = (
        ("profiles", "logprobs") if settings.pair == "exact" else ("profiles",)
    )
    needed += () if settings.model else ("tiny_model",)
    if missing := [name for name in needed if not getattr(adapter, name)]:
        raise ConfigurationError(
            f"adapter {adapter.name!r} declares no {', '.join(missing)}, which the doctor needs"
            + ("" if settings.model else "; name a checkpoint with --model instead")
        )
    assert adapter.profiles is not None
    profile = load_profile(adapter.profiles / f"{adapter.profile(settings.profile)}.toml")
    if not profile.content.engine.enforce_eager:
        raise ConfigurationError(
            f"doctor: profile {profile.name!r} compiles the model, and no operator can be "
            "watched inside a compiled one; examine an eager profile of the adapter "
            f"(it has {', '.join(adapter.profile_names)}), or name an eager copy of this one"
        )
    return profile.changed(
        **{
            "topology.rollout.tensor": settings.tensor_parallel_size,
            "topology.trainer.data": settings.ranks,
        }
    )


def _make_model(adapter: Adapter, folder: Path, settings: DoctorSettings) -> None:
    try:
        make_tiny_checkpoint(adapter, folder, seed=settings.seed, changes=settings.model_changes)
    except PatchkitError as error:
        raise DoctorError(f"doctor: {error}") from error
