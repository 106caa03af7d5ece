"""vLLM's asynchronous engine, seen by a weight update as the synchronous one.

An update runs in a thread of its own (``await asyncio.to_thread(sync.update, …)``),
so that the event loop, which delivers outputs, is never blocked by it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from patchkit.errors import ConfigurationError
from patchkit.runtime.liveness import EngineLostError, EngineWatch

__all__ = ["AsyncControl"]


class AsyncControl:
    """Adapter of ``vllm.v1.engine.async_llm.AsyncLLM`` for :class:`WeightSync`.

    Args:
        engine: The engine.
        loop: The event loop that it lives in.
        timeout_s: How long any single call may take.
        watch: Of the engine's processes: a call ends soon after one of them has ended.
    """

    def __init__(
        self,
        engine: Any,
        loop: asyncio.AbstractEventLoop,
        *,
        timeout_s: float = 600.0,
        watch: EngineWatch | None = None,
    ) -> None:
        self._engine, self._loop, self._timeout_s = engine, loop, timeout_s
        self._watch = watch
        # Absent where this version of vLLM has no labels, as WeightSync expects.
        if hasattr(engine, "update_weight_version"):
            self.update_weight_version = self._update_weight_version
            self.get_weight_version = self._get_weight_version

    @property
    def llm_engine(self) -> AsyncControl:
        return self

    @property
    def vllm_config(self) -> Any:
        """The engine's final configuration, for :func:`~patchkit.runtime.engine_gate`."""
        return self._engine.vllm_config

    def has_unfinished_requests(self) -> bool:
        return bool(self._engine.output_processor.has_unfinished_requests())

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._run(self._engine.init_weight_transfer_engine(WeightTransferInitRequest(**request)))

    def start_weight_update(self) -> None:
        self._run(self._engine.start_weight_update())

    def update_weights(self, request: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._run(self._engine.update_weights(WeightTransferUpdateRequest(**request)))

    def finish_weight_update(self) -> None:
        self._run(self._engine.finish_weight_update())

    def reset_prefix_cache(self) -> bool:
        answer: bool = self._run(self._engine.reset_prefix_cache())
        return answer

    def collective_rpc(self, method: Any, *, args: tuple[Any, ...] = ()) -> list[Any]:
        answers: list[Any] = self._run(self._engine.collective_rpc(method, args=args))
        return answers

    def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self._run(self._engine.pause_generation(mode=mode, clear_cache=clear_cache))

    def resume_generation(self) -> None:
        self._run(self._engine.resume_generation())

    def _update_weight_version(self, new_version: str) -> None:
        self._run(self._engine.update_weight_version(new_version))

    def _get_weight_version(self) -> str:
        version: str = self._run(self._engine.get_weight_version())
        return version

    def _run(self, call: Coroutine[Any, Any, Any]) -> Any:
        try:
            running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            call.close()
            raise ConfigurationError(
                "AsyncControl was called from the engine's own event loop, which would wait for "
                "itself; use `await asyncio.to_thread(sync.update, …)`"
            )
        waiting = asyncio.run_coroutine_threadsafe(call, self._loop)
        if self._watch is None:
            return waiting.result(self._timeout_s)
        try:
            wanted = getattr(call, "__name__", "a call")
            return self._watch.call(wanted, waiting.result, bound_s=self._timeout_s)
        except EngineLostError:
            waiting.cancel()
            raise
