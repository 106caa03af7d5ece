"""Differences planted on the rollout side of a real pair; run as a script, prints JSON.

One engine and one trainer serve all of them. Each plant is a patch, installed on top of
the adapter's with patchkit's own engine before vLLM is built; it does nothing until a
collective call marks a module, and nothing again once the mark is gone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from patchkit.engine import Adapter, Patch

LAYERS = "vllm.model_executor.layers."
# Marks of what is no module, by the plant's name.
GLOBAL: set[str] = set()


def planted(owner: Any, kind: str) -> bool:
    return vars(owner).get("planted") == kind


def norm(original: Any) -> Any:
    def forward_native(self: Any, x: Any, residual: Any = None) -> Any:
        import torch

        if planted(self, "epsilon"):
            right, self.variance_epsilon = self.variance_epsilon, 1e-5
            try:
                return original(self, x, residual)
            finally:
                self.variance_epsilon = right
        if planted(self, "batch shape") and len(x) >= 32:
            normal, *summed = original(self, x, residual)
            return ((normal.float() * 1.01).to(x.dtype), *summed)
        if planted(self, "unrounded residual") and residual is not None:
            whole = x.float() + residual.float()
            mean = whole.double().square().mean(-1, keepdim=True)
            normal = (whole * torch.rsqrt(mean + self.variance_epsilon)).to(x.dtype)
            return normal * self.weight, whole.to(x.dtype)
        if planted(self, "residual rounding") and residual is not None:
            cut = ((x.float() + residual.float()).view(torch.int32) & -65536).view(torch.float32)
            return original(self, cut.to(x.dtype)), cut.to(x.dtype)
        return original(self, x, residual)

    return forward_native


def rotary(original: Any) -> Any:
    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        import torch

        if not planted(self, "bf16 cos/sin"):
            return original(self, positions, query, key)
        half = self.head_size // 2
        exponent = torch.arange(0, self.head_size, 2, dtype=torch.float32) / self.head_size
        angle = positions.view(-1).float()[:, None] / self.base**exponent
        cos, sin = (t.to(torch.bfloat16).float()[:, None] for t in (angle.cos(), angle.sin()))

        def turned(x: Any) -> Any:
            heads = x.view(len(x), -1, self.head_size).float()
            a, b = heads[..., :half], heads[..., half:]
            both = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
            return both.to(x.dtype).view(x.shape)

        return turned(query), None if key is None else turned(key)

    return forward_cpu


def routing(original: Any) -> Any:
    def _compute_routing(
        self: Any,
        hidden_states: Any,
        router_logits: Any,
        indices_type: Any,
        *,
        input_ids: Any = None,
    ) -> Any:
        if planted(self, "unstable top-k"):
            # Stable on the reversed experts: of two equal ones, the higher id.
            weights, ids = original(
                self, hidden_states, router_logits.flip(-1), indices_type, input_ids=input_ids
            )
            return weights, router_logits.shape[-1] - 1 - ids
        weights, ids = original(
            self, hidden_states, router_logits, indices_type, input_ids=input_ids
        )
        if planted(self, "bf16 weights"):
            weights = weights.bfloat16().float()
        return weights, ids

    return _compute_routing


def experts(original: Any) -> Any:
    def forward_native(
        self: Any,
        layer: Any,
        x: Any,
        topk_weights: Any,
        topk_ids: Any,
        shared_experts: Any,
        shared_experts_input: Any,
    ) -> Any:
        def ran(weights: Any, ids: Any) -> Any:
            return original(self, layer, x, weights, ids, shared_experts, shared_experts_input)

        kind = vars(layer).get("planted")
        if kind not in ("order of combination", "combination in bf16"):
            return ran(topk_weights, topk_ids)
        order = topk_ids.argsort(-1, descending=True)
        weights, ids = topk_weights.gather(-1, order), topk_ids.gather(-1, order)
        parts = [ran(weights[:, [j]], ids[:, [j]]) for j in range(ids.shape[-1])]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
            if kind == "combination in bf16":
                total = total.bfloat16().float()
        return total

    return forward_native


def log_softmax(original: Any) -> Any:
    def compute_logprobs(logits: Any) -> Any:
        import torch

        if "bf16 log-softmax" in GLOBAL:
            return logits.to(torch.bfloat16).log_softmax(-1).float()
        if "temperature" in GLOBAL:
            return original(logits / 0.8)
        return original(logits)

    return compute_logprobs


def loader(original: Any) -> Any:
    def weight_loader_v2(self: Any, param: Any, loaded_weight: Any) -> Any:
        if planted(self, "transposed"):
            loaded_weight = loaded_weight.t().contiguous()
        if planted(self, "stale"):
            loaded_weight = vars(self)["planted_old"]
        return original(self, param, loaded_weight)

    return weight_loader_v2


def row_parallel(original: Any) -> Any:
    def forward(self: Any, input_: Any) -> Any:
        if not planted(self, "partial sums in bf16"):
            return original(self, input_)
        total = 0.0
        width = input_.shape[-1] // 4
        for i in range(4):
            part = slice(i * width, (i + 1) * width)
            total = total + (input_[:, part].float() @ self.weight[:, part].float().t()).to(
                input_.dtype
            )
        return (total, None) if self.return_bias else total

    return forward


def kv_cache(original: Any) -> Any:
    def do_kv_cache_update(
        self: Any, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any
    ) -> Any:
        import torch

        if planted(layer, "fp8 cache"):
            key, value = (t.to(torch.float8_e4m3fn).to(t.dtype) for t in (key, value))
        return original(self, layer, key, value, kv_cache, slot_mapping)

    return do_kv_cache_update


def gate(original: Any) -> Any:
    def forward(self: Any, x: Any) -> Any:
        logits, bias = original(self, x)
        return (logits.bfloat16().float() if planted(self, "bf16 router") else logits), bias

    return forward


def head(original: Any) -> Any:
    def apply(self: Any, layer: Any, x: Any, bias: Any = None) -> Any:
        logits = original(self, layer, x, bias)
        return logits.bfloat16() if planted(layer, "bf16 logits") else logits

    return apply


def plant_patch(symbol: str, factory: Any, *, required: bool = True) -> Patch:
    return Patch(
        symbol=symbol,
        action="wrap",
        replacement=factory,
        reason="a planted difference",
        consequence="the doctor has something to find",
        until="the tests end",
        required=required,
    )


MOE = LAYERS + "fused_moe."
PLANTS = Adapter(
    name="doctor_plants",
    after=("qwen3_moe",),
    rollout=(
        plant_patch(LAYERS + "layernorm:RMSNorm.forward_native", norm),
        plant_patch(LAYERS + "rotary_embedding.base:RotaryEmbedding.forward_cpu", rotary),
        plant_patch(MOE + "router.cpu_router:CPURouter._compute_routing", routing),
        plant_patch(
            MOE + "unquantized_fused_moe_method:UnquantizedFusedMoEMethod.forward_native", experts
        ),
        plant_patch(MOE + "router.gate_linear:GateLinear.forward", gate),
        plant_patch(LAYERS + "linear:RowParallelLinear.forward", row_parallel),
        plant_patch(LAYERS + "linear:RowParallelLinear.weight_loader_v2", loader),
        plant_patch(LAYERS + "vocab_parallel_embedding:UnquantizedEmbeddingMethod.apply", head),
        plant_patch(
            "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update",
            kv_cache,
        ),
        plant_patch("vllm.v1.sample.sampler:Sampler.compute_logprobs", log_softmax),
    ),
)

MAKE = """
import sys
from pathlib import Path
from safetensors.torch import load_file, save_file
from patchkit.engine import find_adapter, resolve_reference
folder = Path(sys.argv[1])
make = resolve_reference(find_adapter("qwen3_moe").tiny_model)
make(folder, seed=3, num_experts_per_tok=4)
weights = load_file(folder / "model.safetensors")
# Two experts of layer 1 that every token finds equally probable, to the bit.
tied = next(n for n in weights if n.endswith("layers.1.mlp.gate.weight"))
weights[tied][5] = weights[tied][2]
save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
"""


def mark(worker: Any, kind: str, path: str) -> None:
    """Runs in the worker: plant there, or take away with an empty kind."""
    if not path:
        GLOBAL.clear()
        GLOBAL.update({kind} if kind else ())
        return
    owner: Any = worker.model_runner.get_model()
    for part in path.split("."):
        owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
    if kind == "stale":
        vars(owner)["planted_old"] = owner.weight.detach().clone()
    if kind:
        vars(owner)["planted"] = kind
    else:
        vars(owner).pop("planted", None)


# name, mark, where, workload (None: the usual one)
CASES: list[tuple[str, str, str, dict[str, int] | None]] = [
    ("epsilon, first norm", "epsilon", "model.layers.0.input_layernorm", None),
    ("epsilon, later norm", "epsilon", "model.layers.1.post_attention_layernorm", None),
    ("epsilon, q norm", "epsilon", "model.layers.1.self_attn.q_norm", None),
    ("epsilon, final norm", "epsilon", "model.norm", None),
    ("batch shape", "batch shape", "model.layers.1.post_attention_layernorm", None),
    ("bf16 cos/sin", "bf16 cos/sin", "model.layers.0.self_attn.rotary_emb", None),
    ("unstable top-k", "unstable top-k", "model.layers.1.mlp.experts.router", None),
    ("bf16 weights", "bf16 weights", "model.layers.0.mlp.experts.router", None),
    (
        "combination in bf16",
        "combination in bf16",
        "model.layers.1.mlp.experts.routed_experts",
        None,
    ),
    (
        "order of combination",
        "order of combination",
        "model.layers.0.mlp.experts.routed_experts",
        {"sequences": 64, "longest": 280, "new_tokens": 1},
    ),
    ("unrounded residual", "unrounded residual", "model.layers.0.post_attention_layernorm", None),
    ("residual rounding", "residual rounding", "model.layers.1.input_layernorm", None),
    ("partial sums in bf16", "partial sums in bf16", "model.layers.0.self_attn.o_proj", None),
    ("fp8 cache", "fp8 cache", "model.layers.1.self_attn.attn", None),
    ("bf16 router", "bf16 router", "model.layers.0.mlp.gate", None),
    ("bf16 logits", "bf16 logits", "lm_head", None),
    ("bf16 log-softmax", "bf16 log-softmax", "", None),
    ("temperature", "temperature", "", None),
]


def examine(session: Any, name: str) -> dict[str, Any]:
    started = time.monotonic()
    found = session.examine().as_dict()
    found["name"], found["seconds"] = name, time.monotonic() - started
    del found["operators"]
    return found


def on_demand(session: Any) -> dict[str, Any]:
    """Nothing is held at first; what is needed is recorded again."""
    from dataclasses import replace

    usual, where = session.settings, "model.layers.0.input_layernorm"
    session.settings = replace(usual, tensor_bytes=0)
    session.llm.collective_rpc(mark, args=("epsilon", where))
    found = examine(session, "values on demand")
    session.llm.collective_rpc(mark, args=("", where))
    session.settings = usual
    return found


def columns(pair: Any, version: int, side: str) -> dict[str, Any]:
    """The selected log-probabilities of a recorded side, as a run's columns."""
    import numpy as np

    from patchkit.parity.doctor.recording import AFTER, OperatorKey

    record = getattr(pair, side).operators[OperatorKey(AFTER, "logprob")]
    return {
        "logprob": record.digests.astype(np.int32).view(np.float32).tolist(),
        "sequence": record.rows[:, 0].tolist(),
        "position": record.rows[:, 1].tolist(),
        "version": [version] * len(record.rows),
    }


