"""What of a Hugging Face ``config.json`` the shared bindings cover, rule by rule.

An adapter's ``covers`` function picks the rules of its operators::

    def check_model(config, *, rollout_tensor=1):
        rules = (model_type("qwen3"), attention, gated_mlp)
        return check("qwen3", config, rules, rollout_tensor=rollout_tensor)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from patchkit.bindings.claim import TREE_CHUNKS
from patchkit.errors import Violation

# Terms of one exact sum: see patchkit.providers.exact_sum.
_LONGEST_SUM = 8192

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One setting of a configuration.

    Attributes:
        name: As in ``config.json``, or what is computed from it.
        found: Its value.
        covered: What is covered, in words.
        ok: Whether it is.
    """

    name: str
    found: Any
    covered: str
    ok: bool


Rule = Callable[[Config], Iterable[Setting]]


def value(config: Config, name: str, default: Any = None) -> Any:
    """A setting, where null means the default."""
    found = config.get(name, default)
    return default if found is None else found


def only(config: Config, name: str, wanted: Any, covered: str = "") -> Setting:
    """A setting that has to be ``wanted``, which is also what it is when absent."""
    found = value(config, name, wanted)
    return Setting(name=name, found=found, covered=covered or repr(wanted), ok=found == wanted)


def model_type(name: str) -> Rule:
    """The architecture itself."""

    def rule(config: Config) -> Iterator[Setting]:
        found = config.get("model_type")
        yield Setting(name="model_type", found=found, covered=repr(name), ok=found == name)

    return rule


def rope(config: Config) -> Mapping[str, Any]:
    """Parameters of the rotation, under their new or their old name."""
    found = value(config, "rope_parameters") or value(config, "rope_scaling") or {}
    return found if isinstance(found, Mapping) else {}


def decoder(config: Config) -> Iterator[Setting]:
    """What every decoder has: widths, heads, rotation, nothing quantised."""
    heads, kv_heads = (
        value(config, "num_attention_heads", 0),
        value(config, "num_key_value_heads", 0),
    )
    size = value(config, "head_dim") or value(config, "hidden_size", 0) // max(1, heads)
    width = value(config, "hidden_size", 0)
    kind = rope(config).get("rope_type", rope(config).get("type", "default"))
    yield Setting(
        name="head_dim",
        found=size,
        covered=f"an even size up to {_LONGEST_SUM}",
        ok=0 < size <= _LONGEST_SUM and size % 2 == 0,
    )
    yield Setting(
        name="num_key_value_heads",
        found=kv_heads,
        covered=f"a divisor of num_attention_heads ({heads})",
        ok=kv_heads > 0 and heads % kv_heads == 0,
    )
    yield chunked("num_attention_heads * head_dim", heads * size)
    yield Setting(
        name="hidden_size",
        found=width,
        covered=f"at most {_LONGEST_SUM}",
        ok=0 < width <= _LONGEST_SUM,
    )
    yield only(config, "attention_dropout", 0.0)
    yield only(config, "hidden_act", "silu")
    yield Setting(name="rope_type", found=kind, covered="'default'", ok=kind == "default")
    found = config.get("quantization_config")
    yield Setting(name="quantization_config", found=found, covered="absent", ok=found is None)


def chunked(name: str, width: int) -> Setting:
    """A width that row-parallel layers cut into the slices of the tree."""
    most = TREE_CHUNKS * _LONGEST_SUM
    return Setting(
        name=name,
        found=width,
        covered=f"a multiple of {TREE_CHUNKS}, at most {most}",
        ok=0 < width <= most and width % TREE_CHUNKS == 0,
    )


def no_attention_bias(config: Config) -> Iterator[Setting]:
    """Projections without a bias."""
    yield only(config, "attention_bias", False)


def no_sliding_window(config: Config) -> Iterator[Setting]:
    """Every layer sees the whole context."""
    yield only(config, "use_sliding_window", False)
    kinds = sorted(set(value(config, "layer_types", ["full_attention"])))
    yield Setting(
        name="layer_types",
        found=kinds,
        covered="['full_attention']",
        ok=kinds == ["full_attention"],
    )


def gated_mlp(config: Config) -> Iterator[Setting]:
    """A dense feed-forward layer: gate, up and down projection."""
    yield chunked("intermediate_size", value(config, "intermediate_size", 0))


def experts(*names: str) -> Rule:
    """Routed experts; ``names`` are those under which their number may stand."""

    def rule(config: Config) -> Iterator[Setting]:
        found = next((count for name in names if (count := value(config, name, 0))), 0)
        chosen = value(config, "num_experts_per_tok", 0)
        yield Setting(
            name=names[0],
            found=found,
            covered="at least num_experts_per_tok",
            ok=found >= chosen > 0,
        )
        yield chunked("moe_intermediate_size", value(config, "moe_intermediate_size", 0))

    return rule


def grouped_experts(config: Config) -> Iterator[Setting]:
    """Groups of equal size; shared experts beside the routed ones, in every such layer."""
    experts = value(config, "n_routed_experts", 0)
    groups = value(config, "n_group", 1)
    kept = value(config, "topk_group", 1)
    size = experts // max(1, groups)
    yield Setting(
        name="n_group",
        found=groups,
        covered=f"a divisor of n_routed_experts ({experts}) with two experts a group",
        ok=groups > 0 and experts % groups == 0 and size >= 2,
    )
    yield Setting(
        name="topk_group",
        found=kept,
        covered="as many groups as hold num_experts_per_tok experts",
        ok=0 < kept <= groups and kept * size >= value(config, "num_experts_per_tok", 0),
    )
    shared = value(config, "n_shared_experts", 0)
    yield Setting(name="n_shared_experts", found=shared, covered="at least 1", ok=shared >= 1)
    width = shared * value(config, "moe_intermediate_size", 0)
    yield chunked("n_shared_experts * moe_intermediate_size", width)


def partial_rotation(config: Config) -> Iterator[Setting]:
    """A part of each head is rotated; half of it where the configuration does not say."""
    size = value(config, "head_dim") or value(config, "hidden_size", 0) // max(
        1, value(config, "num_attention_heads", 0)
    )
    factor = rope(config).get("partial_rotary_factor", value(config, "partial_rotary_factor", 0.5))
    turned = int(size * factor)
    yield Setting(
        name="partial_rotary_factor",
        found=factor,
        covered=f"an even part of head_dim ({size})",
        ok=0 < turned <= size and turned % 2 == 0,
    )


def check(
    adapter: str, config: Config, rules: Iterable[Rule], *, rollout_tensor: int = 1
) -> list[Violation]:
    """Everything of a configuration that an adapter does not cover.

    Args:
        adapter: Its name, for the messages.
        config: Content of ``config.json``.
        rules: What to look at.
        rollout_tensor: Tensor-parallel size of the rollout side.

    Returns:
        One violation per setting; empty when the model is covered.
    """
    divides = rollout_tensor > 0 and TREE_CHUNKS % rollout_tensor == 0
    settings = [(f"config.{s.name}", s) for rule in rules for s in rule(config)]
    parallel = "tensor-parallel size"
    covered = f"a divisor of {TREE_CHUNKS}, the slices of the tree"
    settings.append(
        (parallel, Setting(name=parallel, found=rollout_tensor, covered=covered, ok=divides))
    )
    return [
        Violation(
            subject=subject,
            problem=f"not covered by adapter {adapter}",
            expected=setting.covered,
            found=repr(setting.found),
            remedy="use a model inside the covered range, or an adapter that covers this one",
        )
        for subject, setting in settings
        if not setting.ok
    ]
