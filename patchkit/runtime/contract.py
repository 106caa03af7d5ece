"""A profile, validated against this machine, before anything is started.

Preflight looks at everything it can without starting anything (no Ray, no model, no
GPU context) and reports all of it. What comes out is a contract: its digest is what
every process attests, its environment is what every process gets.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from patchkit.errors import ConfigurationError, PatchkitError, Violation, ViolationsError
from patchkit.files import write_atomically
from patchkit.runtime import all2all
from patchkit.runtime.canonical import canonical_json, digest_of
from patchkit.runtime.environment import Environment, loaded_too_early
from patchkit.runtime.profile import ANY_MODEL, Profile
from patchkit.runtime.providers import (
    Standing,
    find_implementation,
    standing_of,
    used_implementations,
)

__all__ = ["Contract", "ContractError", "Machine", "observe", "preflight", "read_model_config"]


class ContractError(ViolationsError, ConfigurationError):
    """A profile that this machine, or this run, does not fulfil."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What preflight looks at; observed here, or made up in a test.

    Attributes:
        packages: Installed version of each package the profile pins; None if absent.
        adapters: Names of installed adapters.
        model_config: Content of the model's ``config.json``; None if not found.
        environment: Variables of this process.
        loaded: Modules that have read their variables already.
        ray_connected: Whether this process is connected to a Ray cluster.
        devices: Accelerators, or None on a machine without (where CPU ranks share).
        known_fields: vLLM versions whose request fields are known.
        used_providers: Implementations that the profile's patches import.
        standings: How each implementation that is used or allowed stands here; None for
            what is no implementation.
        all2all_digest: Of vLLM's sources of the profile's all-to-all backend; None where
            they were not found.
    """

    packages: Mapping[str, str | None]
    adapters: tuple[str, ...]
    model_config: Mapping[str, Any] | None
    environment: Mapping[str, str] = field(default_factory=dict)
    loaded: tuple[str, ...] = ()
    ray_connected: bool = False
    devices: int | None = None
    known_fields: tuple[str, ...] = ()
    used_providers: tuple[str, ...] = ()
    standings: Mapping[str, Standing | None] = field(default_factory=dict)
    all2all_digest: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """A validated profile.

    Attributes:
        profile: The profile.
        content: What the digest covers: the profile, the versions installed, the
            model's configuration, the all-to-all backend where experts are spread over
            ranks, and what was accepted without review.
        environment: For every process of both sides.
    """

    profile: Profile
    content: Mapping[str, Any]
    environment: Environment

    @property
    def digest(self) -> str:
        return digest_of(self.content)

    @property
    def on_policy(self) -> bool:
        """Whether tokens of such a run may be called on-policy, once proven."""
        return self.profile.content.profile.claim == "on_policy"

    @property
    def accepted_all2all(self) -> Mapping[str, str]:
        """All-to-all backends accepted unreviewed, for the engine gate."""
        return dict(self.content.get("uncompared", {}))

    def as_dict(self) -> dict[str, Any]:
        return json.loads(canonical_json(dict(self.content)))  # type: ignore[no-any-return]

    def write(self, folder: str | Path) -> Path:
        """Write ``contract.json`` for whoever looks at a run later."""
        data = json.dumps({"digest": self.digest, "content": self.as_dict()}, indent=1)
        return write_atomically(Path(folder) / "contract.json", data.encode())


def observe(profile: Profile, model: str | Path) -> Machine:
    """Look at this process and machine. Imports neither torch, vLLM nor Ray.

    Args:
        profile: Which packages to look for.
        model: Folder with ``config.json``.
    """
    from patchkit.engine import adapter_names
    from patchkit.runtime.sampling_fields import FIELDS
    from patchkit.symbols import installed_version

    def version(package: str) -> str | None:
        try:
            return installed_version(package)
        except PatchkitError:
            return None

    config = Path(model) / "config.json"
    ray = sys.modules.get("ray")
    used = _used_providers(profile)
    return Machine(
        packages={p: version(p) for p in {*profile.content.packages, "vllm"}},
        adapters=tuple(adapter_names()),
        model_config=read_model_config(config),
        environment=dict(os.environ),
        loaded=loaded_too_early(),
        ray_connected=bool(ray is not None and ray.is_initialized()),
        devices=_devices(),
        known_fields=tuple(FIELDS),
        used_providers=used,
        standings=_standings((*used, *profile.content.providers.allow)),
        all2all_digest=all2all.sources_digest(profile.content.engine.all2all_backend),
    )


def read_model_config(file: Path) -> dict[str, Any] | None:
    """The content of a ``config.json``; None where there is none.

    Raises:
        ConfigurationError: It is damaged.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{file}: cannot be read ({error}); use the config.json that transformers wrote"
        ) from error
    if not isinstance(found, dict):
        raise ConfigurationError(
            f"{file}: expected a JSON object, found {type(found).__name__}; use the config.json "
            "that transformers wrote"
        )
    return found


