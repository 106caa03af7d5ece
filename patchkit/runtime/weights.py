"""Receipts: what weights a process really holds, without moving them.

A receipt has one number per piece of a parameter, computed on the device where
the piece lives. The numbers are sums, modulo 2**64, of one term per element; the
term mixes the element's bits, its index in the *whole* parameter and the
parameter's checkpoint name. So the receipts of tensor- or expert-parallel shards
add up to the receipt of the whole, however it was cut, and a shard that sits at
the wrong place, holds stale values or came from another parameter changes the
sum. A single changed element always changes it (the mix is a bijection of the
element's bits); several cancel each other with a chance of about 2**-64. It is a
checksum against faults, no defence against somebody who forges weights.

The weight map
--------------
An engine does not keep a checkpoint's layout: q, k and v are one matrix, gate and
up are one, experts are stacked, vocabularies are padded. An adapter names a
function (``Adapter.weight_map``, ``"module:qualname"``) that tells which part of
which checkpoint parameter each loaded tensor is::

    def weight_map(
        model: torch.nn.Module,
        *,
        tp_rank: int, tp_size: int,
        ep_rank: int, ep_size: int,
        pp_rank: int, pp_size: int,
        **further: int,
    ) -> Iterable[LoadedPiece]: ...

* It is called in the worker, after loading, with the model as vLLM holds it.
* Each :class:`LoadedPiece` (a plain 4-tuple will do) is a *view* of loaded memory,
  never a copy made from elsewhere: ``(name, tensor, offsets, global_shape)``.
* ``tensor`` has as many dimensions as the checkpoint's parameter and may have any
  strides; element ``[i, j]`` of it is element ``[offsets[0] + i, offsets[1] + j]``
  of the parameter ``name`` of shape ``global_shape``. A transposed or packed
  weight is given as a view that undoes the transposition; what no view can undo
  has no receipt, and the adapter must keep it unpacked.
* Padding (of a vocabulary, say) is cut off, not given.
* A replica (norms, the router, KV heads when there are more ranks than heads) is
  given by every worker that holds it, with its own offsets: equal regions must be
  equal and count once.
* Pieces of one worker do not overlap, and every parameter of the model appears in
  at least one piece: :func:`loaded_receipt` refuses a model of which a parameter
  is left out.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from patchkit.errors import Violation, ViolationsError

if TYPE_CHECKING:
    import torch

__all__ = [
    "LoadedPiece",
    "ParameterReceipt",
    "Piece",
    "Receipt",
    "ReceiptError",
    "combine_receipts",
    "compare_receipts",
    "loaded_receipt",
    "parameter_digest",
    "reduce_receipt",
    "tensors_receipt",
]

# Elements per chunk. On a CPU the temporaries should stay in cache (measured: 300 M
# elements/s and thread at 2**18, half of that at 2**20); elsewhere launches cost.
CPU_CHUNK = 1 << 18
DEVICE_CHUNK = 1 << 23

_GOLDEN = 0x9E3779B97F4A7C15
_VALUE = 0xD1342543DE82EF95
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_BITS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}


class LoadedPiece(NamedTuple):
    """A part of a checkpoint parameter as a worker holds it; see the module's text."""

    name: str
    tensor: torch.Tensor
    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]


class ReceiptError(ViolationsError):
    """Receipts that contradict each other, or that cannot be made."""


