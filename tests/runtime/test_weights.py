"""Receipts of weights: additive over shards, keyed by position, blamed by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from patchkit.runtime.weights import (  # noqa: E402
    LoadedPiece,
    Receipt,
    ReceiptError,
    combine_receipts,
    compare_receipts,
    loaded_receipt,
    parameter_digest,
    reduce_receipt,
    tensors_receipt,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

pytestmark = pytest.mark.stack

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8]


def values(*shape: int, dtype=torch.bfloat16, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    t = torch.randn(*shape, generator=g) * 50
    return (t.abs() if dtype is torch.uint8 else t).to(dtype)


def whole(t: torch.Tensor, **kwargs) -> int:
    return parameter_digest(t, tuple(t.shape), (0,) * t.ndim, **kwargs)


def reference(t: torch.Tensor, name: str = "") -> int:
    """The definition, one Python integer at a time."""
    import hashlib

    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
    ints = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    total, m = 0, 2**64
    for i, bits in enumerate(t.contiguous().view(ints).flatten().tolist()):
        z = (bits * 0xD1342543DE82EF95 + i * 0x9E3779B97F4A7C15 + key) % m
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % m
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % m
        total = (total + (z ^ (z >> 31))) % m
    return total


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_the_definition(dtype):
    t = values(7, 13, dtype=dtype)
    before = t.clone()
    assert whole(t, name="a.weight") == reference(t, "a.weight")
    assert torch.equal(t, before), "reading a weight must not change it"


@pytest.mark.parametrize("chunk", [1, 2, 5, 13, 14, 100, 10_000])
def test_chunks_do_not_matter(chunk):
    t = values(3, 5, 13)
    assert whole(t, chunk=chunk) == whole(t)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_shards_add_up(dim, cut):
    t = values(4, 5, 6)
    n = t.shape[dim]
    low, high = t.narrow(dim, 0, cut), t.narrow(dim, cut, n - cut)
    offsets = [0, 0, 0]
    offsets[dim] = cut
    total = parameter_digest(low, t.shape, (0, 0, 0)) + parameter_digest(high, t.shape, offsets)
    assert total % 2**64 == whole(t)


def test_strided_views_are_read_as_they_look():
    t = values(6, 8)
    assert whole(t.t().contiguous().t()) == whole(t)
    assert whole(t[:, ::2]) == whole(t[:, ::2].contiguous())
    assert whole(t.flip(0)) != whole(t)


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (1, 1, 1)])
def test_odd_shapes(shape):
    t = values(*shape) if shape else torch.tensor(1.5, dtype=torch.bfloat16)
    assert whole(t) == reference(t)


def test_every_single_bit_counts():
    t = values(4, 4, dtype=torch.float32)
    clean = whole(t)
    bits = t.view(torch.int32)
    for i in range(16):
        for bit in range(32):
            mask = 1 << bit if bit < 31 else -(1 << 31)
            bits.view(-1)[i] ^= mask
            assert whole(t) != clean
            bits.view(-1)[i] ^= mask
    assert whole(t) == clean


def test_positions_names_and_order_count():
    t = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    swapped = t.clone()
    swapped[[0, 1]] = t[[1, 0]]
    assert len({whole(t), whole(swapped), whole(t, name="x"), whole(t, name="y")}) == 4


def test_cast_is_the_cast():
    t = values(300, 7, dtype=torch.float32)
    assert whole(t, dtype=torch.bfloat16) == whole(t.to(torch.bfloat16))


def test_a_region_outside_the_parameter_is_refused():
    with pytest.raises(ReceiptError, match=r"shape \[2, 2\] at \[3, 0\]"):
        parameter_digest(values(2, 2), (4, 2), (3, 0), name="w")


# -- a small model as a tensor-parallel engine holds it ----------------------------------

E, H, F, V = 4, 6, 8, 10


def checkpoint(seed: int = 0) -> dict[str, torch.Tensor]:
    return {
        "q.weight": values(8, H, seed=seed),
        "k.weight": values(4, H, seed=seed + 1),
        "experts.gate_up": values(E, 2 * F, H, seed=seed + 2),
        "experts.down": values(E, H, F, seed=seed + 3),
        "norm.weight": values(H, seed=seed + 4),
        "embed.weight": values(V, H, seed=seed + 5),
    }


class Worker(torch.nn.Module):
    """Merged q/k, merged gate/up, sharded down, replicated norm, padded vocabulary."""

    def __init__(self, full: dict[str, torch.Tensor], rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        h, pad = F // size, -(-V // size)

        def part(name: str, dim: int) -> torch.Tensor:
            return full[name].chunk(size, dim)[rank]

        gate, up = full["experts.gate_up"].split(F, 1)
        embed = torch.zeros(pad * size, H, dtype=torch.bfloat16)
        embed[:V] = full["embed.weight"]
        self.weights = torch.nn.ParameterDict(
            {
                "qk": torch.cat([part("q.weight", 0), part("k.weight", 0)]),
                "w13": torch.cat([gate.narrow(1, rank * h, h), up.narrow(1, rank * h, h)], 1),
                "w2": part("experts.down", 2).clone(),
                "norm": full["norm.weight"].clone(),
                "embed": embed.narrow(0, rank * pad, pad).clone(),
            }
        )

    def pieces(self, *, leave_out: str = ""):
        w, r, n = self.weights, self.rank, self.size
        q, k, h, pad = 8 // n, 4 // n, F // n, -(-V // n)
        rows = min(pad, V - r * pad)
        everything = [
            LoadedPiece("q.weight", w["qk"][:q], (r * q, 0), (8, H)),
            LoadedPiece("k.weight", w["qk"][q:], (r * k, 0), (4, H)),
            LoadedPiece("experts.gate_up", w["w13"][:, :h], (0, r * h, 0), (E, 2 * F, H)),
            LoadedPiece("experts.gate_up", w["w13"][:, h:], (0, F + r * h, 0), (E, 2 * F, H)),
            LoadedPiece("experts.down", w["w2"], (0, 0, r * h), (E, H, F)),
            LoadedPiece("norm.weight", w["norm"], (0,), (H,)),
            LoadedPiece("embed.weight", w["embed"][:rows], (r * pad, 0), (V, H)),
        ]
        return [p for p in everything if p.name != leave_out]


def receipts(full, size: int = 2, *, version: int = 1, change=None) -> list[Receipt]:
    found = []
    for rank in range(size):
        worker = Worker(full, rank, size)
        if change is not None:
            with torch.no_grad():
                change(worker)
        found.append(loaded_receipt(f"worker {rank}", worker, worker.pieces(), version=version))
    return found


def trainer(full, **kwargs) -> Receipt:
    return tensors_receipt("trainer", full.items(), version=1, **kwargs)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_worker_receipts_add_up_to_the_trainers(size):
    full = checkpoint()
    found = receipts(full, size)
    assert compare_receipts(trainer(full), found) == []
    assert combine_receipts(found).digest == trainer(full).digest


def test_float32_masters_are_compared_as_sent():
    full = checkpoint()
    masters = {n: t.float() + 1e-4 for n, t in full.items()}
    sent = {n: t.to(torch.bfloat16) for n, t in masters.items()}
    assert compare_receipts(trainer(masters, dtype=torch.bfloat16), receipts(sent)) == []
    (v, *_) = compare_receipts(trainer(masters), receipts(sent))
    assert "another dtype" in v.problem


def locate_in(full):
    def locate(name, piece):
        view = full[name]
        for d, (o, n) in enumerate(zip(piece.offsets, piece.shape, strict=True)):
            view = view.narrow(d, o, n)
        return parameter_digest(view, full[name].shape, piece.offsets, name=name)

    return locate


def poke(key: str, rank: int):
    def change(worker):
        if worker.rank == rank:
            flat = worker.weights[key].view(-1)
            flat[1] = flat[1] + 1

    return change


@pytest.mark.parametrize(
    ("key", "rank", "parameter"),
    [
        ("qk", 1, "q.weight"),
        ("w13", 0, "experts.gate_up"),
        ("w2", 1, "experts.down"),
        ("embed", 1, "embed.weight"),
    ],
)
def test_one_corrupted_shard_is_named(key, rank, parameter):
    full = checkpoint()
    found = receipts(full, change=poke(key, rank))
    (v,) = compare_receipts(trainer(full), found, locate=locate_in(full))
    assert v.subject == parameter
    assert f"worker {rank}" in v.found
    assert f"worker {1 - rank}" not in v.found
    (unlocated,) = compare_receipts(trainer(full), found)
    assert "one or more of worker 0, worker 1" in unlocated.found


def test_replicas_that_differ_are_named():
    full = checkpoint()
    found = compare_receipts(trainer(full), receipts(full, change=poke("norm", 1)))
    assert [v.subject for v in found] == ["norm.weight"]
    assert found[0].problem == "replicas on worker 0 and worker 1 differ"


def test_a_stale_worker_differs_everywhere():
    new, old = checkpoint(seed=100), checkpoint()
    mixed = [receipts(new)[0], receipts(old)[1]]
    subjects = {v.subject for v in compare_receipts(trainer(new), mixed)}
    assert subjects == set(new)


def test_a_missing_worker_leaves_gaps():
    full = checkpoint()
    found = compare_receipts(trainer(full), receipts(full)[:1])
    assert {v.subject for v in found} == set(full) - {"norm.weight"}
    assert all("do not cover it once" in v.problem for v in found)


def test_no_worker_at_all_is_no_agreement():
    full = checkpoint()
    assert len(compare_receipts(trainer(full), [])) == len(full)


def test_versions_must_be_one():
    full = checkpoint()
    mixed = [receipts(full, version=1)[0], receipts(full, version=2)[1]]
    (v,) = compare_receipts(trainer(full), mixed)
    assert "worker 0: 1, worker 1: 2" in v.found


@pytest.mark.parametrize("lost", ["q.weight", "extra"])
def test_names_on_one_side_only(lost):
    full = checkpoint()
    mine = dict(full)
    if lost == "extra":
        mine["extra"] = values(2)
    else:
        del mine[lost]
    (v,) = compare_receipts(trainer(mine), receipts(full))
    assert v.subject == lost
    assert "only" in v.problem


def test_a_map_that_leaves_a_parameter_out_is_refused():
    worker = Worker(checkpoint(), 0, 2)
    with pytest.raises(ReceiptError, match=r"worker 0: weights\.norm"):
        loaded_receipt("worker 0", worker, worker.pieces(leave_out="norm.weight"))


def test_plain_data_and_back():
    full = checkpoint()
    import json

    for r in (trainer(full), *receipts(full)):
        again = Receipt.from_dict(json.loads(json.dumps(r.as_dict())))
        assert again == r
        assert again.digest == r.digest


# -- FSDP2 shards -------------------------------------------------------------------------


def digests(receipt: Receipt) -> dict[str, list]:
    return {n: [p.dtype, list(p.shape), p.digest_text] for n, p in receipt.parameters.items()}


def said(action) -> str:
    try:
        action()
    except ReceiptError as e:
        return str(e)
    return "nothing was raised"


def sharded(rank: int) -> dict:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 1)
        )

    full = {n: p.detach().clone() for n, p in model().named_parameters()}
    expected = tensors_receipt("x", full.items(), dtype=torch.bfloat16)
    flat = fully_shard(model(), mesh=init_device_mesh("cpu", (4,)))
    hybrid = fully_shard(
        model(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    )

    def mine(module, version=4):
        return tensors_receipt(
            "rank", module.named_parameters(), dtype=torch.bfloat16, version=version
        )

    summed = reduce_receipt(mine(flat))
    stray = mine(flat, version=5 if rank == 2 else 4)
    lost = mine(flat)
    if rank == 1:
        kept = [(n, p) for n, p in flat.named_parameters() if n != "1.bias"]
        lost = tensors_receipt("rank", kept, dtype=torch.bfloat16, version=4)
    return {
        "expected": digests(expected),
        "summed": digests(summed),
        "gathered": digests(reduce_receipt(mine(flat), method="gather")),
        "hybrid": digests(reduce_receipt(mine(hybrid), method="gather")),
        "hybrid summed": said(lambda: reduce_receipt(mine(hybrid))),
        "versions": said(lambda: reduce_receipt(stray)),
        "lost": said(lambda: reduce_receipt(lost)),
        "version": summed.version,
        "alone": digests(mine(flat)),
        "complete": all(p.complete for p in summed.parameters.values()),
    }


def test_fsdp_shards_add_up_without_gathering_a_weight(tmp_path):
    from ranks import run_ranks

    for outcome in run_ranks(4, tmp_path, sharded):
        value = outcome["value"]
        assert value["summed"] == value["expected"]
        assert value["gathered"] == value["expected"]
        assert value["hybrid"] == value["expected"]
        assert value["alone"] != value["expected"]
        assert value["complete"]
        assert value["version"] == 4
        assert "not each on exactly one rank" in value["hybrid summed"]
        assert 'method="gather"' in value["hybrid summed"]
        assert "not at one version" in value["versions"]
        assert "do not hold the same ones" in value["lost"]
