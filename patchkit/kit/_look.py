"""A model's forward path, operator by operator, and who covers each on both sides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from patchkit.bindings import settings, vllm_cpu
from patchkit.engine import Patch
from patchkit.kit._known import (
    LAYERS,
    MAKERS,
    SHARED_EXPERTS_RELY_ON,
    WITH_SHARED_EXPERTS,
    Maker,
    applies,
    maker_of,
    only_calls,
)
from patchkit.kit._model import ModelClasses, model_classes
from patchkit.kit._signatures import Wrapper, fitting
from patchkit.kit._walk import ClassSource, Walked, walk

Status = Literal["covered", "as it is", "needs you"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One operator, class or setting.

    Attributes:
        side: "rollout", "trainer" or "config".
        operator: The library's layer, the model's class, or the setting.
        status: ``as it is``: exact without a patch. ``needs you``: no binding covers it.
        by: What covers it.
        note: What to do, or why nothing has to be done.
    """

    side: str
    operator: str
    status: Status
    by: str = ""
    note: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What :func:`look_at` found.

    Attributes:
        classes: The model in both libraries.
        rows: Every operator on the forward path, and every setting that matters.
        rollout: Names of the tuples in ``patchkit.bindings.vllm_cpu`` that cover it.
        trainer: Calls that make the trainer's patches, in order.
        wrappers: Call to the function that gives its replacement the signature of the
            model's own method, where that differs.
        relies_on: Forward methods that are not patched and must be as reviewed.
        rules: Rules of :mod:`patchkit.bindings.settings` for the adapter's ``covers``.
        routed: Whether the model routes tokens to experts.
        shared: Whether shared experts run beside them.
        rollout_classes: The model's own classes in vLLM, as symbols.
        trainer_classes: Those in transformers.
    """

    classes: ModelClasses
    rows: tuple[Row, ...]
    rollout: tuple[str, ...]
    trainer: tuple[str, ...]
    wrappers: Mapping[str, Wrapper]
    relies_on: tuple[str, ...]
    rules: tuple[str, ...]
    routed: bool
    shared: bool
    rollout_classes: tuple[str, ...]
    trainer_classes: tuple[str, ...]

    @property
    def missing(self) -> tuple[Row, ...]:
        """What no binding covers."""
        return tuple(row for row in self.rows if row.status == "needs you")


# In the order in which adapters declare them.
_ORDER = (
    "LINEAR", "LM_HEAD", "NORM", "ROTARY", "ATTENTION", "LOGPROBS",
    "ACTIVATION", "GATE", "ROUTER", "GROUPED_ROUTER", "EXPERTS", "EXPERTS_OUTPUT",
    "SHARED_EXPERTS_OUTPUT",
)  # fmt: skip

# A tied output layer is the embedding's own class, so that no ParallelLMHead shows.
_EVERY_MODEL = frozenset({"LM_HEAD", "LOGPROBS"})

# Settings that say nothing about numbers: names, tokens, what a framework does around them.
_HARMLESS = frozenset([
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "chunk_size_feed_forward",
    "dtype", "eos_token_id", "id2label", "initializer_range", "is_encoder_decoder", "label2id",
    "model_type", "output_attentions", "output_hidden_states", "pad_token_id", "problem_type",
    "return_dict", "torch_dtype", "transformers_version", "use_cache", "attn_implementation",
    "_attn_implementation", "output_router_logits", "router_aux_loss_coef",
    "tie_word_embeddings",
])  # fmt: skip
# Sizes and settings that bindings read, or that a rule judges.
_UNDERSTOOD = frozenset([
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta",
    "rope_parameters", "rope_scaling", "hidden_act", "attention_dropout", "quantization_config",
    "use_sliding_window", "sliding_window", "max_window_layers", "layer_types", "num_experts",
    "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
    "decoder_sparse_step", "mlp_only_layers",
])  # fmt: skip
# Must hold exactly this; a rule is written for each that the configuration has.
_ONLY: Mapping[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# Where shared experts run beside the routed ones: more that is understood, and vLLM builds an
# output layer of its own, which a tied checkpoint would leave as memory was.
_UNDERSTOOD_SHARED = frozenset([
    "attention_bias", "first_k_dense_replace", "n_group", "n_routed_experts", "n_shared_experts",
    "num_nextn_predict_layers", "partial_rotary_factor", "routed_scaling_factor", "topk_group",
    "use_qk_norm",
])  # fmt: skip
_ONLY_SHARED: Mapping[str, Any] = {"tie_word_embeddings": False}


def look_at(model: Path) -> Look:
    """Look at a model, in the sources of the installed libraries.

    Args:
        model: Its folder, or its ``config.json``.

    Raises:
        UnknownModelError: It is no model that both libraries know.
    """
    classes = model_classes(model)
    on_rollout = walk(classes.vllm_module, classes.vllm_class, "vllm.model_executor.models.")
    on_trainer = walk(
        classes.hf_module, classes.hf_class, classes.hf_module.rpartition(".")[0] + "."
    )
    makers = [maker for c in on_trainer.classes if (maker := maker_of(c.symbol)) is not None]
    shared = any(maker.function == "shared_moe" for maker in makers)
    names = {
        name
        for leaf in on_rollout.leaves
        if leaf in LAYERS
        for name in _patches(LAYERS[leaf].patches, shared)
    }
    routed = "EXPERTS" in names
    if routed and not shared:
        # Experts multiply and activate inside of one operator.
        names.discard("ACTIVATION")
    # With this setting there is a rule that it be empty: then no layer is dense.
    never_dense = routed and "mlp_only_layers" in classes.config
    trainer_rows, trainer, wrappers = _trainer_rows(on_trainer, never_dense, shared)
    rules = _rules(classes, routed, shared)
    return Look(
        classes=classes,
        rows=(
            *_rollout_rows(on_rollout, shared),
            *trainer_rows,
            *_config_rows(classes.config, rules, shared),
        ),
        rollout=tuple(name for name in _ORDER if name in names | _EVERY_MODEL),
        trainer=tuple(trainer),
        wrappers=wrappers,
        relies_on=tuple(_relies_on(on_rollout, on_trainer, shared)),
        rules=rules,
        routed=routed,
        shared=shared,
        rollout_classes=tuple(source.symbol for source in on_rollout.classes),
        trainer_classes=tuple(source.symbol for source in on_trainer.classes),
    )


# -- rollout ---------------------------------------------------------------------------


def _patches(names: Iterable[str], shared: bool) -> tuple[str, ...]:
    """Names of a layer's patches, in a model with shared experts or without."""
    return tuple(WITH_SHARED_EXPERTS.get(name, name) if shared else name for name in names)


