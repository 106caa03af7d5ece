"""Ray, with a bound on every wait: who does not answer is named, and nothing hangs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from grpo_qwen3_moe.actors import TrainerActor
from grpo_qwen3_moe.settings import Bounds, LoopSettings
from patchkit.errors import ConfigurationError, PatchkitError
from patchkit.parity.trainer_group import RankSettings, TrainerGroupError
from patchkit.runtime.environment import Environment
from patchkit.runtime.ray_cluster import require_cluster_environment

_OBJECT_STORE = 200 * 1024**2


class ActorLostError(PatchkitError):
    """An actor died, or did not answer within its bound.

    Attributes:
        who: Which.
        command: What it was asked.
    """

    def __init__(self, who: str, command: str, reason: str) -> None:
        self.who, self.command = who, command
        super().__init__(
            f"{who}: lost during {command!r}: {reason}. No optimizer step was taken on what it "
            "would have answered. Its own log is in /tmp/ray/session_latest/logs; start the run "
            "again from its last checkpoint."
        )


def connect(settings: LoopSettings, environment: Environment) -> None:
    """Start a cluster of the run's own, or join one that has the contract's environment.

    Call it after the contract was validated and applied: a cluster that starts now
    inherits this process's environment.

    Raises:
        ClusterEnvironmentError: The cluster was started with another one.
    """
    if settings.address == "local":
        ray.init(
            address="local",
            num_cpus=settings.ranks + settings.tensor_parallel_size + 1,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE,
            log_to_driver=False,
            logging_level="WARNING",
        )
    else:
        try:
            ray.init(address=settings.address, log_to_driver=False, logging_level="WARNING")
        except ConnectionError as error:
            raise ConfigurationError(
                f"Ray cluster {settings.address}: cannot be joined ({error}). Is it running, and "
                "is its token in RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH? `--address local` starts "
                "a cluster of the run's own."
            ) from error
    try:
        require_cluster_environment(environment)
    except BaseException:
        ray.shutdown()
        raise


def actor(cls: type, environment: Mapping[str, str], *, cpus: float, gpus: float) -> Any:
    """Start an actor that is never restarted behind our back."""
    remote: Any = ray.remote(cls)
    return remote.options(
        num_cpus=cpus,
        num_gpus=gpus,
        max_restarts=0,
        runtime_env={"env_vars": dict(environment)},
    ).remote()


def answer(who: str, command: str, reference: Any, bound_s: float) -> Any:
    """Wait for one answer.

    Raises:
        ActorLostError: The actor died or took too long. What the actor's method
            raised comes through as it is.
    """
    try:
        return ray.get(reference, timeout=bound_s)
    except RayActorError as error:
        raise ActorLostError(who, command, _reason(error)) from error
    except GetTimeoutError as error:
        raise ActorLostError(who, command, f"no answer within {bound_s:g} s") from error
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, PatchkitError):
            raise cause from error
        raise


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "its process ended (" + " ".join(lines[:1])[:300].rstrip(".") + ")"


class TrainerActors:
    """All FSDP2 ranks as Ray actors, called together and judged together."""

    def __init__(
        self,
        settings: RankSettings,
        environment: Mapping[str, str],
        bounds: Bounds,
        *,
        gpus: float = 0.0,
    ) -> None:
        self._bounds = bounds
        self._actors = [
            actor(TrainerActor, environment, cpus=1, gpus=gpus) for _ in range(settings.world_size)
        ]
        self._starting = [a.start.remote(r, settings) for r, a in enumerate(self._actors)]

    def ready(self) -> list[Any]:
        """Runtime manifests, once every rank has its patches and its model."""
        return self._collect("start", self._starting, self._bounds.start_s)

    def __call__(self, command: str, **arguments: Any) -> list[Any]:
        """Run a command on every rank; answers in rank order.

        Raises:
            TrainerGroupError: Naming every rank that raised, died or was too slow.
        """
        references = [a.call.remote(command, arguments) for a in self._actors]
        return self._collect(command, references, self._bounds.command_s)

    def one(self, rank: int, command: str, **arguments: Any) -> Any:
        """Run a command that needs no other rank on one rank."""
        reference = self._actors[rank].call.remote(command, arguments)
        good, value = answer(f"trainer {rank}", command, reference, self._bounds.command_s)
        if not good:
            raise TrainerGroupError(command, {rank: value}, {})
        return value

    def _collect(self, command: str, references: list[Any], bound_s: float) -> list[Any]:
        ranks = {reference: rank for rank, reference in enumerate(references)}
        waiting = list(references)
        answers: dict[int, Any] = {}
        errors: dict[int, BaseException | str] = {}
        lost: dict[int, int | None] = {}
        deadline = time.monotonic() + bound_s
        while waiting:
            left = max(0.0, deadline - time.monotonic())
            done, waiting = ray.wait(waiting, num_returns=1, timeout=left)
            if not done:
                late = f"no answer within {bound_s:g} s, or since another rank was lost"
                errors.update({ranks[reference]: late for reference in waiting})
                break
            rank = ranks[done[0]]
            try:
                good, value = ray.get(done[0])
            except RayActorError:
                lost[rank] = None
                # The others cannot finish without it; they only get time to say so.
                deadline = min(deadline, time.monotonic() + self._bounds.grace_s)
                continue
            (answers if good else errors)[rank] = value
        if errors or lost:
            raise TrainerGroupError(command, errors, lost)
        return [answers[rank] for rank in range(len(references))]

    def close(self) -> None:
        for handle in self._actors:
            ray.kill(handle)
