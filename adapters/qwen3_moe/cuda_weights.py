"""The names under which vLLM's loader takes what the trainer holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

NAMES = "patchkit_adapters.qwen3_moe.cuda_weights:per_expert"


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
