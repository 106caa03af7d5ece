"""Versions, and names that other modules import from here."""

import vllm
from packaging.version import Version
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod

try:
    from vllm.model_executor.determinism import batch_invariant
except ImportError:
    from vllm.model_executor.layers import batch_invariant

VLLM = Version(vllm.__version__.split("+")[0])
HAS_V2_RUNNER = VLLM >= Version("0.30")


def older_than(text):
    return VLLM < Version(text)


def replace_attribute(target, name, value):
    """Put `value` in the place of `target.name`."""
    if getattr(target, name, None) is value:
        return
    setattr(target, name, value)


__all__ = ["RowParallelLinear", "UnquantizedLinearMethod", "batch_invariant"]
