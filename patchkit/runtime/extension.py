"""What the driver can ask a vLLM worker: receipts and attestations.

Given to vLLM as ``worker_extension_cls=WORKER_EXTENSION`` and called by name through
``collective_rpc``, which works in process and across processes without insecure
serialisation. An own extension class inherits from this one.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from patchkit.errors import ConfigurationError

__all__ = ["WORKER_EXTENSION", "WorkerExtension"]

WORKER_EXTENSION = "patchkit.runtime.extension.WorkerExtension"


class WorkerExtension:
    """Mixed into vLLM's worker class; every name is prefixed to avoid collisions."""

    def patchkit_place(self) -> dict[str, int]:
        """Where this worker is in each parallel dimension."""
        from vllm.distributed import parallel_state

        config = self.vllm_config.parallel_config  # type: ignore[attr-defined]
        tp, pp = parallel_state.get_tp_group(), parallel_state.get_pp_group()
        place = {
            "rank": int(self.rank),  # type: ignore[attr-defined]
            "dp_rank": int(config.data_parallel_rank),
            "dp_size": int(config.data_parallel_size),
            "tp_rank": tp.rank_in_group,
            "tp_size": tp.world_size,
            "pp_rank": pp.rank_in_group,
            "pp_size": pp.world_size,
            "ep_rank": 0,
            "ep_size": 1,
        }
        if config.enable_expert_parallel:
            ep = parallel_state.get_ep_group()
            place.update(ep_rank=ep.rank_in_group, ep_size=ep.world_size)
        return place

    def patchkit_receipt(self, weight_map: str, version: int | None = None) -> dict[str, Any]:
        """Digest what is loaded; ``weight_map`` is ``"module:qualname"``."""
        from patchkit.runtime.weights import loaded_receipt

        place = self.patchkit_place()
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        pieces = _resolve(weight_map)(model, **{k: v for k, v in place.items() if k != "rank"})
        return loaded_receipt(_holder(place), model, pieces, version=version).as_dict()

    def patchkit_received(self) -> dict[str, Any] | None:
        """Digest of what arrived in the last update, if the backend made one."""
        engine = self.weight_transfer_engine  # type: ignore[attr-defined]
        received = getattr(engine, "received", None)
        if received is None:
            return None
        return {**received.as_dict(), "holder": f"{_holder(self.patchkit_place())}, as received"}

    def patchkit_hits(self) -> dict[str, int]:
        """End this process's canary and say how often each patch was called."""
        from patchkit.runtime.reach import end_canary

        return end_canary()

    def patchkit_settings(self) -> dict[str, Any]:
        """The engine settings as this worker got them."""
        from patchkit.runtime.engine_gate import read_settings

        return read_settings(self.vllm_config)  # type: ignore[attr-defined]

    def patchkit_attest(self) -> dict[str, Any]:
        """Verify the installation now, and the loaded model, and say what is active here.

        Raises:
            UncoveredModelError: The model has a submodule that the adapter does not list.
        """
        from patchkit.runtime import worker
        from patchkit.runtime.attestation import attest
        from patchkit.runtime.coverage import require_covered

        if worker.installation is not None:
            model = self.model_runner.get_model()  # type: ignore[attr-defined]
            require_covered(model, worker.installation)
        place = self.patchkit_place()
        rank = place["rank"] + place["dp_rank"] * place["tp_size"] * place["pp_size"]
        return {**attest(role="worker", rank=rank), "place": place, "pid": os.getpid()}


def _holder(place: dict[str, int]) -> str:
    dp = f" of replica {place['dp_rank']}" if place["dp_size"] > 1 else ""
    return f"worker {place['rank']}{dp}"


def _resolve(reference: str) -> Any:
    module, _, qualname = reference.partition(":")
    if not (module and qualname):
        raise ConfigurationError(
            f'weight map {reference!r}: expected "module:qualname", as in '
            '"patchkit.bindings.vllm_cpu.weights:weight_map"'
        )
    found: Any = import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found
