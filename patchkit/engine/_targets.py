"""From the names in a declaration to the live objects behind them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import FunctionType
from typing import Any

from patchkit.engine import _inert as inert
from patchkit.engine._inert import MISSING
from patchkit.engine.errors import ReferenceNotFoundError, violation
from patchkit.errors import Violation
from patchkit.symbols import Symbol


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """What a symbol stands for in this process.

    Attributes:
        symbol: As declared.
        owner: The module or class that holds it (or will, for ``on_subclass``).
        attribute: Its name there.
        held: What the owner's own namespace holds: MISSING for an inherited member
            that is to be written into the subclass.
        value: The raw object, unbound, inherited or not.
        kind: In the words of the manifests.
        defined_in: The symbol under which it is defined.
    """

    symbol: Symbol
    owner: Any
    attribute: str
    held: Any
    value: Any
    kind: str
    defined_in: Symbol

    @property
    def function(self) -> FunctionType | None:
        return inert.function_of(self.value)

    @property
    def slot_name(self) -> str:
        if inert.is_class(self.owner):
            return f"{inert.class_name(self.owner)}.{self.attribute}"
        return f"{inert.namespace(self.owner).get('__name__')}:{self.attribute}"


def still_importing(module: Any) -> bool:
    spec = inert.namespace(module).get("__spec__")
    return bool(getattr(spec, "_initializing", False))


def locate(
    symbol: Symbol, *, on_subclass: bool = False, arrived: bool = False
) -> Target | Violation | None:
    """Find a symbol among the loaded modules; None if its module is not loaded.

    Args:
        symbol: What to find.
        on_subclass: Whether an inherited member belongs to the class that was named.
        arrived: The module has just been executed, by the import that asks.
    """
    module = inert.loaded(symbol.module)
    if module is None:
        return None
    if still_importing(module) and not arrived:
        # Other threads' imports were waited for; this one is further up the stack.
        return violation(
            symbol,
            "its module is being imported by this very thread",
            expected=f"{symbol.module} fully imported, or not begun",
            found="an import that is still running",
            remedy="install before the import or after it, not from inside",
        )
    owner: Any = module
    *path, name = symbol.qualname.split(".")
    for part in path:
        found = _member(owner, part)
        if not inert.is_class(found):
            return _absent(symbol, owner, part, found)
        owner = found
    held = inert.raw(owner, name)
    if held is not MISSING or not inert.is_class(owner):
        if held is MISSING:
            return _absent(symbol, owner, name, MISSING)
        return Target(symbol, owner, name, held, held, inert.kind_of(held, owner), symbol)
    base = inert.defining_class(owner, name)
    if base is None:
        return _absent(symbol, owner, name, MISSING)
    value = inert.raw(base, name)
    defined_in = Symbol.parse(f"{inert.class_name(base)}.{name}")
    holder, held = (owner, MISSING) if on_subclass else (base, value)
    return Target(symbol, holder, name, held, value, inert.kind_of(value, base), defined_in)


def _member(owner: Any, name: str) -> Any:
    if inert.is_class(owner):
        base = inert.defining_class(owner, name)
        return MISSING if base is None else inert.raw(base, name)
    return inert.raw(owner, name)


def _absent(symbol: Symbol, owner: Any, name: str, found: Any) -> Violation:
    where = inert.describe(owner)
    on_demand = inert.is_module(owner) and "__getattr__" in inert.namespace(owner)
    return violation(
        symbol,
        "not there",
        expected=f"{name!r} in {where}",
        found="a name the module only makes on demand" if on_demand else inert.describe(found),
        remedy="name the place that defines it; `patchkit diff` finds where an upgrade moved it",
    )


def resolve(reference: Any) -> Any:
    """The object a declaration refers to; strings are imported, all else is itself."""
    if not isinstance(reference, str):
        return reference
    symbol = Symbol.parse(reference)
    try:
        value: Any = import_module(symbol.module)
    except Exception as error:  # whatever a module raises when it is run
        raise ReferenceNotFoundError(reference, f"{type(error).__name__}: {error}") from error
    for part in symbol.qualname.split("."):
        if inert.is_module(value) or inert.is_class(value):
            found = _member(value, part)
        else:
            found = getattr(value, part, MISSING)
        if found is MISSING and inert.is_module(value):
            found = getattr(value, part, MISSING)  # the adapter's own module may be lazy
        if found is MISSING:
            raise ReferenceNotFoundError(reference, f"{inert.describe(value)} has no {part!r}")
        value = found
    return value