def _rollout_rows(walked: Walked, shared: bool) -> Iterator[Row]:
    for leaf, users in walked.leaves.items():
        module, _, name = leaf.partition(":")
        known = LAYERS.get(leaf)
        where = ", ".join(user.rpartition(":")[2] for user in users)
        patches = _patches(known.patches, shared) if known is not None else ()
        if known is not None and (late := _for_another_version(patches)):
            yield Row(side="rollout", operator=name, status="needs you", note=late)
        elif known is not None:
            yield Row(
                side="rollout",
                operator=name,
                status="covered" if patches else "as it is",
                by=", ".join(f"vllm_cpu.{patch}" for patch in patches),
                note=known.note or f"in {where}",
            )
        elif module.startswith("vllm.model_executor.layers.") or _computes(module, name):
            yield Row(
                side="rollout",
                operator=f"{name}",
                status="needs you",
                note=f"{leaf}, built in {where}: no binding knows it; patch the method that "
                "computes, or show that its rows depend on themselves alone",
            )
    yield Row(
        side="rollout",
        operator="Sampler.compute_logprobs",
        status="covered",
        by="vllm_cpu.LOGPROBS",
        note="every model",
    )


def _for_another_version(names: Iterable[str]) -> str:
    """What to say where none of a layer's patches is for the installed version."""
    for name in names:
        patches: tuple[Patch, ...] = getattr(vllm_cpu, name)
        if not any(applies(patch) for patch in patches):
            ranges = " and ".join(dict.fromkeys(patch.versions for patch in patches))
            return f"vllm_cpu.{name} is for vllm {ranges}, and another version is installed"
    return ""


