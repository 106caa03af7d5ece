"""Overrides in the torch dispatcher: one owned library handle per override, removable.

The dispatcher keeps a stack of kernels per operator and key; destroying the
handle that registered one uncovers the one below. What it holds can only be
read as text (``_dispatch_dump``), so that is what verification compares.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

from patchkit.engine import _inert as inert
from patchkit.engine import _shape as shape
from patchkit.engine._build import Built
from patchkit.engine._declare import Patch
from patchkit.engine._inert import MISSING
from patchkit.engine._targets import Target, resolve
from patchkit.engine.errors import violation
from patchkit.errors import PatchkitError, Violation
from patchkit.symbols import Symbol


class Kernel(str):
    """The rows of the dispatcher's table for one operator and key: equal rows, one object."""

    _known: dict[str, Kernel] = {}  # noqa: RUF012 - shared on purpose

    @classmethod
    def of(cls, rows: str) -> Kernel:
        return cls._known.setdefault(rows, cls(rows))

    @property
    def active(self) -> str:
        return self.partition("\n")[0]


class DispatchSlot:
    """The place of one operator and dispatch key in torch's table."""

    __slots__ = ("_function", "_key", "_library", "_operator", "_rows", "name")

    def __init__(self, operator: str, key: str) -> None:
        self.name = f"torch.ops:{operator}[{key!r}]"
        self._operator = operator
        self._key = key
        self._library: Any = None
        self._function: Any = None
        self._rows = ""

    def read(self) -> Any:
        rows = rows_of(self._operator, self._key)
        if self._library is not None and rows == self._rows:
            return self._function
        return Kernel.of(rows) if rows else MISSING

    def write(self, value: Any) -> None:
        """A function overrides; what was there before (text or MISSING) uncovers it."""
        if value is MISSING or type(value) is Kernel:
            if self._library is not None:
                self._library._destroy()
                self._library = self._function = None
            return
        from torch.library import Library

        namespace, _, name = self._operator.partition("::")
        library = Library(namespace, "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that an override overrides is no news
            library.impl(name, value, self._key)
        self._library, self._function = library, value
        self._rows = rows_of(self._operator, self._key)


def rows_of(operator: str, key: str) -> str:
    """The kernels of an operator for one key, active one first; empty where there are none."""
    import torch

    text = torch._C._dispatch_dump(operator)
    wanted = (f"{key}:", f"{key}[alias]:", f"{key} (inactive):")
    return "\n".join(line for line in text.splitlines() if line.startswith(wanted))


def locate(patch: Patch) -> Target | Violation | None:
    """The target of a ``dispatch`` patch; None while torch is not imported."""
    symbol = Symbol.parse(patch.symbol)
    torch = inert.loaded("torch")
    if torch is None:
        return None
    operator, schema = _schema(symbol.qualname)
    if schema is None or symbol.module != "torch.ops":
        return violation(
            symbol,
            "no such operator",
            expected="torch.ops:namespace.operator or torch.ops:namespace.operator.overload",
            found=f"{operator} is not in the dispatcher",
            remedy="import what registers it first, or correct the name",
        )
    slot = DispatchSlot(operator, str(patch.key))
    held = slot.read()
    registered: Any = getattr(sys.modules["torch.library"], "_impls", set())
    entry = f"{operator.replace('::', '/')}/{patch.key}"
    home = str(torch.__file__).rpartition("/")[0]
    if entry in registered and home not in str(held):
        return violation(
            symbol,
            "somebody else has overridden it",
            expected="the kernel that torch or its package registered",
            found=held.active if type(held) is Kernel else str(held),
            remedy="install before the other override, or remove that",
        )
    return Target(symbol, slot, str(patch.key), held, schema, "operator", symbol)


def _schema(qualname: str) -> tuple[str, Any]:
    import torch

    namespace, _, rest = qualname.partition(".")
    name, _, overload = rest.partition(".")
    overload = "" if overload == "default" else overload
    operator = f"{namespace}::{name}" + (f".{overload}" if overload else "")
    try:
        return operator, torch._C._get_schema(f"{namespace}::{name}", overload)
    except RuntimeError:
        return operator, None


def build(patch: Patch, target: Target, switched: bool, find: list[Violation]) -> Built | None:
    """Check the replacement against the operator's schema."""
    try:
        new = inert.function_of(resolve(patch.replacement))
    except PatchkitError as error:
        find.append(violation(patch.symbol, "its replacement cannot be found", found=str(error)))
        return None
    if new is None or switched:
        find.append(
            violation(
                patch.symbol,
                "an operator needs a plain function, on the rollout side",
                expected="a function defined with `def`",
                found="the trainer side: an override acts in every thread"
                if switched
                else inert.describe(resolve(patch.replacement)),
                remedy="patch the Python function that calls the operator",
            )
        )
        return None
    wanted = tuple(
        shape.Param(a.name, "keyword-only" if a.kwarg_only else "positional-or-keyword", True)
        for a in target.value.arguments
    )
    given = tuple(p._replace(required=True) for p in shape.params(new))
    if told := shape.difference(wanted, given, bound=False):
        find.append(
            violation(
                patch.symbol,
                "its replacement does not fit the operator's schema",
                expected=str(target.value),
                found=f"{shape.show(given)}: {told}",
                remedy="give it exactly the schema's arguments",
            )
        )
        return None
    copy = shape.twin(new)
    return Built(copy, (), copy)