def _used_providers(profile: Profile) -> tuple[str, ...]:
    from patchkit.engine import adapter_names, find_adapter

    name = profile.content.profile.adapter
    if name not in adapter_names():
        return ()  # said elsewhere
    return used_implementations(find_adapter(name), profile.name)


def _standings(modules: Iterable[str]) -> dict[str, Standing | None]:
    found: dict[str, Standing | None] = {}
    for module in modules:
        implementation = find_implementation(module)
        found[module] = standing_of(implementation) if implementation else None
    return found


def _devices() -> int | None:
    """NVIDIA devices, counted without a driver call; None where there is no driver."""
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else None


def preflight(
    profile: Profile,
    machine: Machine,
    *,
    opt_in: bool = False,
    run_dir: str | Path,
    accept: Mapping[str, str] | None = None,
    accept_providers: Mapping[str, str] | None = None,
    accept_all2all: Mapping[str, str] | None = None,
    covers: Any = None,
) -> Contract:
    """Validate, or refuse with everything that is wrong.

    Args:
        profile: The profile.
        machine: From :func:`observe`.
        opt_in: The caller's explicit consent: exactness costs speed and excludes
            features, so nobody gets it by accident.
        run_dir: A new folder for the attestations of this start.
        accept: Drifted symbols accepted for this run, symbol to digest.
        accept_providers: Implementations used although nobody admitted them here, package
            to digest of its sources; every output says so.
        accept_all2all: All-to-all backend used although no run that entered it was
            compared, to the digest of its sources; every output says so.
        covers: The adapter's ``covers`` function, resolved; looked up if None.

    Raises:
        ContractError: Nothing was started.
    """
    violations = [
        *_consent(profile, opt_in),
        *_adapter(profile, machine, covers),
        *_packages(profile, machine),
        *_model(profile, machine),
        *_topology(profile, machine),
        *_claim(profile),
        *_providers(profile, machine, accept_providers or {}),
        *all2all.check_all2all(
            profile,
            model_config=machine.model_config,
            environment=machine.environment,
            digest=machine.all2all_digest,
            accepted=accept_all2all or {},
        ),
        *_lateness(profile, machine),
        *_folder(run_dir),
    ]
    if violations:
        raise ContractError(f"profile {profile.name!r} is refused; nothing started", violations)
    content = {
        "profile": profile.as_dict(),
        "packages": dict(sorted(machine.packages.items())),
        "model_config": digest_of(machine.model_config),
        "unreviewed": dict(sorted((accept or {}).items())),
    }
    if accept_providers:
        content["unadmitted"] = dict(sorted(accept_providers.items()))
    if all2all.named(profile.content, machine.model_config):
        content["all2all_backend"] = profile.content.engine.all2all_backend
    if accept_all2all:
        content["uncompared"] = dict(sorted(accept_all2all.items()))
    variables = {
        **profile.engine_environment(),
        "PATCHKIT_ENABLE": "1",
        "PATCHKIT_ADAPTER": profile.content.profile.adapter,
        "PATCHKIT_PROFILE": profile.name,
        "PATCHKIT_SAMPLING": profile.content.sampling.policy,
        "PATCHKIT_CONTRACT_DIGEST": digest_of(content),
        "PATCHKIT_RUN_DIR": str(Path(run_dir).absolute()),
        "PATCHKIT_PACKAGES": json.dumps(content["packages"]),
        "PATCHKIT_VARIABLES": " ".join(sorted(profile.content.environment)),
        # Empty where nothing was chosen: what an earlier run left would be inherited.
        "PATCHKIT_PROVIDERS": _chosen(profile.content.providers.use),
        "PATCHKIT_ACCEPT": _chosen(accept or {}),
    }
    return Contract(
        profile=profile,
        content=content,
        environment=Environment(variables, private=frozenset({"PATCHKIT_RUN_DIR"})),
    )


