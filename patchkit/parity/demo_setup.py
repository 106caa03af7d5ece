"""What has to stand before the demo imports torch: a model, a validated contract, the environment.

This module imports nothing heavy, and the checkpoint is made in a process of its own,
so that the contract's preflight sees a process in which no library has read its
variables yet.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patchkit.engine import Adapter, find_adapter
from patchkit.errors import ConfigurationError, PatchkitError
from patchkit.files import writing
from patchkit.parity import rollout_engine as engines
from patchkit.parity.tiny_checkpoint import make_tiny_checkpoint
from patchkit.runtime.contract import Contract, observe, preflight
from patchkit.runtime.environment import Environment
from patchkit.runtime.profile import Profile, load_profile

Observer = Callable[[str], None]

_NEEDED = ("tiny_model", "logprobs", "weight_map", "profiles")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """What to run.

    Attributes:
        adapter: Adapter's name.
        profile: Which of its profiles; the adapter's own default if empty.
        tensor_parallel_size: vLLM workers.
        ranks: FSDP ranks of the trainer.
        sequences: Sampled per phase.
        folder: Where models, logs and the artifact go; one new folder a run.
        seed: Of prompts and weights.
        stock: Also score the tokens with the stock pair.
        model_changes: Settings of the tiny model that differ from the adapter's.
        providers: Operator to implementation, beside what the profile says; each is
            allowed then, and has to be admitted.
        accept_providers: Implementations used unadmitted, package to digest.
        accept_all2all: All-to-all backend used uncompared, to digest.
    """

    adapter: str
    folder: Path
    profile: str = ""
    tensor_parallel_size: int = 1
    ranks: int = 2
    sequences: int = 64
    seed: int = 0
    stock: bool = True
    attention: str = "sdpa"
    checkpointing: str | None = "non_reentrant"
    model_changes: dict[str, Any] = field(default_factory=dict)
    providers: dict[str, str] = field(default_factory=dict)
    accept_providers: dict[str, str] = field(default_factory=dict)
    accept_all2all: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSetup:
    """A demo that may start.

    Attributes:
        settings: What was asked for.
        adapter: The adapter.
        folder: The run's folder, absolute.
        model: The initial checkpoint.
        contract: Validated against this machine.
    """

    settings: DemoSettings
    adapter: Adapter
    folder: Path
    model: Path
    contract: Contract


def set_up(settings: DemoSettings, observe_stage: Observer = lambda stage: None) -> DemoSetup:
    """Make the model, validate the profile, and set this process's environment.

    Raises:
        ConfigurationError: The adapter lacks something that the demo needs.
        ContractError: With everything that stands against the profile.
    """
    adapter = find_adapter(settings.adapter)
    if missing := [name for name in _NEEDED if not getattr(adapter, name)]:
        raise ConfigurationError(
            f"adapter {adapter.name!r} declares no {', '.join(missing)}; the demo needs a tiny "
            "model, the trainer's log-probabilities, a weight map and profiles"
        )
    profile = demo_profile(settings, adapter)
    folder = settings.folder.absolute()
    model = folder / "checkpoint-0"
    observe_stage("make a tiny model with random weights")
    make_tiny_checkpoint(adapter, model, seed=settings.seed, changes=settings.model_changes)
    observe_stage(f"check profile {profile.name!r} against this machine")
    contract = preflight(
        profile,
        observe(profile, model),
        opt_in=True,
        run_dir=folder / "attestations",
        accept_providers=settings.accept_providers,
        accept_all2all=settings.accept_all2all,
    )
    contract.environment.apply()
    Environment(engines.environment(settings.tensor_parallel_size)).apply()
    os.environ["PATCHKIT_CANARY"] = "1"
    return DemoSetup(
        settings=settings, adapter=adapter, folder=folder, model=model, contract=contract
    )


def demo_profile(settings: DemoSettings, adapter: Adapter) -> Profile:
    """The adapter's profile at the demo's topology."""
    name = adapter.profile(settings.profile)
    assert adapter.profiles is not None  # checked by set_up
    profile = load_profile(adapter.profiles / f"{name}.toml")
    chosen = profile.content.providers
    return profile.changed(
        **{
            "topology.rollout.tensor": settings.tensor_parallel_size,
            "topology.trainer.data": settings.ranks,
        },
        **(
            {
                "providers.use": {**chosen.use, **settings.providers},
                "providers.allow": [*chosen.allow, *sorted(set(settings.providers.values()))],
            }
            if settings.providers
            else {}
        ),
    )


def new_run_folder(parent: Path) -> Path:
    """A folder for one run, named by the time; never one that exists."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    with writing(parent):
        parent.mkdir(parents=True, exist_ok=True)
        for suffix in ("", *(f"-{i}" for i in range(1, 100))):
            folder = parent / f"{stamp}{suffix}"
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            return folder
    raise PatchkitError(f"{parent}: a hundred runs within one second")
