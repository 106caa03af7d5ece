"""An FSDP2 trainer of Hugging Face Qwen3-MoE: replay and step, stock and exact."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu_runs.rollout import Sample


def packs(samples: Sequence[Sample], budget: int) -> list[list[int]]:
    """Indices of samples, cut into batches of at most ``budget`` tokens."""
    found: list[list[int]] = []
    room = 0
    for index, one in enumerate(samples):
        size = len(one.prompt) + len(one.tokens)
        if not found or size > room:
            found.append([])
            room = budget
        found[-1].append(index)
        room -= size
    return found


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences one after the other in one row, on the GPU."""

    ids: Tensor
    positions: Tensor
    starts: Tensor
    longest: int
    kept: Tensor
    targets: Tensor

    @classmethod
    def of(cls, batch: Sequence[Sample]) -> Packed:
        ids: list[int] = []
        positions: list[int] = []
        kept: list[int] = []
        targets: list[int] = []
        starts = [0]
        for one in batch:
            size = len(one.prompt) + len(one.tokens)
            # The logits at a position belong to the token that follows it.
            kept += range(starts[-1] + len(one.prompt) - 1, starts[-1] + size - 1)
            ids += one.prompt + one.tokens
            positions += range(size)
            targets += one.tokens
            starts.append(starts[-1] + size)
        longest = max(b - a for a, b in pairwise(starts))
        return cls(
            torch.tensor([ids]).cuda(),
            torch.tensor([positions]).cuda(),
            torch.tensor(starts, dtype=torch.int32).cuda(),
            longest,
            torch.tensor(kept).cuda(),
            torch.tensor(targets).cuda(),
        )


@dataclass(frozen=True, slots=True)
class Padded:
    """Sequences as rows, padded on the right, on the GPU."""

    ids: Tensor
    mask: Tensor
    kept: int
    rows: Tensor
    columns: Tensor
    targets: Tensor

    @classmethod
    def of(cls, batch: Sequence[Sample]) -> Padded:
        longest = max(len(s.prompt) + len(s.tokens) for s in batch)
        first = min(len(s.prompt) for s in batch) - 1  # logits before it are not asked for
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        rows: list[int] = []
        columns: list[int] = []
        targets: list[int] = []
        for row, one in enumerate(batch):
            size = len(one.prompt) + len(one.tokens)
            ids[row, :size] = torch.tensor(one.prompt + one.tokens)
            mask[row, :size] = 1
            rows += [row] * len(one.tokens)
            columns += range(len(one.prompt) - 1 - first, size - 1 - first)
            targets += one.tokens
        return cls(
            ids.cuda(),
            mask.cuda(),
            longest - first,
            torch.tensor(rows).cuda(),
            torch.tensor(columns).cuda(),
            torch.tensor(targets).cuda(),
        )


