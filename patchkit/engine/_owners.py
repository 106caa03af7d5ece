"""Who refers to what: holders of objects, their owners, and names for them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import (
    CellType,
    FrameType,
    FunctionType,
)
from typing import Any

from patchkit.engine import _inert as inert
from patchkit.engine._slots import (
    AttributeSlot,
    CellSlot,
    DefaultSlot,
    IndexSlot,
    ItemSlot,
    RegistrySlot,
    Slot,
)

_DEPTH = 3  # how far up owners are looked for to find a name


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """One reference to an old object.

    Attributes:
        name: Where it is, in words that are equal from run to run.
        obj: The old object.
        slot: The place, if it can be written; None if not.
        held: What the slot holds: the object, or a bound method of it.
        why: Why it can't be written.
        instance: Whether a live instance holds it.
        holder: Identity of the object that holds it.
    """

    name: str
    obj: Any
    slot: Slot | None
    held: Any
    why: str = ""
    instance: bool = False
    holder: int = 0


class Private(list[Any]):
    """A list of foreign objects that the engine holds; scans pass over lists of this type."""


# Objects of these types are the engine's own bookkeeping. Filled by the modules that define them.
bookkeeping: set[type] = {
    Reference,
    Private,
    AttributeSlot,
    CellSlot,
    DefaultSlot,
    IndexSlot,
    ItemSlot,
    RegistrySlot,
}


def referrers_of(objects: Iterable[Any]) -> Private:
    """What refers to any of the objects, but for the argument list of this question."""
    arguments = tuple(objects)  # passed as it is; from 3.13 on it is among the answers
    return Private(h for h in gc.get_referrers(*arguments) if h is not arguments)


class Owners(dict[int, Private]):
    """Identity of an object -> those that refer to it."""


class ById(dict[int, Any]):
    """The old objects by identity."""


class Index:
    """Modules by the identity of their dict, and owners of what has no name itself."""

    __slots__ = ("ignored", "modules", "owners")

    def __init__(self, ignored: set[int]) -> None:
        self.ignored = ignored
        self.modules: dict[int, str] = {}
        for name, module in list(sys.modules.items()):
            if inert.is_module(module):
                space = inert.namespace(module)
                if name.startswith("patchkit.engine."):
                    self.ignored.add(id(space))  # leftovers keep their originals there
                else:
                    self.modules[id(space)] = name
        self.owners = Owners()

    def referrers(self, objects: Private) -> Private:
        return Private(h for h in referrers_of(objects) if not self.own(h))

    def own(self, holder: Any) -> bool:
        """Whether a holder is a frame or the engine's own."""
        kind = type(holder)
        return id(holder) in self.ignored or kind is FrameType or kind in bookkeeping

    def know(self, owners: Iterable[Any]) -> None:
        """Name the namespaces of classes; what ``vars`` shows is a view of a dict behind it."""
        for owner in owners:
            if inert.is_class(owner):
                for space in gc.get_referents(inert.namespace(owner)):
                    if type(space) is dict:
                        self.owners[id(space)] = Private([owner])

    def learn(self, objects: Private) -> None:
        """Find the owners of objects, and theirs, up to where a name is."""
        for _ in range(_DEPTH):
            unknown = Private(o for o in objects if id(o) not in self.owners and not self.named(o))
            if not unknown:
                return
            found = self.referrers(unknown)
            for o in unknown:
                self.owners[id(o)] = Private()
            for owner in found:
                for held in gc.get_referents(owner):
                    if id(held) in self.owners and not any(
                        owner is known for known in self.owners[id(held)]
                    ):
                        self.owners[id(held)].append(owner)
            objects = found

    def named(self, value: Any) -> str:
        """The name of a module dict, class or function; empty for everything else."""
        if type(value) is dict and id(value) in self.modules:
            return self.modules[id(value)]
        if inert.is_class(value):
            return inert.class_name(value)
        if type(value) is FunctionType:
            return f"{value.__module__}:{value.__qualname__}"
        return ""

    def path(self, value: Any) -> str:
        """A name for a holder, through its owners where it has none itself."""
        if name := self._path(value, _DEPTH):
            return name
        for owner in self.owners.get(id(value), ()):
            if type(value) is dict and is_instance_dict(owner, value):
                return f"an instance of {inert.class_name(type(owner))}"
        kind = inert.class_name(type(value))
        return f"an instance of {kind}" if _has_dict(value) else f"a {type(value).__name__}"

    def _path(self, value: Any, depth: int) -> str:
        if name := self.named(value):
            return name
        for owner in self.owners.get(id(value), ()) if depth else ():
            base = self._path(owner, depth - 1)
            if not base:
                continue
            if type(owner) is dict and id(owner) in self.modules:
                key = next((k for k, v in dict.items(owner) if v is value), "?")
                return f"{base}:{key}"
            if type(owner) is FunctionType or type(value) is dict:
                return base
            return f"{base} (in a {type(owner).__name__})"
        return ""


def _has_dict(value: Any) -> bool:
    return type(value).__flags__ & (1 << 9) != 0 and not inert.is_class(value)  # heap types


def is_instance_dict(owner: Any, space: dict[Any, Any]) -> bool:
    if type(owner) in (dict, list, tuple, set, frozenset, CellType) or inert.is_module(owner):
        return False
    try:
        return object.__getattribute__(owner, "__dict__") is space
    except AttributeError:
        return False


bookkeeping |= {Owners, ById, Index}