class Piece(NamedTuple):
    """A region of a parameter and the digest of what is in it."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    digest: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterReceipt:
    """The pieces of one parameter that one process (or several together) holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def digest(self) -> int:
        return sum(p.digest for p in self.pieces) % 2**64

    @property
    def covered(self) -> int:
        """Elements covered; the pieces of one receipt do not overlap."""
        return sum(p.numel for p in self.pieces)

    @property
    def complete(self) -> bool:
        return self.covered == math.prod(self.shape)

    @property
    def digest_text(self) -> str:
        return f"{self.digest:016x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What one process holds, or what all of them hold together.

    Attributes:
        holder: Who it is, for messages ("worker 1", "trainer").
        parameters: By checkpoint name.
        version: The policy version it was made for, if any.
    """

    holder: str
    parameters: Mapping[str, ParameterReceipt]
    version: int | None = None

    @property
    def digest(self) -> str:
        """One number for the whole model; equal whatever the sharding."""
        h = hashlib.sha256()
        for name in sorted(self.parameters):
            p = self.parameters[name]
            h.update(f"{name} {p.dtype} {list(p.shape)} {p.covered} {p.digest_text}\n".encode())
        return h.hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """Plain data; digests as text, because JSON readers lose 64-bit integers."""
        return {
            "holder": self.holder,
            "version": self.version,
            "parameters": {
                p.name: {
                    "dtype": p.dtype,
                    "shape": list(p.shape),
                    "pieces": [
                        [list(q.offsets), list(q.shape), f"{q.digest:016x}"] for q in p.pieces
                    ],
                }
                for p in self.parameters.values()
            },
        }

    def summary(self) -> dict[str, Any]:
        """What the artifact keeps: one digest per parameter, not per piece."""
        return {
            "holder": self.holder,
            "version": self.version,
            "digest": self.digest,
            "parameters": {
                n: [p.dtype, list(p.shape), p.covered, p.digest_text]
                for n, p in sorted(self.parameters.items())
            },
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Receipt:
        return cls(
            holder=data["holder"],
            version=data["version"],
            parameters={
                name: ParameterReceipt(
                    name=name,
                    dtype=p["dtype"],
                    shape=tuple(p["shape"]),
                    pieces=tuple(Piece(tuple(o), tuple(s), int(d, 16)) for o, s, d in p["pieces"]),
                )
                for name, p in data["parameters"].items()
            },
        )


# -- digests ---------------------------------------------------------------------------


def parameter_digest(
    tensor: torch.Tensor,
    global_shape: Sequence[int],
    offsets: Sequence[int],
    *,
    name: str = "",
    dtype: torch.dtype | None = None,
    chunk: int | None = None,
) -> int:
    """Digest of a shard, as a part of the whole parameter.

    Runs where the tensor is, in chunks: a few temporary integers of 8 bytes per
    element of a chunk, and one number of 8 bytes comes back.

    Args:
        tensor: The shard; any strides, any device.
        global_shape: Shape of the whole parameter.
        offsets: Where element ``[0, …, 0]`` of the shard is in it.
        name: Checkpoint name; part of the mix.
        dtype: Digest the values as cast to this dtype (chunk by chunk): a trainer
            with float32 masters says what it *sends* as bfloat16.
        chunk: Elements worked on at a time; chosen by device if None.

    Returns:
        An integer of 64 bits, to be added modulo 2**64.
    """
    import torch

    shape = tuple(tensor.shape)
    if not len(shape) == len(offsets) == len(global_shape) or any(
        o < 0 or o + n > g for o, n, g in zip(offsets, shape, global_shape, strict=True)
    ):
        raise ReceiptError(
            "a shard does not lie inside its parameter",
            [
                Violation(
                    subject=name or "parameter",
                    problem="region outside the parameter",
                    expected=f"inside {list(global_shape)}",
                    found=f"shape {list(shape)} at {list(offsets)}",
                    remedy="correct offsets and global_shape in the adapter's weight_map",
                )
            ],
        )
    strides = [math.prod(global_shape[d + 1 :]) for d in range(len(shape))]
    base = sum(o * s for o, s in zip(offsets, strides, strict=True))
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
    local = tensor.detach()
    limit = chunk or (CPU_CHUNK if local.device.type == "cpu" else DEVICE_CHUNK)
    with torch.no_grad():
        total = torch.zeros((), dtype=torch.int64, device=local.device)
        for part, start in _chunks(local, strides, base, limit):
            total += _digest_chunk(part, strides[len(shape) - part.ndim :], start, key, dtype)
    return int(total.item()) % 2**64


def _chunks(
    tensor: torch.Tensor, strides: Sequence[int], base: int, limit: int
) -> Iterable[tuple[torch.Tensor, int]]:
    """Cut along leading dimensions; yields a view and its first global index."""
    if tensor.numel() == 0:
        return
    if tensor.numel() <= limit or tensor.ndim == 0:
        yield tensor, base
        return
    per_row = tensor.numel() // tensor.shape[0]
    if per_row <= limit:
        rows = max(limit // per_row, 1)
        for i in range(0, tensor.shape[0], rows):
            yield tensor[i : i + rows], base + i * strides[0]
    else:
        for i in range(tensor.shape[0]):
            yield from _chunks(tensor[i], strides[1:], base + i * strides[0], limit)


def _digest_chunk(
    part: torch.Tensor,
    strides: Sequence[int],
    start: int,
    key: int,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    """Sum over the chunk of ``mix(bits * odd + index * odd' + key)``."""
    import torch

    if dtype is not None and part.dtype != dtype:
        part = part.to(dtype)
    if part.dtype == torch.bool:
        part = part.to(torch.uint8)
    bits = part.contiguous().view(getattr(torch, _BITS[part.element_size()]))
    # A copy, always: 64-bit weights would otherwise be changed in place. Wraps modulo
    # 2**64, here and below: that is the arithmetic wanted.
    z = bits.to(torch.int64, copy=True).mul_(_signed(_VALUE))
    z += _signed(start * _GOLDEN + key)
    for d, (n, stride) in enumerate(zip(part.shape, strides, strict=True)):
        if n > 1:
            steps = torch.arange(n, dtype=torch.int64, device=part.device)
            z += steps.mul_(_signed(stride * _GOLDEN)).view(-1, *[1] * (part.ndim - 1 - d))
    z ^= (z >> 30).bitwise_and_((1 << 34) - 1)  # the mask makes an arithmetic shift logical
    z *= _signed(_MIX_1)
    z ^= (z >> 27).bitwise_and_((1 << 37) - 1)
    z *= _signed(_MIX_2)
    z ^= (z >> 31).bitwise_and_((1 << 33) - 1)
    return z.sum()


def _signed(value: int) -> int:
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


# -- receipts --------------------------------------------------------------------------


def tensors_receipt(
    holder: str,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    dtype: torch.dtype | Callable[[str], torch.dtype | None] | None = None,
    version: int | None = None,
    chunk: int | None = None,
) -> Receipt:
    """Receipt of named tensors: whole ones, or this rank's shards of DTensors.

    Args:
        holder: Who holds them.
        tensors: Checkpoint names and tensors, e.g. ``model.named_parameters()`` of
            an FSDP2 model: nothing is gathered, each rank digests its own shard.
        dtype: What the values are cast to before digesting, or a function of the
            name; None keeps each tensor's own dtype.
        version: The policy version.
        chunk: Elements worked on at a time; chosen by device if None.
    """
    parameters: dict[str, ParameterReceipt] = {}
    for name, tensor in tensors:
        local, offsets = _local_shard(tensor)
        shape = tuple(tensor.shape)
        # A torch.dtype is not callable, so the two kinds of argument cannot be confused.
        wanted = (dtype(name) if callable(dtype) else dtype) or tensor.dtype
        found: tuple[Piece, ...] = ()
        if local.numel():  # of an uneven shard a rank may have nothing but the name
            digest = parameter_digest(local, shape, offsets, name=name, dtype=wanted, chunk=chunk)
            found = (Piece(offsets, tuple(local.shape), digest),)
        parameters[name] = ParameterReceipt(
            name=name, dtype=_dtype_name(wanted), shape=shape, pieces=found
        )
    return Receipt(holder=holder, parameters=parameters, version=version)


def _local_shard(tensor: Any) -> tuple[torch.Tensor, tuple[int, ...]]:
    if not hasattr(tensor, "to_local"):
        return tensor, (0,) * tensor.ndim
    # There is no public way to ask a DTensor for its offsets.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local = tensor.to_local()
    shape, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    if any(p.is_partial() for p in tensor.placements) or tuple(shape) != tuple(local.shape):
        raise ReceiptError(
            "a distributed tensor has no receipt",
            [
                Violation(
                    subject="DTensor",
                    problem="its shard cannot be located",
                    expected="Shard and Replicate placements, one region per rank",
                    found=f"{tensor.placements}, local shape {list(local.shape)}",
                    remedy="redistribute it to Shard or Replicate placements first",
                )
            ],
        )
    return local, tuple(offsets)


def loaded_receipt(
    holder: str,
    model: torch.nn.Module,
    pieces: Iterable[tuple[str, torch.Tensor, tuple[int, ...], tuple[int, ...]]],
    *,
    version: int | None = None,
    chunk: int | None = None,
) -> Receipt:
    """Receipt of a loaded model through its adapter's weight map.

    Raises:
        ReceiptError: Naming every parameter of the model that the map left out,
            and every contradiction in the map.
    """
    violations: list[Violation] = []
    seen: set[int] = set()
    parameters: dict[str, ParameterReceipt] = {}
    for name, tensor, offsets, shape in pieces:
        seen.add(tensor.untyped_storage().data_ptr())
        digest = parameter_digest(tensor, shape, offsets, name=name, chunk=chunk)
        piece = Piece(tuple(offsets), tuple(tensor.shape), digest)
        before = parameters.get(name)
        if before is not None and (
            before.shape != tuple(shape) or before.dtype != _dtype_name(tensor.dtype)
        ):
            violations.append(
                Violation(
                    subject=name,
                    problem="two pieces of it disagree",
                    expected=f"{before.dtype} {list(before.shape)}",
                    found=f"{_dtype_name(tensor.dtype)} {list(shape)}",
                    remedy="correct the adapter's weight_map",
                )
            )
            continue
        parameters[name] = ParameterReceipt(
            name=name,
            dtype=_dtype_name(tensor.dtype),
            shape=tuple(shape),
            pieces=(*(before.pieces if before else ()), piece),
        )
    for name, parameter in model.named_parameters():
        if parameter.numel() and parameter.untyped_storage().data_ptr() not in seen:
            violations.append(
                Violation(
                    subject=f"{holder}: {name}",
                    problem="the weight map leaves this parameter out",
                    expected="every loaded parameter in at least one piece",
                    found=f"{parameter.dtype} {list(parameter.shape)} without a piece",
                    remedy="add it to the adapter's weight_map",
                )
            )
    if violations:
        raise ReceiptError(f"no receipt for {holder}", violations)
    return Receipt(holder=holder, parameters=parameters, version=version)


def combine_receipts(receipts: Iterable[Receipt], *, holder: str = "all workers") -> Receipt:
    """Add up the receipts of workers that hold parts of one model.

    Equal regions are replicas: they must be equal and count once.

    Raises:
        ReceiptError: Naming the parameter and the workers, if replicas differ,
            or if shape or dtype do.
    """
    receipts = list(receipts)
    combined, violations = _combine(receipts, holder)
    if violations:
        raise ReceiptError(f"the receipts of {holder} contradict each other", violations)
    return combined


def _combine(receipts: Sequence[Receipt], holder: str) -> tuple[Receipt, list[Violation]]:
    violations: list[Violation] = []
    regions: dict[str, dict[tuple[Any, Any], tuple[Piece, str]]] = {}
    facts: dict[str, tuple[ParameterReceipt, str]] = {}
    for receipt in receipts:
        for name, p in receipt.parameters.items():
            first, owner = facts.setdefault(name, (p, receipt.holder))
            if (p.dtype, p.shape) != (first.dtype, first.shape):
                violations.append(
                    Violation(
                        subject=name,
                        problem=f"{receipt.holder} and {owner} hold different parameters",
                        expected=f"{first.dtype} {list(first.shape)} ({owner})",
                        found=f"{p.dtype} {list(p.shape)} ({receipt.holder})",
                        remedy="all workers must load the same checkpoint and configuration",
                    )
                )
                continue
            known = regions.setdefault(name, {})
            for piece in p.pieces:
                other, where = known.setdefault(
                    (piece.offsets, piece.shape), (piece, receipt.holder)
                )
                if other.digest != piece.digest:
                    violations.append(
                        Violation(
                            subject=name,
                            problem=f"replicas on {where} and {receipt.holder} differ",
                            expected=f"{other.digest:016x} ({where})",
                            found=f"{piece.digest:016x} ({receipt.holder}), region "
                            f"{list(piece.shape)} at {list(piece.offsets)}",
                            remedy="load the weights again on both, or restart the engine",
                        )
                    )
    versions = {r.version for r in receipts}
    if len(versions) > 1:
        violations.append(
            Violation(
                subject="policy version of the receipts",
                problem="the workers are not at one version",
                expected="one version",
                found=", ".join(f"{r.holder}: {r.version}" for r in receipts),
                remedy="deliver the weights again to all workers",
            )
        )
    return (
        Receipt(
            holder=holder,
            version=next(iter(versions)) if len(versions) == 1 else None,
            parameters={
                name: ParameterReceipt(
                    name=name,
                    dtype=first.dtype,
                    shape=first.shape,
                    pieces=tuple(piece for piece, _ in regions.get(name, {}).values()),
                )
                for name, (first, _) in facts.items()
            },
        ),
        violations,
    )


def compare_receipts(
    trainer: Receipt,
    workers: Sequence[Receipt],
    *,
    locate: Callable[[str, Piece], int] | None = None,
) -> list[Violation]:
    """Does what the workers hold add up to what the trainer has?

    Args:
        trainer: The whole, as the trainer (all its ranks combined) has it.
        workers: One receipt per worker.
        locate: Digest that the trainer's values give for the region of a worker's
            piece. Only asked after a difference was found, to name the worker.

    Returns:
        Every difference, by parameter; empty if there is none.
    """
    together, violations = _combine(workers, "all workers")
    names = ", ".join(r.holder for r in workers) or "no worker"
    for name in sorted({*trainer.parameters, *together.parameters}):
        mine, theirs = trainer.parameters.get(name), together.parameters.get(name)
        if mine is None or theirs is None:
            here, there = (trainer.holder, names) if theirs is None else (names, trainer.holder)
            violations.append(
                Violation(
                    subject=name,
                    problem=f"only {here} has it",
                    expected=f"the same parameter on {there}",
                    found="absent",
                    remedy="compare the checkpoint names of the trainer and the weight map",
                )
            )
            continue
        if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            violations.append(
                Violation(
                    subject=name,
                    problem="another dtype or shape was loaded",
                    expected=f"{mine.dtype} {list(mine.shape)} ({trainer.holder})",
                    found=f"{theirs.dtype} {list(theirs.shape)} ({names})",
                    remedy="give the trainer's receipt the dtype that is sent (`dtype=`)",
                )
            )
            continue
        incomplete = [
            (p, who) for p, who in ((mine, trainer.holder), (theirs, names)) if not p.complete
        ]
        for p, who in incomplete:
            violations.append(
                Violation(
                    subject=name,
                    problem=f"the pieces of {who} do not cover it once",
                    expected=f"{math.prod(p.shape)} elements",
                    found=f"{p.covered} elements in {len(p.pieces)} regions",
                    remedy="a worker's receipt is missing, or the weight map's regions overlap",
                )
            )
        if not incomplete and mine.digest != theirs.digest:
            violations.append(_different(name, mine, workers, trainer.holder, locate))
    return violations


def _different(
    name: str,
    mine: ParameterReceipt,
    workers: Sequence[Receipt],
    holder: str,
    locate: Callable[[str, Piece], int] | None,
) -> Violation:
    holders = [r for r in workers if r.parameters.get(name) and r.parameters[name].pieces]
    guilty = [
        f"{r.holder} (region {list(p.shape)} at {list(p.offsets)})"
        for r in holders
        for p in r.parameters[name].pieces
        if locate is not None and locate(name, p) != p.digest
    ]
    if not guilty and len(holders) == 1:
        guilty = [holders[0].holder]
    found = ", ".join(guilty) or "one or more of " + ", ".join(r.holder for r in holders)
    total = sum(p.digest for p in _combine(holders, "")[0].parameters[name].pieces) % 2**64
    return Violation(
        subject=name,
        problem="loaded weights differ from the trainer's",
        expected=f"digest {mine.digest_text} ({holder})",
        found=f"digest {total:016x}; differs on {found}",
        remedy="the engine holds stale or corrupted weights: deliver them again or restart it",
    )


def reduce_receipt(
    receipt: Receipt,
    group: Any = None,
    *,
    holder: str = "trainer",
    method: Literal["sum", "gather"] = "sum",
) -> Receipt:
    """Combine the receipts of all ranks of a process group, on every rank.

    Never a weight travels. ``sum`` adds up two integers per parameter with an
    all-reduce: what each rank sends and holds does not grow with the number of
    ranks. It needs every element to be on one rank only, as FSDP has it, and
    notices when that is not so. ``gather`` sends a line per piece to everybody,
    which grows with ranks times parameters, and treats replicas (HSDP) rightly.

    Raises:
        ReceiptError: On every rank: the ranks do not hold one model of one version,
            or, with ``sum``, elements are held more than once or not at all.
    """
    import torch
    import torch.distributed as dist

    if method == "gather":
        everybody: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everybody, receipt.as_dict(), group=group)
        return combine_receipts([Receipt.from_dict(d) for d in everybody], holder=holder)

    names = sorted(receipt.parameters)
    mine = [receipt.parameters[n] for n in names]
    text = repr([receipt.version, [(p.name, p.dtype, p.shape) for p in mine]])
    facts = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    extremes = torch.tensor([facts, -facts], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    if int(extremes[0]) != -int(extremes[1]):
        # Names or versions differ, so there is no common vector to add up; the slow
        # way says who differs in what.
        reduce_receipt(receipt, group, holder=holder, method="gather")
        raise ReceiptError(
            f"the receipts of {holder} cannot be added up",
            [
                Violation(
                    subject="parameter names",
                    problem="the ranks do not hold the same ones",
                    expected="every rank names every parameter, with or without a shard of it",
                    found=f"{len(names)} on this rank",
                    remedy="give named_parameters() of the sharded model on every rank",
                )
            ],
        )
    sums = torch.tensor(
        [*(_signed(p.digest) for p in mine), *(p.covered for p in mine)],
        dtype=torch.int64,
        device=device,
    )
    dist.all_reduce(sums, group=group)  # wraps modulo 2**64, as the digests do
    values = sums.tolist()
    digests, covered = values[: len(mine)], values[len(mine) :]
    violations = [
        Violation(
            subject=p.name,
            problem="its elements are not each on exactly one rank",
            expected=f"{math.prod(p.shape)} elements",
            found=f"{count} elements over all ranks",
            remedy='replicas (HSDP) need method="gather"; a shard may be missing otherwise',
        )
        for p, count in zip(mine, covered, strict=True)
        if count != math.prod(p.shape)
    ]
    if violations:
        raise ReceiptError(f"the receipts of {holder} cannot be added up", violations)
    return Receipt(
        holder=holder,
        version=receipt.version,
        parameters={
            p.name: ParameterReceipt(
                name=p.name,
                dtype=p.dtype,
                shape=p.shape,
                pieces=(Piece((0,) * len(p.shape), p.shape, d % 2**64),),
            )
            for p, d in zip(mine, digests, strict=True)
        },
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
