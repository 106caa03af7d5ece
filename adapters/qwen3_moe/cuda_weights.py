"""Hands a trainer's weights to vLLM workers on the same GPUs through CUDA IPC.

Nothing is copied on the way: a worker maps the memory of the trainer rank on its
own GPU and loads from there, through vLLM's layer-wise reload. vLLM's own IPC
backend does the same, but imports Ray.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from patchkit.errors import PatchkitError
from patchkit.runtime.extension import WorkerExtension

CUDA_WORKER_EXTENSION = "patchkit_adapters.qwen3_moe.cuda_weights.CudaWorkerExtension"

_DEVICE_ARGUMENT = 6  # of torch's rebuild_cuda_tensor


def share(named: Iterable[tuple[str, Tensor]]) -> tuple[str, list[tuple[str, Any]], list[Tensor]]:
    """Make this rank's whole tensors readable for other processes of its GPU.

    Returns:
        The GPU's uuid, a handle per parameter, and the tensors, which the caller
        must keep until every worker has loaded.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    kept, handles = [], []
    for name, tensor in named:
        tensor = tensor.detach().contiguous()
        kept.append(tensor)
        handles.append((name, reduce_tensor(tensor)[1]))
    torch.cuda.synchronize()
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid), handles, kept


def per_expert(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Stacked experts as the checkpoint names them: views, one per expert and projection."""
    for name, tensor in named:
        prefix, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2, dim=0)
                yield f"{prefix}.{expert}.gate_proj.weight", gate
                yield f"{prefix}.{expert}.up_proj.weight", up
        elif kind == "down_proj" and prefix.endswith(".experts"):
            for expert, down in enumerate(tensor):
                yield f"{prefix}.{expert}.down_proj.weight", down
        else:
            yield name, tensor


class CudaWorkerExtension(WorkerExtension):
    """:class:`WorkerExtension` that also loads weights through CUDA IPC."""

    def patchkit_load_shared(self, payload: bytes) -> int:
        """Load everything; ``payload`` is a pickled ``{gpu uuid: handles}`` from :func:`share`.

        Returns:
            How many names vLLM reports as loaded. That all of it arrived where it belongs
            is what the receipts say (:meth:`patchkit_receipt`).
        """
        from torch.multiprocessing.reductions import rebuild_cuda_tensor
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        device: torch.device = self.device  # type: ignore[attr-defined]
        by_gpu = pickle.loads(payload)
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        if uuid not in by_gpu:
            raise PatchkitError(
                f"weights were shared from GPUs {', '.join(by_gpu)}, and this worker is on {uuid}: "
                "every GPU with a worker needs a trainer rank that shares its weights"
            )

        def mapped() -> Iterator[tuple[str, Tensor]]:
            for name, arguments in by_gpu[uuid]:
                arguments = list(arguments)
                arguments[_DEVICE_ARGUMENT] = device.index
                yield name, rebuild_cuda_tensor(*arguments)

        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        initialize_layerwise_reload(model)
        loaded = set(model.load_weights(per_expert(mapped())))
        finalize_layerwise_reload(model, self.model_config)  # type: ignore[attr-defined]
        torch.cuda.synchronize()
        return len(loaded)