def _chosen(choice: Mapping[str, str]) -> str:
    return json.dumps(dict(sorted(choice.items()))) if choice else ""


# -- checks; each yields what it finds ------------------------------------------------------


def _consent(profile: Profile, opt_in: bool) -> Iterator[Violation]:
    if not opt_in:
        yield _wrong(
            profile,
            "profile.name",
            "nobody asked for it",
            "opt_in=True",
            "opt_in=False",
            "exactness excludes features and costs speed: pass opt_in=True where it is wanted",
        )


def _adapter(profile: Profile, machine: Machine, covers: Any) -> Iterator[Violation]:
    name = profile.content.profile.adapter
    if name not in machine.adapters:
        yield _wrong(
            profile,
            "profile.adapter",
            "no such adapter is installed",
            name,
            ", ".join(machine.adapters) or "none",
            "install the package that provides it, or correct the name",
        )
        return
    if machine.model_config is None:
        return
    if covers is None:
        from patchkit.engine import find_adapter, resolve_reference

        reference = find_adapter(name).covers
        covers = resolve_reference(reference) if reference else None
    tensor = profile.content.topology.rollout.tensor
    found = covers(machine.model_config, rollout_tensor=tensor) if covers is not None else ()
    for v in found:
        yield replace(v, subject=f"{profile.where('model.architecture')}: {v.subject}")


def _packages(profile: Profile, machine: Machine) -> Iterator[Violation]:
    from packaging.specifiers import SpecifierSet

    for name, specifier in profile.content.packages.items():
        found = machine.packages.get(name)
        if found is None or not SpecifierSet(specifier).contains(found, prereleases=True):
            yield _wrong(
                profile,
                f"packages.{name}",
                "not installed" if found is None else "another version is installed",
                specifier,
                found or "nothing",
                f"install {name}{specifier}, or use a profile for what is installed",
            )
    for name in ("vllm", "torch", "transformers"):
        if name not in profile.content.packages:
            yield _wrong(
                profile,
                "packages",
                f"{name} is not pinned",
                f'{name} = "==…"',
                ", ".join(profile.content.packages) or "nothing",
                "pin it: patches are reviewed for versions",
            )
    vllm = machine.packages.get("vllm")
    if vllm is not None:
        from packaging.version import Version

        if Version(vllm).public not in machine.known_fields:
            yield _wrong(
                profile,
                "sampling.policy",
                f"the request fields of vLLM {vllm} are not known",
                " or ".join(machine.known_fields) or "a known version",
                vllm,
                "add them with `python -m patchkit.runtime.sampling_fields` and decide about "
                "each new one",
            )