_INERT_NN = ("Module", "ModuleList", "ModuleDict", "Sequential", "Parameter", "Identity",
             "Embedding", "Buffer", "Dropout")  # fmt: skip


def _computes(module: str, name: str) -> bool:
    """Whether a leaf is one of torch's own layers with arithmetic in it."""
    return module == "torch.nn" and name not in _INERT_NN


_ROUTED_LAYERS = tuple(leaf for leaf, layer in LAYERS.items() if "EXPERTS" in layer.patches)


# -- trainer ---------------------------------------------------------------------------


def _trainer_rows(
    walked: Walked, never_dense: bool, shared: bool
) -> tuple[list[Row], list[str], dict[str, Wrapper]]:
    rows: list[Row] = []
    made: list[tuple[int, str]] = []
    wrappers: dict[str, Wrapper] = {}
    for source in walked.classes:
        if not source.has("forward"):
            continue
        maker = maker_of(source.symbol)
        if maker is not None and never_dense and maker.function == "gated_mlp":
            note = "no layer is dense: a rule demands an empty mlp_only_layers"
            rows.append(Row(side="trainer", operator=source.name, status="as it is", note=note))
        elif maker is not None and shared and maker.function == "experts":
            note = "its weights are read by the layer around it, which hf.shared_moe replaces"
            rows.append(Row(side="trainer", operator=source.name, status="as it is", note=note))
        elif maker is not None:
            rows.append(_covered_class(source, maker, wrappers))
            made.append((MAKERS.index(maker), maker.call(source.name)))
        elif only_calls(source.symbol):
            note = "calls the others; reviewed as relies_on"
            rows.append(Row(side="trainer", operator=source.name, status="as it is", note=note))
        else:
            rows.append(_unknown_class(source))
    answered = {row.operator for row in rows if row.status != "needs you"}
    rows += _uncovered_layers(walked, answered)
    # Norms first, the output layer last.
    return rows, [call for _, call in sorted(made)], wrappers


def _covered_class(source: ClassSource, maker: Maker, wrappers: dict[str, Wrapper]) -> Row:
    call = maker.call(source.name)
    patches = maker.patches(source.module, source.name)
    patch = next(filter(applies, patches), None)
    if patch is None:
        ranges = " and ".join(patch.versions for patch in patches)
        return Row(
            side="trainer",
            operator=source.name,
            status="needs you",
            by=call,
            note=f"this binding is for transformers {ranges}, and another version is installed",
        )
    fit = fitting(patch.symbol, str(patch.replacement))
    if fit is None:
        return Row(
            side="trainer",
            operator=source.name,
            status="needs you",
            by=call,
            note="its forward has other parameters than the shared replacement: write one that "
            "takes exactly these and calls the shared one",
        )
    if fit:
        wrappers[call] = replace(fit, versions=patch.versions)
        note = f"under its own signature, by {fit.name}"
        return Row(side="trainer", operator=source.name, status="covered", by=call, note=note)
    return Row(side="trainer", operator=source.name, status="covered", by=call)


def _unknown_class(source: ClassSource) -> Row:
    return Row(
        side="trainer",
        operator=source.name,
        status="needs you",
        note=f"its forward is none that a binding was written against: read {source.symbol}, "
        "then write a replacement, or list it in relies_on if it computes nothing",
    )


