"""A weight-transfer backend for vLLM that reads a trainer's device memory in place.

A worker maps what the trainer rank on its own accelerator shares
(:mod:`patchkit.runtime.sharing`) and loads from there, through vLLM's layer-wise reload:
nothing crosses a file or a network. vLLM's own IPC backend does the same, but imports
Ray. Imported by vLLM in its workers, through its own registry and only when an engine
is configured with :data:`patchkit.runtime.sync.IPC_BACKEND`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from patchkit.engine import resolve_reference
from patchkit.errors import PatchkitError

__all__ = ["SharedInit", "SharedUpdate", "SharedWeightTransfer"]

# Of torch's rebuild_cuda_tensor; devices are numbered anew in every process.
_DEVICE_ARGUMENT = 6

Named = Iterable[tuple[str, torch.Tensor]]


@dataclass
class SharedInit(WeightTransferInitInfo):
    """Nothing to agree on: the memory is on this machine."""


@dataclass
class SharedUpdate(WeightTransferUpdateInfo):
    """One part of a delivery; the parts of one update together hold the checkpoint.

    A part must hold all tensors of every module that it touches: vLLM keeps what a
    module lacks for later, and the trainer takes its memory back.

    Attributes:
        handles: From :func:`patchkit.runtime.sharing.parts`.
        version: The policy version that the update makes.
        names: ``module:qualname`` of a function that turns the trainer's ``(name,
            tensor)`` pairs into a checkpoint's; empty where they are that already.
    """

    handles: bytes = b""
    version: int = -1
    names: str = ""


class SharedWeightTransfer(WeightTransferEngine):
    """Loads a checkpoint part by part from shared device memory.

    That everything arrived, and where it belongs, is what the workers' receipts say.
    """

    init_info_cls = SharedInit
    update_info_cls = SharedUpdate
    supports_draft_weight_update = False

    received_version: int | None = None

    def init_transfer_engine(self, init_info: SharedInit) -> None:
        """Nothing to connect to."""

    def start_weight_update(self) -> None:
        self.received_version = None
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SharedUpdate) -> None:
        if self.received_version not in (None, update_info.version):
            raise PatchkitError(
                f"a part of version {update_info.version} was delivered into an update to "
                f"version {self.received_version}; finish one before the other"
            )
        rename: Callable[[Named], Named] = (
            resolve_reference(update_info.names) if update_info.names else lambda named: named
        )
        self.model.load_weights(rename(self._mapped(update_info)))  # type: ignore[operator]
        self.received_version = update_info.version
        # The mapping ends with the tensors; copies must have been made before.
        torch.cuda.synchronize(self.device)

    def finish_weight_update(self) -> None:
        if self.received_version is None:
            raise PatchkitError("a weight update was finished, but nothing was delivered")
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[object], trainer_args: object) -> None:
        """Abstract until vLLM 0.26. A version is a transaction of ``WeightSync``."""
        raise PatchkitError("deliver weights with WeightSync.update_from, which takes receipts")

    def _mapped(self, update: SharedUpdate) -> Iterator[tuple[str, torch.Tensor]]:
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        by_device = pickle.loads(update.handles)
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        if uuid not in by_device:
            raise PatchkitError(
                f"weights were shared from {', '.join(by_device)}, and this worker is on {uuid}: "
                "every accelerator with a worker needs a trainer rank that shares its weights"
            )
        for name, arguments in by_device[uuid]:
            arguments = list(arguments)
            arguments[_DEVICE_ARGUMENT] = self.device.index
            yield name, rebuild_cuda_tensor(*arguments)