def _model(profile: Profile, machine: Machine) -> Iterator[Violation]:
    config = machine.model_config
    if config is None:
        yield _wrong(
            profile,
            "model.id",
            "no config.json in the model's folder",
            "a checkpoint in Hugging Face layout",
            "nothing",
            "download the revision first: nothing is fetched while a run starts",
        )
        return
    wanted = profile.content.model.architecture
    found = config.get("architectures") or []
    if wanted == ANY_MODEL:
        if profile.content.profile.claim == "on_policy":
            yield _wrong(
                profile,
                "model.architecture",
                'the claim "on_policy" is made for one model',
                "the architecture that the adapter was certified for",
                wanted,
                "name it, or make another claim",
            )
    elif found != [wanted]:
        yield _wrong(
            profile,
            "model.architecture",
            "another model",
            wanted,
            str(found),
            "use the model's own profile",
        )
    if config.get("quantization_config"):
        yield _wrong(
            profile,
            "engine.quantization",
            "the checkpoint is quantised",
            "none",
            str(config["quantization_config"].get("quant_method", "some")),
            "use the unquantised checkpoint",
        )


def _topology(profile: Profile, machine: Machine) -> Iterator[Violation]:
    t = profile.content.topology
    for side, p in (("rollout", t.rollout), ("trainer", t.trainer)):
        for dimension in ("pipeline", "context"):
            if getattr(p, dimension) != 1:
                yield _wrong(
                    profile,
                    f"topology.{side}.{dimension}",
                    "not certified",
                    "1",
                    str(getattr(p, dimension)),
                    "use tensor, expert or data parallelism",
                )
        if p.expert not in (1, p.tensor * p.data):
            yield _wrong(
                profile,
                f"topology.{side}.expert",
                "no such expert-parallel group exists",
                f"1, or tensor x data = {p.tensor * p.data}",
                str(p.expert),
                "expert parallelism reuses the ranks of tensor and data parallelism",
            )
        if machine.devices is not None and p.ranks > machine.devices:
            yield _wrong(
                profile,
                f"topology.{side}",
                "more ranks than accelerators on this machine",
                f"at most {machine.devices}",
                str(p.ranks),
                "use a smaller topology, or more machines",
            )
    if t.trainer.tensor != 1:
        yield _wrong(
            profile,
            "topology.trainer.tensor",
            "not certified",
            "1 (FSDP shards over data)",
            str(t.trainer.tensor),
            "shard the trainer with FSDP2 over data ranks",
        )


def _claim(profile: Profile) -> Iterator[Violation]:
    c = profile.content
    claim = c.profile.claim
    wanted = {"on_policy": "on_policy", "greedy_smoke": "greedy_smoke", "in_flight": "on_policy"}
    if c.sampling.policy != wanted[claim]:
        yield _wrong(
            profile,
            "sampling.policy",
            f'does not go with the claim "{claim}"',
            wanted[claim],
            c.sampling.policy,
            "greedy decoding is a smoke test and never on-policy",
        )
    if claim == "on_policy":
        for key, found, expected, why in (
            ("weights.receipts", c.weights.receipts, "enforce", "loaded weights are not proven"),
            (
                "engine.cascade_attention",
                c.engine.cascade_attention,
                False,
                "a shared prefix is reduced in another order",
            ),
            (
                "engine.async_scheduling",
                c.engine.async_scheduling,
                False,
                "not certified",
            ),
        ):
            if found != expected:
                yield _wrong(
                    profile,
                    key,
                    f'{why}, so the claim "on_policy" cannot be made',
                    str(expected),
                    str(found),
                    "change it, or make another claim",
                )
    if c.engine.enforce_eager and (c.engine.compilation, c.engine.cuda_graphs) != ("none", "none"):
        yield _wrong(
            profile,
            "engine.enforce_eager",
            "contradicts compilation or CUDA graphs",
            'compilation = "none", cuda_graphs = "none"',
            f"{c.engine.compilation}, {c.engine.cuda_graphs}",
            "eager engines neither compile nor capture",
        )
    if claim == "in_flight" and c.weights.caches == "reset":
        yield _wrong(
            profile,
            "weights.caches",
            "a reset throws away what running requests need",
            "salt",
            "reset",
            'use caches = "salt", or the claim "on_policy"',
        )


