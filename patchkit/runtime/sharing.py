"""The trainer's side of a delivery through device memory.

Every rank runs :func:`parts` in step with the others, since gathering a sharded
parameter is collective; rank 0 hands what it yields to
:meth:`patchkit.runtime.sync.WeightSync.update_from`, the others only run through it::

    for part in parts(model, version, group=control, names="…:per_expert"):
        pass                                   # on every rank but 0

A part is gathered, read by the workers and let go before the next, so that no rank
ever holds more than the largest of them besides its own shards.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["by_module", "parts"]


def by_module(model: torch.nn.Module, units: str) -> list[list[str]]:
    """Names of parameters, one group per child of ``units`` and one for the rest.

    Args:
        model: The trainer's model.
        units: Path of the list of its layers, ``model.layers`` for most.
    """
    groups: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        inside = name.startswith(units + ".")
        groups.setdefault(name[len(units) + 1 :].split(".")[0] if inside else "", []).append(name)
    return list(groups.values())


@torch.no_grad()
def parts(
    model: torch.nn.Module,
    version: int,
    *,
    groups: Iterable[Sequence[str]],
    group: Any = None,
    names: str = "",
    dtype: torch.dtype | None = None,
) -> Iterator[dict[str, Any]]:
    """Share a model's parameters, part by part; to be run on every rank alike.

    Args:
        model: Its parameters may be sharded (``DTensor``).
        version: The policy version.
        groups: Names of the parameters of each part; see
            :class:`patchkit.runtime.shared_transfer.SharedUpdate` for what a part needs.
        group: A process group on the CPU: waiting on the device would take it from the
            workers that are being waited for.
        names: As in :class:`~patchkit.runtime.shared_transfer.SharedUpdate`.
        dtype: Format to deliver in; the parameters' own if None.

    Yields:
        ``update_info`` of one part on rank 0, an empty mapping elsewhere.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    parameters: dict[str, Any] = dict(model.named_parameters())
    device = torch.cuda.current_device()
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    for wanted in groups:
        kept, handles = [], []
        for name in wanted:
            tensor = parameters[name]
            tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()
            tensor = tensor.to(dtype or tensor.dtype).contiguous()
            kept.append(tensor)
            handles.append((name, reduce_tensor(tensor)[1]))
        torch.cuda.synchronize()
        everybody: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everybody, (uuid, handles), group=group)
        if dist.get_rank(group) == 0:
            shared = pickle.dumps(dict(everybody))
            yield {"handles": shared, "version": version, "names": names}
        else:
            yield {}
        # Rank 0 comes back when the workers have loaded.
        dist.barrier(group)
        del kept, handles, tensor
        torch.cuda.ipc_collect()
