"""The patch engine: declare, plan, install, verify, undo. It knows no model and no framework."""

from __future__ import annotations

from patchkit.engine._canary import Canary
from patchkit.engine._compiled import (
    cache_environment,
    load_evidence,
    patch_set_digest,
    store_evidence,
)
from patchkit.engine._declare import FROZEN, NATIVE, Adapter, Patch, Submodule, Value
from patchkit.engine._discover import adapter_names, find_adapter
from patchkit.engine._install import (
    exact_context,
    install,
    installations,
    stock_context,
    trainer_switch,
)
from patchkit.engine._installation import Installation
from patchkit.engine._plan import Plan, PlannedPatch, inspect_plan, plan
from patchkit.engine._report import RuntimeManifest, manifest_digest
from patchkit.engine._switch import State, Switch
from patchkit.engine._targets import resolve as resolve_reference

__all__ = [
    "FROZEN",
    "NATIVE",
    "Adapter",
    "Canary",
    "Installation",
    "Patch",
    "Plan",
    "PlannedPatch",
    "RuntimeManifest",
    "State",
    "Submodule",
    "Switch",
    "Value",
    "adapter_names",
    "cache_environment",
    "exact_context",
    "find_adapter",
    "inspect_plan",
    "install",
    "installations",
    "load_evidence",
    "manifest_digest",
    "patch_set_digest",
    "plan",
    "resolve_reference",
    "stock_context",
    "store_evidence",
    "trainer_switch",
]
