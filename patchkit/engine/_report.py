"""The runtime manifest: what is installed in this process, as data."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import CellType, CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from patchkit.engine import _inert as inert
from patchkit.engine import _shape as shape
from patchkit.engine._declare import Value
from patchkit.errors import PatchkitError
from patchkit.symbols import find_facts

if TYPE_CHECKING:
    from patchkit.engine._plan import Plan, PlannedPatch

SCHEMA = 1

# What a manifest tells about one process, beside what its digest covers.
TOLD = frozenset(
    {"schema", "digest", "state", "pid", "python", "time", "reviewed", "slots", "hits"}
)


@dataclass(frozen=True, slots=True)
class RuntimeManifest:
    """What is installed, comparable between processes.

    Attributes:
        compared: What the digest covers: patches and identities.
        told: What it does not: process, state, slots, hits, time.
    """

    compared: Mapping[str, Any]
    told: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """Equal in every process of one side and role, whatever its pid and paths are."""
        return digest_of(self.compared)

    def as_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "digest": self.digest, **self.compared, **self.told}

    def __str__(self) -> str:
        return json.dumps(self.as_dict(), indent=1, sort_keys=True)


def digest_of(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]


def manifest_digest(data: Mapping[str, Any]) -> str:
    """The digest that a runtime manifest, as plain data, should have.

    Whatever is not known to be about one process alone is covered, so that nothing can
    be added to a manifest without its digest noticing.
    """
    return digest_of({key: value for key, value in data.items() if key not in TOLD})


def runtime_manifest(
    plan: Plan, patches: list[PlannedPatch], state: str, hits: Mapping[str, int]
) -> RuntimeManifest:
    compared = {
        "adapter": plan.adapter.name,
        "side": plan.side,
        "profile": plan.profile,
        "versions": dict(sorted(plan.versions.items())),
        "unreviewed": dict(sorted(plan.unreviewed.items())),
        "patches": [_compared(planned) for planned in patches],
        "sources": _sources(patches),
        "skipped": sorted(f"{p.identity} {p.versions}" for p in plan.skipped),
    }
    told = {
        "state": state,
        "pid": os.getpid(),
        "python": platform.python_version(),
        "time": time.time(),
        "reviewed": not plan.unreviewed,
        "slots": {p.patch.identity: _slots(p) for p in patches},
        "hits": {p.patch.identity: hits.get(p.patch.identity, 0) for p in patches},
    }
    return RuntimeManifest(compared, told)


def _sources(patches: list[PlannedPatch]) -> dict[str, str]:
    """Digests of the files that replacements are written in: their helpers count too."""
    modules = set()
    for planned in patches:
        replacement = planned.patch.replacement
        if isinstance(replacement, str):
            modules.add(replacement.partition(":")[0])
        elif (function := inert.function_of(replacement)) is not None:
            modules.add(inert.home(function))
    return {name: digest for name in sorted(modules) if (digest := _file_digest(name))}


def _file_digest(name: str) -> str:
    module = inert.loaded(name)
    file = inert.namespace(module).get("__file__") if module is not None else None
    if file is None:
        try:
            spec = find_spec(name)
        except (ImportError, ValueError):
            return ""
        file = spec.origin if spec is not None else None
    if not isinstance(file, str) or not os.path.isfile(file):
        return ""
    with open(file, "rb") as source:
        content = source.read().replace(b"\r\n", b"\n")
    return hashlib.sha256(content).hexdigest()[:32]


def _compared(planned: PlannedPatch) -> dict[str, Any]:
    patch, facts = planned.patch, planned.facts
    return {
        "symbol": patch.symbol,
        "key": patch.key,
        "action": patch.action,
        "replacement": patch.replacement_name,
        "required": patch.required,
        "before": _identity_of_target(planned),
        "source_digest": facts.digest if facts is not None else None,
        "after": identity_of_replacement(patch.replacement),
    }


def _identity_of_target(planned: PlannedPatch) -> dict[str, Any]:
    """Equal while a patch is pending and after: from the source, not the live object."""
    facts = planned.facts
    if facts is None:
        target = planned.target
        return live_identity(target.value) if target is not None else {}
    return {
        "symbol": facts.inherited_from or planned.patch.symbol,
        "file": facts.file,
        "line": facts.line,
        "kind": facts.kind,
        "code": facts.body_digest,
    }


def identity_of_replacement(replacement: Any) -> dict[str, Any]:
    """Where the replacement is written and what its code is, the same on every machine."""
    reference = replacement
    if not isinstance(reference, str):
        function = inert.function_of(replacement)
        if function is None:
            literal = type(replacement) is Value
            return {"value": inert.content_of(replacement.value if literal else replacement)}
        reference = f"{inert.home(function)}:{function.__qualname__}"
    facts = None
    if "<" not in reference and isinstance(reference, str):
        try:
            facts = find_facts(reference)
        except (PatchkitError, ImportError):
            facts = None
    if facts is not None:
        return {
            "symbol": reference,
            "file": facts.file,
            "line": facts.line,
            "kind": facts.kind,
            "code": facts.digest,
        }
    return {
        "symbol": reference,
        **({} if isinstance(replacement, str) else live_identity(replacement)),
    }


def live_identity(value: Any) -> dict[str, Any]:
    """The same of an object without source; its code digest depends on the Python version."""
    function = inert.function_of(value)
    if function is None:
        return {"value": inert.describe(value), "kind": inert.kind_of(value, None)}
    code = function.__code__
    return {
        "symbol": f"{function.__module__}:{function.__qualname__}",
        "file": inert.short_file(code.co_filename, inert.home(function)),
        "line": code.co_firstlineno,
        "kind": inert.kind_of(value, None),
        "code": code_digest(function),
        "parameters": shape.show(shape.params(function)),
        # A factory's products have one code, and differ in what they hold.
        **({"closure": list(map(_in_cell, cells))} if (cells := function.__closure__) else {}),
    }


def _in_cell(cell: CellType) -> str:
    try:
        held = cell.cell_contents
    except ValueError:
        return inert.describe(inert.MISSING)
    # What can change is a function's state (a cache, a counter), and no part of what it is.
    mutable = type(held) in (list, dict, set)
    return inert.describe(held) if mutable else inert.content_of(held)


def code_digest(function: FunctionType) -> str:
    digest = hashlib.sha256()

    def feed(code: CodeType) -> None:
        digest.update(code.co_code)
        digest.update(repr(code.co_names).encode())
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                feed(constant)
            else:
                digest.update(inert.content_of(constant).encode())

    feed(function.__code__)
    return digest.hexdigest()[:32]


def _slots(planned: PlannedPatch) -> dict[str, Any]:
    return {
        "written": [entry.slot.name for entry in planned.entries],
        "kept": list(planned.kept),
        "accepted": list(planned.accepted),
        "pending": planned.pending,
    }


def plan_as_dict(plan: Plan) -> dict[str, Any]:
    """A plan for reading: what would be written where, and what stands against it."""
    return {
        "adapter": plan.adapter.name,
        "side": plan.side,
        "profile": plan.profile,
        "versions": dict(sorted(plan.versions.items())),
        "reviewed": not plan.unreviewed,
        "unreviewed": dict(sorted(plan.unreviewed.items())),
        "patches": [_planned_as_dict(planned) for planned in plan.patches],
        "skipped": [{"symbol": p.identity, "versions": p.versions} for p in plan.skipped],
        "violations": [violation.as_dict() for violation in plan.violations],
    }


def _planned_as_dict(planned: PlannedPatch) -> dict[str, Any]:
    patch, target = planned.patch, planned.target
    chain = inert.layers(target.value) if target is not None else []
    around = [f for f in chain if target and f is not target.value and f is not target.function]
    return {
        "symbol": patch.identity,
        "action": patch.action,
        "replacement": patch.replacement_name,
        "reason": patch.reason,
        "consequence": patch.consequence,
        "until": patch.until,
        "required": patch.required,
        "kind": target.kind if target is not None else planned.facts and planned.facts.kind,
        "digest": planned.facts.digest if planned.facts is not None else None,
        **_slots(planned),
        "holds": [inert.describe(entry.before) for entry in planned.entries],
        "layers": [inert.describe(layer) for layer in around],
        "notes": list(planned.notes),
    }
