"""A weight-transfer backend for vLLM that loads safetensors files.

vLLM's worker owns the life cycle (start, update, finish); this backend supplies
the transport and opts into vLLM's layer-wise reload, so that whatever an engine
does to weights after loading (packing, quantising) is done again. Imported by
vLLM in its workers, through its own registry and only when an engine is
configured with :data:`BACKEND`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from patchkit.errors import PatchkitError
from patchkit.runtime.weights import Receipt, tensors_receipt

__all__ = ["FileInit", "FileUpdate", "FileWeightTransfer"]


@dataclass
class FileInit(WeightTransferInitInfo):
    """Nothing to agree on: files need no rendezvous."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """One delivery.

    Attributes:
        paths: safetensors files that together hold the whole checkpoint.
        version: The policy version they make.
        receipt: Whether to digest what is read, so that a fault of transport can
            be told from a fault of loading.
    """

    paths: list[str] = field(default_factory=list)
    version: int = -1
    receipt: bool = True


class FileWeightTransfer(WeightTransferEngine):
    """Loads whole checkpoints from files, through the layer-wise reload."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate
    supports_draft_weight_update = False

    received: Receipt | None = None
    received_version: int | None = None
    _expected: frozenset[str] | set[str] = frozenset()

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Nothing to connect to."""

    def start_weight_update(self) -> None:
        self.received = self.received_version = None
        # Before the reload takes tied parameters apart: a tied output layer gets
        # nothing of its own, and its embedding's storage back at the end.
        self._expected = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdate) -> None:
        if self.received_version is not None:
            raise PatchkitError(
                f"version {update_info.version} was delivered into an update that already "
                f"received version {self.received_version}; give all files at once"
            )
        digests: list[Receipt] = []
        loaded = self.model.load_weights(  # type: ignore[operator]
            self._tensors(update_info, digests)
        )
        if missing := sorted(self._expected - set(loaded or ())):
            raise PatchkitError(
                f"version {update_info.version} is incomplete: nothing was delivered for "
                f"{len(missing)} of {len(self._expected)} parameters, {', '.join(missing[:8])}"
            )
        self.received_version = update_info.version
        if update_info.receipt:
            self.received = Receipt(
                holder="received",
                version=update_info.version,
                parameters={n: p for r in digests for n, p in r.parameters.items()},
            )

    def finish_weight_update(self) -> None:
        if self.received_version is None:
            raise PatchkitError("a weight update was finished, but nothing was delivered")
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[object], trainer_args: object) -> None:
        """Abstract until vLLM 0.26. A version is a transaction of ``WeightSync``."""
        raise PatchkitError("deliver weights with WeightSync.update, which takes receipts")

    def _tensors(
        self, update: FileUpdate, digests: list[Receipt]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for path in update.paths:
            with safe_open(path, framework="pt", device=str(self.device)) as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping, keys() only
                    tensor = file.get_tensor(name)
                    if update.receipt:
                        digests.append(tensors_receipt("received", [(name, tensor)]))
                    yield name, tensor