def _uncovered_layers(walked: Walked, patched: set[str]) -> Iterator[Row]:
    """torch's own layers in classes whose forward is not replaced."""
    for leaf, users in walked.leaves.items():
        module, _, name = leaf.partition(":")
        if not _computes(module, name):
            continue
        stock = [u.rpartition(":")[2] for u in users if u.rpartition(":")[2] not in patched]
        if stock:
            yield Row(
                side="trainer",
                operator=f"nn.{name}",
                status="needs you",
                note=f"built in {', '.join(stock)}, whose forward no binding replaces",
            )


def _relies_on(on_rollout: Walked, on_trainer: Walked, shared: bool) -> Iterator[str]:
    """What runs unpatched on the forward path: a change there changes the claim."""
    routing = {user for leaf in _ROUTED_LAYERS for user in on_rollout.leaves.get(leaf, ())}
    for source in on_rollout.classes:
        if shared and source.symbol in routing:
            yield f"{source.symbol}.__init__"  # widens the gate, holds the factor
        for method in ("forward", "compute_logits"):
            if source.has(method) and not source.name.endswith("PreTrainedModel"):
                yield f"{source.symbol}.{method}"
    if shared:
        yield from SHARED_EXPERTS_RELY_ON
    for leaf in on_rollout.leaves:
        if leaf in LAYERS and LAYERS[leaf].reviewed:
            yield leaf
    yield "vllm.v1.sample.sampler:Sampler.forward"
    for source in on_trainer.classes:
        if source.has("forward") and maker_of(source.symbol) is None:
            yield f"{source.symbol}.forward"


# -- configuration ---------------------------------------------------------------------


def _rules(classes: ModelClasses, routed: bool, shared: bool) -> tuple[str, ...]:
    config = classes.config
    rules = [f'settings.model_type("{classes.model_type}")', "settings.decoder"]
    rules.append("settings.no_sliding_window")
    if shared:
        rules += ["settings.gated_mlp", 'settings.experts("n_routed_experts")']
        rules += ["settings.grouped_experts", "settings.partial_rotation"]
    elif routed:
        names = [n for n in ("num_experts", "num_local_experts") if n in config] or ["num_experts"]
        rules.append(f"settings.experts({', '.join(map(repr, names))})".replace("'", '"'))
    else:
        rules.append("settings.gated_mlp")
    if only_settings(config, shared):
        rules.append("_exactly")
    return tuple(rules)


def only_settings(config: Mapping[str, Any], shared: bool) -> dict[str, Any]:
    """Settings of a configuration that have to be as they are, with what they must be."""
    wanted = {n: w for n, w in _ONLY.items() if not shared or n not in _UNDERSTOOD_SHARED}
    if shared:
        wanted |= _ONLY_SHARED
    return {name: value for name, value in wanted.items() if name in config}


def _config_rows(config: Mapping[str, Any], rules: tuple[str, ...], shared: bool) -> Iterator[Row]:
    found = [*settings.decoder(config), *settings.no_sliding_window(config)]
    if "settings.gated_mlp" in rules:
        found += settings.gated_mlp(config)
    if shared:
        found += [*settings.grouped_experts(config), *settings.partial_rotation(config)]
    only = only_settings(config, shared)
    found += [settings.only(config, name, wanted) for name, wanted in only.items()]
    for setting in found:
        if not setting.ok:
            yield Row(
                side="config",
                operator=setting.name,
                status="needs you",
                note=f"is {setting.found!r}; covered: {setting.covered}",
            )
    understood = _UNDERSTOOD | (_UNDERSTOOD_SHARED if shared else set())
    for name in sorted(set(config) - _HARMLESS - understood - set(_ONLY)):
        if config[name] is None:
            continue
        yield Row(
            side="config",
            operator=name,
            status="needs you",
            note=f"is {config[name]!r}: no rule says what it does to the numbers",
        )