class Trainer:
    """Parameters and optimizer states in bf16, one FSDP2 unit per decoder layer.

    Args:
        model: Checkpoint folder; without weights in it they are drawn at random, each
            rank its own shards, so that a model needs no more memory than they do.
        optimizer: ``adamw`` or ``sgd``, which has no state.
        learning_rate: Of the optimizer.
        budget: Real tokens per packed batch.
    """

    def __init__(
        self,
        model: Path,
        *,
        optimizer: str = "adamw",
        learning_rate: float = 2e-4,
        budget: int = 16384,
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from transformers import Qwen3MoeForCausalLM

        from benchmarks.gpu_runs.model import has_weights

        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.budget = budget
        loaded = has_weights(model)
        if loaded:
            self.model = Qwen3MoeForCausalLM.from_pretrained(
                model, dtype=torch.bfloat16, attn_implementation="sdpa"
            ).to("cuda")
        else:
            self.model = _on_meta(model)
        self.model.train()
        self.experts_implementation = getattr(self.model.config, "_experts_implementation", "?")
        mesh = init_device_mesh("cuda", (self.world,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        if not loaded:
            _draw(self.model, self.rank)
        if optimizer == "adamw":
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                self.model.parameters(), lr=learning_rate, weight_decay=0.0, fused=True
            )
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=learning_rate)

    def reshard(self) -> None:
        """Take gathered parameters apart again: a forward alone leaves the outermost whole."""
        from torch.distributed.fsdp import FSDPModule

        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # --- one batch ------------------------------------------------------------

    def exact(self, batch: Packed) -> Tensor:
        """Log-probabilities of all sampled tokens of a packed batch, inside exact_context."""
        import patchkit
        from patchkit.providers.cuda import selected_token_logprobs

        with patchkit.exact_context():
            logits = self.model(
                input_ids=batch.ids,
                position_ids=batch.positions,
                cu_seq_lens_q=batch.starts,
                max_length_q=batch.longest,
                logits_to_keep=batch.kept,
                use_cache=False,
            ).logits[0]
            return selected_token_logprobs(logits, batch.targets)

    def stock(self, batch: Padded, *, mask: bool = False) -> Tensor:
        """The same of a right-padded batch, as Hugging Face computes it.

        Without ``mask`` padding is left to causality, which is right for
        right-padded rows and lets SDPA take its flash kernel.
        """
        import patchkit

        with patchkit.stock_context():
            logits = self.model(
                input_ids=batch.ids,
                attention_mask=batch.mask if mask else None,
                logits_to_keep=batch.kept,
                use_cache=False,
            ).logits[batch.rows, batch.columns]
            values = logits.float().log_softmax(-1)
            return values.gather(1, batch.targets[:, None])[:, 0]

    # --- many batches ---------------------------------------------------------

    def batches(self, samples: Sequence[Sample]) -> Iterator[tuple[list[int], bool]]:
        """This rank's batches as indices, and whether each is a repeat to keep ranks in step."""
        mine = list(range(self.rank, len(samples), self.world))
        own = [[mine[i] for i in pack] for pack in packs([samples[i] for i in mine], self.budget)]
        most = torch.tensor(len(own), device="cuda")
        dist.all_reduce(most, dist.ReduceOp.MAX)
        for number in range(int(most)):
            yield own[min(number, len(own) - 1)], number >= len(own)

    @torch.no_grad()
    def replay(self, samples: Sequence[Sample]) -> dict[int, Tensor]:
        """Exact log-probabilities by sample, this rank's share, on the CPU."""
        found: dict[int, Tensor] = {}
        for indices, repeat in self.batches(samples):
            values = self.exact(Packed.of([samples[i] for i in indices]))
            if not repeat:
                parts = values.cpu().split([len(samples[i].tokens) for i in indices])
                found.update(zip(indices, parts, strict=True))
        return found

    @torch.no_grad()
    def stock_replay(self, samples: Sequence[Sample]) -> dict[int, Tensor]:
        """The same as Hugging Face computes it, with batches of similar lengths."""
        found: dict[int, Tensor] = {}
        for indices, repeat in self.batches(samples):
            values = self.stock(Padded.of([samples[i] for i in indices]))
            if not repeat:
                parts = values.cpu().split([len(samples[i].tokens) for i in indices])
                found.update(zip(indices, parts, strict=True))
        return found

    def step(
        self,
        samples: Sequence[Sample],
        advantages: Sequence[float],
        *,
        prove: Callable[[Sequence[int], Tensor], None] | None = None,
        exact: bool = True,
    ) -> dict[str, Any]:
        """One policy-gradient step; returns the training forward's log-probabilities too.

        Args:
            samples: Of all ranks.
            advantages: One per sample.
            prove: Called with the samples of each batch and their log-probabilities
                before that batch's backward; raises where they are not the rollout's.
            exact: The exact forward, or Hugging Face's own.
        """
        total = sum(len(s.tokens) for s in samples)
        found: dict[int, Tensor] = {}
        for indices, repeat in self.batches(samples):
            batch = [samples[i] for i in indices]
            values = self.exact(Packed.of(batch)) if exact else self.stock(Padded.of(batch))
            if prove is not None:
                prove(indices, values)
            old = torch.tensor([v for s in batch for v in s.logprobs], device="cuda")
            weight = torch.tensor(
                [advantages[i] for i in indices for _ in samples[i].tokens], device="cuda"
            )
            loss = -(weight * torch.exp(values - old)).sum() / total * self.world
            (loss * 0.0 if repeat else loss).backward()
            if not repeat:
                parts = values.detach().cpu().split([len(s.tokens) for s in batch])
                found.update(zip(indices, parts, strict=True))
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if not bool(torch.isfinite(norm)):
            raise FloatingPointError(f"gradient norm is {float(norm)}; no step was taken")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        return {"logprobs": found, "grad_norm": float(norm)}


def _on_meta(folder: Path) -> Any:
    from transformers import AutoConfig, Qwen3MoeForCausalLM

    config = AutoConfig.from_pretrained(folder)
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            return Qwen3MoeForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def _draw(model: Any, rank: int) -> None:
    """Random weights of the spread of :mod:`benchmarks.gpu_runs.model`, shard by shard."""
    from benchmarks.gpu_runs.model import spread

    model.to_empty(device="cuda")
    # Not a parameter, so nothing else would fill it.
    rotary = type(model.model.rotary_emb)
    model.model.rotary_emb = rotary(config=model.config, device="cuda")
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            made = torch.Generator("cuda").manual_seed(number * 1009 + rank)
            local = parameter.to_local()
            mean, width = spread(name)
            local.normal_(mean, width, generator=made)


# --- timing ---------------------------------------------------------------------


def timed(work: Callable[[], Any], *, warm: int = 2, repeat: int = 5) -> dict[str, float]:
    """Seconds per call between synchronisations: median, least and most."""
    for _ in range(warm):
        work()
    found = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    found.sort()
    return {"median_s": found[len(found) // 2], "least_s": found[0], "most_s": found[-1]}


def random_samples(count: int, length: int) -> list[Sample]:
    """Samples of random tokens: what is timed does not depend on their values."""
    import random

    from benchmarks.gpu_runs.rollout import VOCABULARY, prompts

    draw = random.Random(11)
    return [
        Sample(p, [draw.randrange(3, VOCABULARY) for _ in range(length)], [0.0] * length)
        for p in prompts(5, count)
    ]


def measure(model: Path, out: Path, *, count: int = 128, length: int = 256) -> dict[str, Any]:
    """Replay and step, stock against exact, on this rank's GPU; also where the time goes."""
    import patchkit

    installation = patchkit.install(adapter="qwen3_moe", side="trainer", profile="vllm_bi")
    trainer = Trainer(model)
    samples = random_samples(count, length)
    ordered = sorted(samples, key=lambda s: len(s.prompt))
    result: dict[str, Any] = {
        "tokens": sum(len(s.prompt) + len(s.tokens) for s in samples),
        "sampled": sum(len(s.tokens) for s in samples),
        "sequences": count,
        "experts_implementation": trainer.experts_implementation,
    }
    result["gradient"] = _gradients(trainer, samples[:24])
    packed = [Packed.of([samples[i] for i in pack]) for pack in packs(samples, trainer.budget)]
    padded = [Padded.of([ordered[i] for i in pack]) for pack in packs(ordered, trainer.budget)]
    result["padded_tokens"] = sum(batch.ids.numel() for batch in padded)
    ways: dict[str, tuple[Sequence[Any], Callable[[Any], Tensor]]] = {
        "exact": (packed, trainer.exact),
        "stock": (padded, trainer.stock),
        "stock_masked": (padded, lambda batch: trainer.stock(batch, mask=True)),
    }
    for name, (batches, forward) in ways.items():

        @torch.no_grad()
        def replay(batches: Any = batches, forward: Any = forward) -> None:
            for batch in batches:
                forward(batch)

        def backward(batches: Any = batches, forward: Any = forward) -> None:
            for batch in batches:
                (forward(batch).sum() / 1e4).backward()

        def step(backward: Callable[[], None] = backward) -> None:
            backward()
            trainer.optimizer.step()
            trainer.optimizer.zero_grad(set_to_none=True)

        try:
            result[name] = {"replay": timed(replay), "step": timed(step)}
        except torch.OutOfMemoryError as error:
            result[name] = {"error": str(error)[:300]}
            trainer.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            continue
        result[name]["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        torch.cuda.reset_peak_memory_stats()
        if trainer.rank == 0 and name != "stock_masked":
            _profile(step, out / f"profile-{name}.txt")
    installation.verify()
    return result


def _profile(work: Callable[[], None], path: Path) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        work()
        torch.cuda.synchronize()
    table = recorded.key_averages().table(
        sort_by="self_device_time_total", row_limit=40, max_name_column_width=90
    )
    path.write_text(table)


def _gradients(trainer: Trainer, samples: Sequence[Sample]) -> dict[str, Any]:
    """Cosine between the exact and the stock gradient of one loss, over all parameters."""

    def collect(forward: Callable[[Any], Tensor], batch: Any) -> dict[str, Tensor]:
        trainer.optimizer.zero_grad(set_to_none=True)
        forward(batch).mean().backward()
        return {
            name: p.grad.detach().to_local().clone() if hasattr(p.grad, "to_local") else p.grad
            for name, p in trainer.model.named_parameters()
        }

    exact = collect(trainer.exact, Packed.of(samples))
    stock = collect(trainer.stock, Padded.of(samples))
    trainer.optimizer.zero_grad(set_to_none=True)
    dot, left, right = (
        torch.stack([(a[n].float() * b[n].float()).sum().double() for n in exact]).sum()
        for a, b in ((exact, stock), (exact, exact), (stock, stock))
    )
    finite = all(bool(torch.isfinite(g).all()) for g in exact.values())
    worst: dict[str, float] = {}
    for name in exact:
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        cosine = torch.nn.functional.cosine_similarity(
            exact[name].float().flatten(), stock[name].float().flatten(), dim=0
        )
        worst[kind] = min(worst.get(kind, 2.0), float(cosine))
    return {"cosine": float(dot / (left.sqrt() * right.sqrt())), "finite": finite, "worst": worst}