def _providers(
    profile: Profile, machine: Machine, accepted: Mapping[str, str]
) -> Iterator[Violation]:
    chosen = profile.content.providers
    needed = {*machine.used_providers, *chosen.use.values()}
    for module in sorted(needed - set(chosen.allow)):
        yield _wrong(
            profile,
            "providers.allow",
            f"{module} is used and not allowed",
            "the reference, or an implementation that the profile names",
            ", ".join(chosen.allow) or "none is named",
            f'add "{module}" to [providers] allow, once it is admitted (`patchkit admit '
            f"{module} --write`), or use a profile without it",
        )
    for operator, module in sorted(chosen.use.items()):
        standing = machine.standings.get(module)
        if standing is not None and operator not in standing.operators:
            yield _wrong(
                profile,
                f"providers.use.{operator}",
                f"{module} has no such operator",
                ", ".join(standing.operators),
                operator,
                "correct the operator's name, or take it out",
            )
    for module in sorted({*chosen.allow, *accepted}):
        yield from _standing(profile, module, machine.standings.get(module), accepted)


def _standing(
    profile: Profile, module: str, standing: Standing | None, accepted: Mapping[str, str]
) -> Iterator[Violation]:
    key = "providers.allow"
    if standing is None:
        yield _wrong(
            profile,
            key,
            f"{module} is no implementation of operators",
            "a package that says IMPLEMENTS, DEVICE and CASES",
            "another module, or none",
            "correct the name, or take it out",
        )
        return
    digest = accepted.get(module)
    if digest is not None and (standing.admitted or digest != standing.digest):
        yield _wrong(
            profile,
            key,
            f"{module} is accepted unadmitted, which does not fit",
            f"digest {standing.digest}, of an implementation that is not admitted",
            f"digest {digest}" + (", and it is admitted" if standing.admitted else ""),
            "leave it out, or name the digest found: a stale exception would hide the next change",
        )
    elif digest is None and not standing.admitted:
        yield _wrong(
            profile,
            key,
            f"{module} is not admitted here",
            standing.expected,
            standing.found,
            f"`patchkit admit {module} --write` on this machine; for one run, unadmitted: "
            f"accept {module}={standing.digest}, and every output says so",
        )


def _lateness(profile: Profile, machine: Machine) -> Iterator[Violation]:
    wanted = profile.engine_environment()
    for name, value in sorted(wanted.items()):
        found = machine.environment.get(name)
        if found == value:
            continue
        key = f"environment.{name}" if name in profile.content.environment else "engine"
        if machine.loaded:
            yield _wrong(
                profile,
                key,
                f"{name} would be set after {', '.join(machine.loaded)} read it",
                value,
                "not set" if found is None else found,
                "set it before Python starts, or validate the contract before importing torch",
            )
        elif machine.ray_connected:
            yield _wrong(
                profile,
                key,
                f"{name} would be set after this process connected to Ray",
                value,
                "not set" if found is None else found,
                "validate the contract first, then ray.init(runtime_env="
                "contract.environment.ray_runtime_env())",
            )


def _folder(run_dir: str | Path) -> Iterator[Violation]:
    path = Path(run_dir)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        yield Violation(
            subject=str(path),
            problem="attestations of an earlier start, or something else, lie there",
            expected="a folder that is empty or does not exist yet",
            found="a file" if not path.is_dir() else f"{len(list(path.iterdir()))} entries",
            remedy="use a new folder for each start of an engine",
        )


def _wrong(
    profile: Profile, key: str, problem: str, expected: str, found: str, remedy: str
) -> Violation:
    return Violation(
        subject=profile.where(key), problem=problem, expected=expected, found=found, remedy=remedy
    )