def joined(*parts: dict[str, Any]) -> dict[str, Any]:
    """Several recordings as one run; sequences are numbered through."""
    found: dict[str, Any] = {key: [] for key in parts[0]}
    for number, part in enumerate(parts):
        for key, values in part.items():
            found[key] += [v + 1000 * number for v in values] if key == "sequence" else values
    return found


def lagging(session: Any) -> dict[str, Any]:
    """A real run in which older weights drew some tokens; weights move on by three steps."""
    from dataclasses import replace

    old = session.record()
    rollouts, trainers = [columns(old, 0, "rollout")], [columns(old, 0, "trainer")]
    for version in (1, 2, 3):
        gains = [1.0 if r.number % 2 else -1.0 for r in old.rollouts]
        session.trainer("step", rollouts=old.rollouts, advantages=gains, exact=True)
        later = replace(old, trainer=session.record_trainer(old.rollouts))
        rollouts.append(columns(old, 0, "rollout"))
        trainers.append(columns(later, version, "trainer"))
    return {"rollout": joined(*rollouts), "trainer": joined(*trainers)}


def tempered(session: Any) -> dict[str, Any]:
    """A real run whose rollout reports log-probabilities of another temperature."""
    usual, session.workload = session.workload, replace_tokens(session.workload)
    session.llm.collective_rpc(mark, args=("temperature", ""))
    pair = session.record()
    session.llm.collective_rpc(mark, args=("", ""))
    session.workload = usual
    return {"rollout": columns(pair, 0, "rollout"), "trainer": columns(pair, 0, "trainer")}


