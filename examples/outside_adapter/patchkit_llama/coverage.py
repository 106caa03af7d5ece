"""What the claim covers of a model's configuration, and what is not written yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from patchkit.bindings import settings
from patchkit.errors import Violation

# What no shared operator covers: the model is refused as long as anything stands here.
# Take an entry out together with the patch, or the rule, that makes it true.
MISSING: dict[str, str] = {}


def _exactly(config: Mapping[str, Any]) -> Any:
    yield settings.only(config, "attention_bias", False)
    yield settings.only(config, "mlp_bias", False)
    yield settings.only(config, "pretraining_tp", 1)


RULES = (
    settings.model_type("llama"),
    settings.decoder,
    settings.no_sliding_window,
    settings.gated_mlp,
    _exactly,
)


def check_model(config: Mapping[str, Any], *, rollout_tensor: int = 1) -> list[Violation]:
    """Compare a Hugging Face ``config.json`` with what the adapter covers.

    Args:
        config: The file's content.
        rollout_tensor: Tensor-parallel size of the rollout side.

    Returns:
        Every setting that is not covered; empty when the model is covered.
    """
    unwritten = [
        Violation(
            subject=name,
            problem="not covered by adapter llama yet",
            expected="a patch, or a rule that it needs none",
            found=found,
            remedy="write it, then take the entry out of MISSING in patchkit_llama/coverage.py",
        )
        for name, found in MISSING.items()
    ]
    return unwritten + settings.check("llama", config, RULES, rollout_tensor=rollout_tensor)
