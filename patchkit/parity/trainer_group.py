"""The reference trainer's ranks as processes, driven from one place.

The driver sends a command to every rank and waits for every answer; a rank that
raised answers with its error, and a rank that died is noticed at once (its
process handle becomes readable), so the driver never waits for nobody.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from patchkit.errors import PatchkitError
from patchkit.runtime.attestation import attest


class TrainerGroupError(PatchkitError):
    """At least one rank failed.

    Attributes:
        command: What was asked.
        errors: Rank to the exception, or to text where it could not be sent.
        lost: Ranks whose process ended, with their exit codes where known.
    """

    def __init__(
        self, command: str, errors: dict[int, BaseException | str], lost: dict[int, int | None]
    ) -> None:
        self.command, self.errors, self.lost = command, errors, lost
        lines = [
            f"rank {rank}: process ended "
            + ("(exit code unknown)" if code is None else f"with exit code {code}")
            for rank, code in lost.items()
        ]
        lines += [f"rank {rank}: {error}" for rank, error in sorted(errors.items())]
        super().__init__(f"trainer: {command!r} failed\n" + "\n".join(lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """What a rank needs to start; plain data that survives a spawn.

    Attributes:
        adapter: Adapter to install on the trainer side; none for a stock trainer.
        profile: Profile that decides which of its patches apply.
        world_size: Number of ranks.
        rendezvous: File of the process group's store.
        environment: Variables set before anything imports torch.
        build: ``module:qualname`` of a function ``(settings) -> object`` whose
            methods are the commands.
        options: Passed to ``build`` through the settings.
        device: ``cpu`` or ``cuda``.
        collective_timeout_s: How long a rank waits in a collective that another rank
            has left by an exception. The gate has a bound of its own.
    """

    adapter: str
    profile: str
    world_size: int
    rendezvous: str
    environment: dict[str, str]
    build: str
    options: Any
    collective_timeout_s: float
    device: str = "cpu"


class TrainerGroup:
    """All ranks of a trainer, as child processes.

    Args:
        settings: The same for all ranks but the rank itself.
        timeout_s: How long one command may take on any rank.
    """

    def __init__(self, settings: RankSettings, *, timeout_s: float = 300.0) -> None:
        self.timeout_s = timeout_s
        self._sent = 0  # the latest command's number; the start has none
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        context = multiprocessing.get_context("spawn")
        for rank in range(settings.world_size):
            here, there = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(rank, settings, there), name=f"trainer-{rank}", daemon=True
            )
            with _environment(settings.environment):
                process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    @classmethod
    def start(
        cls,
        *,
        adapter: str,
        profile: str,
        world_size: int,
        build: str,
        options: Any,
        environment: dict[str, str] | None = None,
        timeout_s: float = 300.0,
        collective_timeout_s: float = 120.0,
    ) -> TrainerGroup:
        """Start the processes; :meth:`ready` waits until they can work."""
        folder = tempfile.mkdtemp(prefix="patchkit-trainer-")
        return cls(
            RankSettings(
                adapter=adapter,
                profile=profile,
                world_size=world_size,
                rendezvous=os.path.join(folder, "store"),
                environment=environment or {},
                build=build,
                options=options,
                collective_timeout_s=collective_timeout_s,
            ),
            timeout_s=timeout_s,
        )

    def ready(self) -> list[Any]:
        """Wait until every rank has installed its patches and built its model.

        Returns:
            Each rank's runtime manifest, as a mapping.
        """
        return self._collect("start", 0)

    def __call__(self, command: str, **arguments: Any) -> list[Any]:
        """Run a command on every rank; answers in rank order.

        Raises:
            TrainerGroupError: A rank raised, died, or took longer than ``timeout_s``.
        """
        self.send(command, **arguments)
        return self._collect(command, self._sent)

    def send(self, command: str, **arguments: Any) -> None:
        """Start a command without waiting; :meth:`collect` gets the answers."""
        self._sent += 1
        for pipe in self._pipes:
            try:
                pipe.send((self._sent, command, arguments))
            except (BrokenPipeError, OSError):
                continue  # the lost rank is named when the answers are collected

    def collect(self, command: str) -> list[Any]:
        """Answers of the command that was sent last."""
        return self._collect(command, self._sent)

    def _collect(self, command: str, awaited: int) -> list[Any]:
        answers: dict[int, Any] = {}
        errors: dict[int, BaseException | str] = {}
        lost: dict[int, int | None] = {}
        deadline = time.monotonic() + self.timeout_s
        while len(answers) + len(errors) + len(lost) < len(self._pipes):
            open_ranks = [
                r
                for r in range(len(self._pipes))
                if r not in answers | errors | lost  # type: ignore[operator]
            ]
            ready = wait(
                [h for r in open_ranks for h in (self._pipes[r], self._processes[r].sentinel)],
                timeout=max(0.0, deadline - time.monotonic()),
            )
            if not ready:
                errors.update(dict.fromkeys(open_ranks, f"no answer within {self.timeout_s:g} s"))
                break
            for rank in open_ranks:
                pipe, process = self._pipes[rank], self._processes[rank]
                if pipe in ready:
                    try:
                        number, ok, value = pipe.recv()
                    except (EOFError, OSError):
                        process.join(5)
                        lost[rank] = process.exitcode
                        continue
                    if number == awaited:  # not the late answer to what was given up
                        (answers if ok else errors)[rank] = value
                elif process.sentinel in ready and not pipe.poll():
                    process.join(5)  # its end is known a moment before its exit code
                    lost[rank] = process.exitcode
        if errors or lost:
            raise TrainerGroupError(command, errors, lost)
        return [answers[rank] for rank in range(len(self._pipes))]

    def close(self) -> None:
        """End all ranks; never waits longer than some seconds."""
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except (BrokenPipeError, OSError):
                continue
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join(5)
        for pipe in self._pipes:
            pipe.close()

    @property
    def processes(self) -> list[Any]:
        """The rank processes, in rank order."""
        return list(self._processes)

    def __enter__(self) -> TrainerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _environment:
    """Variables that a spawned interpreter must see before its first import."""

    def __init__(self, variables: dict[str, str]) -> None:
        self._variables = variables

    def __enter__(self) -> None:
        self._before = {name: os.environ.get(name) for name in self._variables}
        os.environ.update(self._variables)

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _rank_main(rank: int, settings: RankSettings, pipe: Connection) -> None:
    try:
        worker, manifest = start_rank(rank, settings)
    except BaseException as error:
        pipe.send((0, False, sendable(error)))
        raise SystemExit(1) from error
    pipe.send((0, True, manifest))
    while (message := pipe.recv()) is not None:
        number, command, arguments = message
        method: Callable[..., Any] = getattr(worker, command)
        try:
            answer = (number, True, method(**arguments))
        except Exception as error:
            answer = (number, False, sendable(error))
        pipe.send(answer)
    import torch.distributed as dist

    dist.destroy_process_group()


def start_rank(rank: int, settings: RankSettings) -> tuple[Any, Any]:
    """Make this process one rank: patches, process group, model; then attest.

    Returns:
        What ``settings.build`` made, and the runtime manifest as plain data.
    """
    import torch
    import torch.distributed as dist

    import patchkit
    from patchkit.engine import resolve_reference

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # Before any model class is instantiated: the patches must be there first.
    installation = None
    if settings.adapter:
        installation = patchkit.install(
            adapter=settings.adapter, side="trainer", profile=settings.profile
        )
    dist.init_process_group(
        # The gate and the receipts speak gloo on every device.
        "gloo" if settings.device == "cpu" else "cpu:gloo,cuda:nccl",
        store=dist.FileStore(settings.rendezvous, settings.world_size),
        rank=rank,
        world_size=settings.world_size,
        timeout=timedelta(seconds=settings.collective_timeout_s),
    )
    worker = resolve_reference(settings.build)(settings, installation)
    if installation is None:
        return worker, {}
    # Now, and not before: every module that the patches wait for has been imported.
    attest(role="trainer", rank=rank, installation=installation)
    return worker, installation.manifest.as_dict()


def sendable(error: BaseException) -> BaseException | str:
    """The exception itself where it survives pickling, else its traceback as text."""
    import pickle

    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return "".join(traceback.format_exception(error))
    return error