def replace_tokens(workload: Any) -> Any:
    """More tokens: what is estimated needs them."""
    from dataclasses import replace

    return replace(workload, sequences=12, new_tokens=40)


def after_updates(session: Any) -> list[dict[str, Any]]:
    """Weights that arrive wrongly: the receipts, which would notice, are off."""
    rpc = session.llm.collective_rpc
    session.begin_updates()
    session.engine.sync.mode = "off"
    rollouts = session.record().rollouts
    found = [examine(session, "version 0")]
    rpc(mark, args=("transposed", "model.layers.1.self_attn.o_proj"))
    session.update(rollouts, 1)
    rpc(mark, args=("", "model.layers.1.self_attn.o_proj"))
    found.append(examine(session, "transposed after reload"))
    session.update(rollouts, 2)
    found.append(examine(session, "reloaded well"))
    rpc(mark, args=("stale", "model.layers.0.self_attn.o_proj"))
    session.update(rollouts, 3)
    rpc(mark, args=("", "model.layers.0.self_attn.o_proj"))
    found.append(examine(session, "stale after reload"))
    gains = [1.0 if r.number % 2 else -1.0 for r in rollouts]
    session.trainer("step", rollouts=rollouts, advantages=gains, exact=True)
    found.append(examine(session, "weights not delivered"))
    session.deliver(4)
    # From here on the engine's prefix cache is not emptied, and says that it was.
    session.reset_cache = False
    found.append(examine(session, "cache filled"))
    engine = session.llm
    reset, engine.reset_prefix_cache = engine.reset_prefix_cache, lambda *a, **k: True
    session.update(rollouts, 5)
    found.append(examine(session, "cache of old weights"))
    engine.reset_prefix_cache = reset
    session.reset_cache = True
    found.append(examine(session, "cache emptied"))
    return found


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    started = time.monotonic()
    from patchkit.parity.doctor.setup import DoctorSettings, Workload, set_up

    with tempfile.TemporaryDirectory(prefix="patchkit-doctor-") as folder:
        model = Path(folder) / "tied"
        subprocess.run([sys.executable, "-c", MAKE, str(model)], check=True)
        setup = set_up(
            DoctorSettings(folder=Path(folder), model=model, pair="exact", adapter="qwen3_moe")
        )
        from patchkit.parity.doctor.session import DoctorSession

        def install_plants() -> None:
            import patchkit

            patchkit.install(adapter=PLANTS, side="rollout")

        with DoctorSession(setup, prepare=install_plants) as session:
            ready = time.monotonic() - started
            found = [examine(session, "nothing planted")]
            usual = session.workload
            for name, kind, path, workload in CASES:
                if sys.argv[1:] and name not in sys.argv[1:]:
                    continue
                session.workload = Workload(**workload) if workload else usual
                session.llm.collective_rpc(mark, args=(kind, path))
                found.append(examine(session, name))
                session.llm.collective_rpc(mark, args=("", path))
            session.workload = usual
            found.append(examine(session, "nothing left"))
            if not sys.argv[1:]:
                found.append(on_demand(session))
            pairs: dict[str, Any] = {}
            if not sys.argv[1:]:
                pairs["temperature"] = tempered(session)
                found += after_updates(session)
                pairs["lag"] = lagging(session)
    total = time.monotonic() - started
    json.dump({"ready_s": ready, "total_s": total, "cases": found, "pairs": pairs}, answers)
    answers.flush()


if __name__ == "__main__":
    main()
