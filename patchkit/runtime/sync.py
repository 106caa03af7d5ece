"""Weight updates as transactions with a policy version.

::

    sync = WeightSync(llm, weight_map=adapter.weight_map)
    sync.begin(trainer_receipt)                       # version 0: what was loaded at start
    sync.update(1, ["step1.safetensors"], trainer_receipt)
    sync.update_from(2, parts, trainer_receipt)       # device memory: patchkit.runtime.sharing

What can be refused is refused before anything changes (a version delivered
twice or out of order, requests under way, a cache that cannot be reset, a missing
file): the engine stays usable with its old version. From the start of the
update on there is no way back, because the old weights are being overwritten: any
failure poisons the engine. Only when all workers' receipts add up to the trainer's
and the caches are known to be empty does the version change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from patchkit.errors import ConfigurationError, Violation, ViolationsError
from patchkit.runtime.state import EngineState
from patchkit.runtime.weights import Piece, Receipt, compare_receipts, parameter_digest

__all__ = [
    "BACKEND",
    "BACKENDS",
    "IPC_BACKEND",
    "Caches",
    "Mode",
    "SyncRecord",
    "WeightSync",
    "WeightSyncError",
    "WeightUpdateRefusedError",
    "register_backend",
]

BACKEND = "patchkit_file"
IPC_BACKEND = "patchkit_ipc"

# By the profile's ``weights.path``.
BACKENDS: Mapping[str, str] = {"files": BACKEND, "ipc": IPC_BACKEND}

_IMPLEMENTED = {
    BACKEND: ("patchkit.runtime.transfer", "FileWeightTransfer"),
    IPC_BACKEND: ("patchkit.runtime.shared_transfer", "SharedWeightTransfer"),
}

Mode = Literal["off", "log", "enforce"]
Caches = Literal["reset", "salt"]


class EngineControl(Protocol):
    """The part of ``vllm.LLM`` that an update needs, in every version we know.

    Where there are ``update_weight_version`` and ``get_weight_version`` (vLLM 0.30
    and later), each output tells which version drew which token.
    """

    llm_engine: Any

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, request: dict[str, Any]) -> None: ...
    def finish_weight_update(self) -> None: ...
    def reset_prefix_cache(self) -> bool: ...
    def collective_rpc(self, method: Any, *, args: tuple[Any, ...] = ...) -> list[Any]: ...


class WeightUpdateRefusedError(ViolationsError):
    """An update was refused before anything changed; the engine stays usable."""


class WeightSyncError(ViolationsError):
    """An update failed under way; the engine is poisoned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRecord:
    """What one transaction did, for the artifact.

    Attributes:
        version: The version committed (or, at ``begin``, the one found).
        previous: The version before.
        mode: ``off``, ``log`` or ``enforce``.
        caches: How stale cache entries were excluded.
        labels: ``engine``: its outputs carry the version of each token. ``driver``:
            this version of vLLM cannot; the driver knows, as long as it generates
            through an :class:`~patchkit.runtime.versions.UpdateBarrier` or in turns.
        in_flight: Whether requests went on running across the update.
        trainer: The trainer's receipt, if there was one.
        workers: One receipt per worker.
        received: What each worker read, before loading.
        violations: Differences that mode ``log`` let pass.
        seconds: Time per stage.
    """

    version: int
    previous: int | None
    mode: Mode
    caches: Caches
    labels: Literal["engine", "driver"] = "engine"
    in_flight: bool = False
    trainer: Receipt | None = None
    workers: tuple[Receipt, ...] = ()
    received: tuple[Receipt, ...] = ()
    violations: tuple[Violation, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "previous": self.previous,
            "mode": self.mode,
            "caches": self.caches,
            "labels": self.labels,
            "in_flight": self.in_flight,
            "trainer": self.trainer.as_dict() if self.trainer else None,
            "workers": [r.as_dict() for r in self.workers],
            "received": [{"holder": r.holder, "digest": r.digest} for r in self.received],
            "violations": [v.as_dict() for v in self.violations],
            "seconds": {k: round(v, 6) for k, v in self.seconds.items()},
        }


