"""Slots: one place each that holds an object, readable and writable without side effects."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any, Protocol

from patchkit.engine import _inert as inert
from patchkit.engine._inert import MISSING


class Slot(Protocol):
    """What journal, verification and undo need to know of a place."""

    @property
    def name(self) -> str: ...

    def read(self) -> Any:
        """What the place holds, or MISSING."""

    def write(self, value: Any) -> None:
        """Put the value there; MISSING empties the place."""


@dataclass(frozen=True, slots=True, eq=False)
class AttributeSlot:
    """A name in a module or in a class ``__dict__``.

    Modules are written through their dict and classes through
    ``type.__setattr__``: an overridden ``__setattr__`` of a lazy module or a
    metaclass is not run, and the type's method cache is invalidated.
    """

    owner: Any
    attribute: str
    name: str

    def read(self) -> Any:
        return inert.raw(self.owner, self.attribute)

    def write(self, value: Any) -> None:
        if inert.is_class(self.owner):
            if value is MISSING:
                type.__delattr__(self.owner, self.attribute)
            else:
                type.__setattr__(self.owner, self.attribute, value)
        elif value is MISSING:
            del inert.namespace(self.owner)[self.attribute]
        else:
            inert.namespace(self.owner)[self.attribute] = value


@dataclass(frozen=True, slots=True, eq=False)
class ItemSlot:
    """An entry of a plain dict, also of an instance's ``__dict__``."""

    container: dict[Any, Any]
    key: Any
    name: str

    def read(self) -> Any:
        return dict.get(self.container, self.key, MISSING)

    def write(self, value: Any) -> None:
        if value is MISSING:
            dict.__delitem__(self.container, self.key)
        else:
            dict.__setitem__(self.container, self.key, value)


@dataclass(frozen=True, slots=True, eq=False)
class IndexSlot:
    """A place in a list."""

    container: list[Any]
    index: int
    name: str

    def read(self) -> Any:
        inside = self.index < list.__len__(self.container)
        return list.__getitem__(self.container, self.index) if inside else MISSING

    def write(self, value: Any) -> None:
        list.__setitem__(self.container, self.index, value)


@dataclass(frozen=True, slots=True, eq=False)
class DefaultSlot:
    """A positional default of a function; the tuple is rebuilt."""

    function: FunctionType
    index: int
    name: str

    def read(self) -> Any:
        defaults = self.function.__defaults__ or ()
        return defaults[self.index] if self.index < len(defaults) else MISSING

    def write(self, value: Any) -> None:
        defaults = list(self.function.__defaults__ or ())
        defaults[self.index] = value
        self.function.__defaults__ = tuple(defaults)


@dataclass(frozen=True, slots=True, eq=False)
class CellSlot:
    """A variable that a closure captured."""

    cell: CellType
    name: str

    def read(self) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # an empty cell says so this way
            return MISSING

    def write(self, value: Any) -> None:
        if value is MISSING:
            del self.cell.cell_contents
        else:
            self.cell.cell_contents = value


@dataclass(frozen=True, slots=True, eq=False)
class RegistrySlot:
    """An entry of a registry, written through the registry's own door.

    Undo goes through the mapping protocol, the only way out that registries
    commonly have.
    """

    registry: MutableMapping[Any, Any]
    key: Any
    door: Any
    name: str

    def read(self) -> Any:
        try:
            return self.registry[self.key]
        except KeyError:
            return MISSING

    def write(self, value: Any) -> None:
        if value is MISSING:
            del self.registry[self.key]
        elif self.door is None or self.read() is not MISSING:
            self.registry[self.key] = value
        else:
            self.door(self.registry, self.key, value)


def same(left: Any, right: Any) -> bool:
    """Whether two readings of a slot are the same: by identity.

    A bound method is made anew at every access, so two of them are the same
    when function and instance are.
    """
    if left is right:
        return True
    return (
        type(left) is MethodType
        and type(right) is MethodType
        and left.__func__ is right.__func__
        and left.__self__ is right.__self__
    )