def register_backend() -> None:
    """Enter :data:`BACKENDS` into vLLM's registry, in this process, once.

    Every process that runs a worker needs it before its engine is built; the
    rollout plugin does it there.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, implementation in _IMPLEMENTED.items():
        if name not in _registered:
            # An entry that is not ours makes vLLM refuse this, as it should.
            WeightTransferEngineFactory.register_engine(name, *implementation)
            _registered.add(name)


_registered: set[str] = set()


class WeightSync:
    """Delivers policy versions to one vLLM engine.

    Args:
        engine: A ``vllm.LLM`` built with ``weight_transfer_config=
            WeightTransferConfig(backend=BACKEND)`` and ``worker_extension_cls=
            WORKER_EXTENSION`` (or with a class that inherits from it).
        weight_map: The adapter's weight map, ``"module:qualname"``; needed unless
            ``mode`` is ``off``.
        mode: What to do about receipts that differ: ``enforce`` poisons the
            engine, ``log`` records the difference, ``off`` makes no receipts.
        caches: ``reset`` empties the prefix cache at each version; ``salt`` leaves
            it to the caller to give :meth:`salt` with every request, so that no
            entry of another version can be hit and running requests keep theirs.
        state: Shared with the wrapper that generates; a new one if None.
        in_flight: Requests are paused, kept with their cache, and go on with the new
            weights. Their tokens come from several versions, so nothing drawn across
            such an update is on-policy; measure it with
            :func:`~patchkit.runtime.versions.lag_report`. Needs ``caches="salt"`` and an
            engine that can pause (:class:`~patchkit.runtime.async_engine.AsyncControl`).
    """

    def __init__(
        self,
        engine: EngineControl,
        *,
        weight_map: str | None = None,
        mode: Mode = "enforce",
        caches: Caches = "reset",
        state: EngineState | None = None,
        in_flight: bool = False,
    ) -> None:
        if in_flight and (caches != "salt" or not hasattr(engine, "pause_generation")):
            raise ConfigurationError(
                'WeightSync: in_flight=True needs caches="salt" (a reset would throw away what '
                "running requests need) and an engine with pause_generation and "
                f"resume_generation; found caches={caches!r} and {type(engine).__name__}"
            )
        if mode not in get_args(Mode) or caches not in get_args(Caches):
            raise ConfigurationError(
                f"WeightSync: mode is one of {get_args(Mode)} and caches one of "
                f"{get_args(Caches)}, found {mode!r} and {caches!r}"
            )
        if mode != "off" and not weight_map:
            raise ConfigurationError(
                f'WeightSync: mode "{mode}" needs a weight map ("module:qualname"); an adapter '
                'without one can only use mode="off", which proves nothing about loaded weights'
            )
        self._engine = engine
        self._weight_map = weight_map or ""
        self.mode: Mode = mode
        self.caches: Caches = caches
        self.in_flight = in_flight
        self.state = state or EngineState()

    @property
    def version(self) -> int | None:
        """The committed policy version."""
        return self.state.version

    def salt(self) -> str:
        """What requests of this version put into ``cache_salt``."""
        return f"patchkit-policy-{self.state.version}"

    def begin(
        self,
        trainer: Receipt | None = None,
        *,
        version: int = 0,
        parts: Iterable[Mapping[str, Any]] | None = None,
    ) -> SyncRecord:
        """Adopt the weights that the engine was started with as ``version``.

        Args:
            trainer: The trainer's receipt of the same checkpoint, to compare with; as in
                :meth:`update`, only modes other than ``enforce`` go without.
            version: Its policy version.
            parts: Weights to load first, as in :meth:`update_from`, into an engine that
                was started without any (``load_format="dummy"``).
        """
        self.state.require_usable("beginning weight synchronisation")
        if self.state.version is not None:
            raise WeightUpdateRefusedError(
                "weight synchronisation had begun",
                [
                    _violation(
                        "policy version", "begin was called twice", "no version", self.state.version
                    )
                ],
            )
        if refused := list(self._unfitting(version, trainer)):
            raise WeightUpdateRefusedError(
                f"the initial weights are not adopted as policy version {version}", refused
            )
        self._refuse_unless_resettable(version)
        self.state.updating = version
        with self._poisoning(version, "adopting the initial weights"):
            clock = _Clock()
            self._engine.init_weight_transfer_engine({"init_info": {}})
            clock("init")
            if parts is not None:
                self._load(parts, clock)
            workers, _, violations = self._receipts(version, trainer, (), clock, received=False)
            if parts is not None:
                self._reset_caches(version)
            self._commit(version, clock)
        return self._record(None, trainer, workers, (), violations, clock)

    def update(
        self,
        version: int,
        files: str | Path | Sequence[str | Path],
        trainer: Receipt | None = None,
    ) -> SyncRecord:
        """Deliver the weights of ``version`` and commit them, or poison the engine.

        Args:
            version: Must be greater than the committed one.
            files: safetensors files that every worker can read.
            trainer: The trainer's receipt of the same version.

        Raises:
            WeightUpdateRefusedError: Nothing has changed.
            WeightSyncError: The engine is poisoned.
        """
        paths = [Path(f) for f in ([files] if isinstance(files, str | Path) else files)]
        info = {
            "paths": [str(p.absolute()) for p in paths],
            "version": version,
            "receipt": self.mode != "off",
        }
        return self._update(version, [info], trainer, paths)

    def update_from(
        self,
        version: int,
        parts: Iterable[Mapping[str, Any]],
        trainer: Receipt | None = None,
    ) -> SyncRecord:
        """The same for a backend that takes something else than files.

        Args:
            version: As in :meth:`update`, like the receipt and the errors.
            parts: What the engine's backend takes as ``update_info``, one after the
                other; asked for only once nothing was refused.
            trainer: The trainer's receipt.
        """
        return self._update(version, parts, trainer, None)

    def _update(
        self,
        version: int,
        parts: Iterable[Mapping[str, Any]],
        trainer: Receipt | None,
        paths: Sequence[Path] | None,
    ) -> SyncRecord:
        self.state.require_usable(f"the update to policy version {version}")
        refused = list(self._refusals(version, paths, trainer))
        if refused:
            raise WeightUpdateRefusedError(
                f"update to policy version {version} refused; version {self.version} stays", refused
            )
        self._refuse_unless_resettable(version)
        previous = self.state.version
        self.state.updating = version
        with self._poisoning(version, "the update"), self._paused():
            clock = _Clock()
            self._load(parts, clock)
            workers, received, violations = self._receipts(
                version, trainer, paths or (), clock, received=True
            )
            self._reset_caches(version)
            clock("reset")
            self._commit(version, clock)
        return self._record(previous, trainer, workers, received, violations, clock)

    # -- stages ------------------------------------------------------------------------

    def _load(self, parts: Iterable[Mapping[str, Any]], clock: _Clock) -> None:
        self._engine.start_weight_update()
        clock("start")
        for info in parts:
            self._engine.update_weights({"update_info": dict(info)})
        clock("load")
        # Not yet: the label is part of the commit.
        self._engine.finish_weight_update()
        clock("finish")

    def _refusals(
        self, version: int, paths: Sequence[Path] | None, trainer: Receipt | None
    ) -> Iterator[Violation]:
        current = self.state.version
        if current is None:
            yield _violation(
                "policy version", "begin() has not been called", "a committed version", None
            )
        elif version <= current:
            yield _violation(
                "policy version",
                "delivered twice" if version == current else "out of order",
                f"greater than {current}",
                version,
                remedy="deliver each version once, in increasing order",
            )
        if paths is not None and not paths:
            yield _violation("files", "nothing to deliver", "at least one file", "none")
        for path in paths or ():
            if not path.is_file():
                yield _violation(str(path), "no such file", "a safetensors file", "nothing")
        yield from self._unfitting(version, trainer)
        if not self.in_flight and self._unfinished():
            yield _violation(
                "requests",
                "some are under way",
                "none",
                "unfinished requests in the engine",
                remedy="drain or abort them first; their tokens would mix two versions",
            )

    def _unfitting(self, version: int, trainer: Receipt | None) -> Iterator[Violation]:
        """A receipt that cannot be the one of this version."""
        if self.mode == "enforce" and trainer is None:
            yield _violation(
                "trainer's receipt",
                'missing, and mode is "enforce"',
                f"a receipt of version {version}",
                None,
                remedy="make one with tensors_receipt and reduce_receipt, on all ranks",
            )
        if trainer is not None and trainer.version != version:
            yield _violation(
                "trainer's receipt",
                "of another version",
                version,
                trainer.version,
                remedy="make the receipt after the optimizer step of this version",
            )

    def _unfinished(self) -> bool:
        return bool(self._engine.llm_engine.has_unfinished_requests())

    def _refuse_unless_resettable(self, version: int) -> None:
        """Before anything changes: an engine that cannot reset must not be updated."""
        if self.caches == "salt":
            return
        answer = self._engine.reset_prefix_cache()
        if answer is not True:
            raise WeightUpdateRefusedError(
                f"policy version {version} refused before anything changed",
                [_no_reset(answer)],
            )

    def _reset_caches(self, version: int) -> None:
        if self.caches == "salt":
            return
        answer = self._engine.reset_prefix_cache()
        if answer is not True:
            raise WeightSyncError(
                f"policy version {version} is loaded, but old cache entries remain",
                [_no_reset(answer)],
            )

    def _receipts(
        self,
        version: int,
        trainer: Receipt | None,
        paths: Sequence[Path],
        clock: _Clock,
        *,
        received: bool,
    ) -> tuple[list[Receipt], list[Receipt], list[Violation]]:
        if self.mode == "off":
            return [], [], []
        answers = self._engine.collective_rpc("patchkit_receipt", args=(self._weight_map, version))
        workers = [Receipt.from_dict(a) for a in answers]
        clock("receipts")
        if trainer is None:
            return workers, [], []
        arrived = self._engine.collective_rpc("patchkit_received") if received else []
        arrivals = [Receipt.from_dict(a) for a in arrived if a is not None]
        violations = compare_receipts(trainer, workers, locate=_locator(paths))
        if violations:
            # Where from? A file that was wrong already needs another remedy.
            violations += [
                _violation(
                    r.holder,
                    "what it read differs from the trainer's weights already",
                    trainer.digest,
                    r.digest,
                    remedy="the files were not written from these weights, or were damaged",
                )
                for r in arrivals
                if set(r.parameters) == set(trainer.parameters) and r.digest != trainer.digest
            ]
        clock("compare")
        if violations and self.mode == "enforce":
            raise WeightSyncError(
                f"policy version {version} is not what the workers hold", violations
            )
        return workers, arrivals, violations

    def _commit(self, version: int, clock: _Clock) -> None:
        label = getattr(self._engine, "update_weight_version", None)
        if label is not None:
            label(str(version))
        found = self._engine.get_weight_version() if label is not None else str(version)  # type: ignore[attr-defined]
        if found != str(version):
            raise WeightSyncError(
                f"policy version {version} was not taken over",
                [
                    _violation(
                        "engine's weight version",
                        "the engine accepts a version and does not keep it",
                        version,
                        found,
                        remedy="check the engine's version; requests would be labelled wrongly",
                    )
                ],
            )
        self.state.version = version
        clock("commit")

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Freeze running requests; after a failure they are aborted, not resumed."""
        if not self.in_flight:
            yield
            return
        control: Any = self._engine
        control.pause_generation(mode="keep", clear_cache=False)
        try:
            yield
        except BaseException:
            # Nobody knows these weights: not one more token may be drawn from them.
            control.pause_generation(mode="abort", clear_cache=True)
            raise
        control.resume_generation()

    @contextmanager
    def _poisoning(self, version: int, what: str) -> Iterator[None]:
        try:
            yield
        except ViolationsError as e:
            self.state.poison(f"{what} to version {version}: {e.headline}.")
            raise
        except BaseException as e:
            cause = f"{type(e).__name__}: {e}".splitlines()[0][:300].rstrip(".")
            self.state.poison(f"{what} to version {version}: {cause}.")
            if not isinstance(e, Exception):
                raise
            raise WeightSyncError(
                f"policy version {version} failed on the way; the engine is poisoned",
                [
                    _violation(
                        what,
                        f"raised {type(e).__name__}",
                        "an update that ends",
                        str(e)[:2000],
                        remedy="shut the engine down and start a new one from a checkpoint",
                    )
                ],
            ) from e
        finally:
            self.state.updating = None

    def _record(
        self,
        previous: int | None,
        trainer: Receipt | None,
        workers: Iterable[Receipt],
        received: Iterable[Receipt],
        violations: Iterable[Violation],
        clock: _Clock,
    ) -> SyncRecord:
        assert self.state.version is not None
        return SyncRecord(
            version=self.state.version,
            previous=previous,
            mode=self.mode,
            caches=self.caches,
            labels="engine" if hasattr(self._engine, "update_weight_version") else "driver",
            in_flight=self.in_flight and previous is not None,
            trainer=trainer,
            workers=tuple(workers),
            received=tuple(received),
            violations=tuple(violations),
            seconds=clock.seconds,
        )


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def __call__(self, stage: str) -> None:
        now = time.monotonic()
        self.seconds[stage] = now - self._last
        self._last = now


def _locator(paths: Sequence[Path]) -> Callable[[str, Piece], int] | None:
    """Digests of regions of the delivered files, to name the worker that differs."""
    if not paths:
        return None

    def locate(name: str, piece: Piece) -> int:
        from safetensors import safe_open

        for path in paths:
            with safe_open(str(path), framework="pt") as file:
                if name not in file.keys():  # noqa: SIM118 - not a mapping
                    continue
                part = file.get_slice(name)
                shape = tuple(part.get_shape())
                region = tuple(
                    slice(o, o + n) for o, n in zip(piece.offsets, piece.shape, strict=True)
                )
                return parameter_digest(part[region], shape, piece.offsets, name=name)
        return piece.digest  # delivered under another name: nothing to compare with

    return locate


def _no_reset(answer: object) -> Violation:
    return _violation(
        "prefix cache",
        "could not be reset",
        "the answer True",
        repr(answer),
        remedy="finish or abort all requests first; an engine that does not support it needs "
        'caches="salt" or prefix caching switched off',
    )


def _violation(
    subject: str, problem: str, expected: object, found: object, *, remedy: str = ""
) -> Violation:
    return Violation(
        subject=subject, problem=problem, expected=str(expected), found=str(found), remedy=remedy
    )
