"""The references inside one holder, each with the slot that it is."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from functools import partial
from types import (
    AsyncGeneratorType,
    CellType,
    CoroutineType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
)
from typing import Any

from patchkit.engine import _inert as inert
from patchkit.engine._owners import ById, Index, Reference, is_instance_dict
from patchkit.engine._slots import (
    AttributeSlot,
    CellSlot,
    DefaultSlot,
    IndexSlot,
    ItemSlot,
    Slot,
)

_DESCRIPTORS = (GetSetDescriptorType, MemberDescriptorType)
_SUSPENDABLE = (GeneratorType, CoroutineType, AsyncGeneratorType)


def inside(holder: Any, olds: ById, index: Index) -> list[Reference]:
    """The references that one holder has."""
    found: list[Reference] = []
    kind = type(holder)
    name = index.path(holder)

    def add(where: str, old: Any, slot: Slot | None, why: str = "", instance: bool = False) -> None:
        held = slot.read() if slot is not None else old
        found.append(Reference(where, old, slot, held, why, instance, id(holder)))

    if kind is dict:
        return _in_dict(holder, olds, index)
    if kind is list:
        for i, item in enumerate(holder):
            if id(item) in olds:
                where = f"{name}[{i}]"
                add(where, item, IndexSlot(holder, i, where))
    elif kind is CellType:
        for function in _functions_of_cell(holder, index):
            closure = function.__closure__ or ()
            at = next((i for i, cell in enumerate(closure) if cell is holder), None)
            if at is not None:
                if function.__code__.co_freevars[at] == "__class__":
                    return found  # what super() of a class's own methods uses
                where = f"{index.named(function)}.<closure>.{function.__code__.co_freevars[at]}"
                add(where, holder.cell_contents, CellSlot(holder, where))
                return found
        add(f"closure variable of {name}", holder.cell_contents, CellSlot(holder, name))
    elif kind is tuple:
        owner_classes = [o for o in index.owners.get(id(holder), ()) if inert.is_class(o)]
        if any(holder is bases for cls in owner_classes for bases in inert.lineage(cls)):
            return found  # told as __bases__ of the class, or the class's own
        for function in index.owners.get(id(holder), ()):
            if type(function) is FunctionType and function.__defaults__ is holder:
                for i, item in enumerate(function.__defaults__ or ()):
                    if id(item) in olds:
                        where = f"{index.named(function)}.__defaults__[{i}]"
                        add(where, item, DefaultSlot(function, i, where))
                return found
        for i, item in enumerate(holder):
            if id(item) in olds:
                add(f"{name}[{i}]", item, None, "a tuple cannot be changed")
    elif kind is MethodType:
        return _in_method(holder, olds, index)
    elif inert.is_class(holder):
        for attribute, value in inert.namespace(holder).items():
            if id(value) in olds:
                where = f"{name}.{attribute}"
                add(where, value, AttributeSlot(holder, attribute, where))
        for base in type.__dict__["__bases__"].__get__(holder):
            if id(base) in olds:
                add(f"{name}.__bases__", base, None, "subclasses keep their base")
    elif kind is FunctionType or kind in _SUSPENDABLE:
        return found  # its dicts, tuples and cells are holders of their own; see _late
    elif kind not in _DESCRIPTORS:  # a class's own accessors refer to it
        for held in gc.get_referents(holder):
            if id(held) in olds and not (inert.is_class(held) and type(holder) is held):
                add(_other(holder, name), held, None, f"a {kind.__name__} cannot be changed")
    return found


def _other(holder: Any, name: str) -> str:
    if type(holder) is partial:
        return f"functools.partial at {name}"
    return name


def _functions_of_cell(cell: CellType, index: Index) -> Iterable[FunctionType]:
    for closure in index.owners.get(id(cell), ()):
        for function in index.owners.get(id(closure), ()):
            if type(function) is FunctionType:
                yield function


def _in_dict(holder: dict[Any, Any], olds: ById, index: Index) -> list[Reference]:
    found = []
    module = index.modules.get(id(holder))
    owner = None if module else next(iter(index.owners.get(id(holder), ())), None)
    name = index.path(holder)
    for key, value in list(dict.items(holder)):
        if id(key) in olds:
            found.append(Reference(f"key of {name}", key, None, key, "a key cannot be changed"))
        if id(value) not in olds:
            continue
        instance = False
        if module:
            where = f"{module}:{key}"
            slot: Slot = AttributeSlot(inert.loaded(module), key, where)
            if slot.read() is not value:  # the module was taken out of sys.modules meanwhile
                slot = ItemSlot(holder, key, where)
        elif owner is not None and inert.is_class(owner) and inert.raw(owner, key) is value:
            where = f"{name}.{key}"
            slot = AttributeSlot(owner, key, where)
        elif type(owner) is FunctionType:
            part = next(
                (p for p in ("__kwdefaults__", "__annotations__") if getattr(owner, p) is holder),
                "__dict__",
            )
            where = f"{name}.{part}[{key!r}]"
            slot = ItemSlot(holder, key, where)
        else:
            instance = owner is not None and is_instance_dict(owner, holder)
            label = f"{name}.{key}" if instance else f"{name}[{_key(key)}]"
            slot, where = ItemSlot(holder, key, label), label
        found.append(Reference(where, value, slot, value, "", instance))
    return found


def _key(key: Any) -> str:
    return repr(key) if type(key) in inert.ATOM_TYPES else type(key).__name__


def _in_method(method: MethodType, olds: ById, index: Index) -> list[Reference]:
    """A bound method: who holds it matters, the method itself cannot be changed."""
    old = method.__func__
    if id(old) not in olds:
        return []
    of = f"bound to an instance of {inert.class_name(type(method.__self__))}"
    if inert.is_class(method.__self__):
        of = f"bound to {inert.class_name(method.__self__)}"
    found = []
    for owner in index.owners.get(id(method), ()):
        space = owner
        if type(owner) is not dict:
            try:
                space = object.__getattribute__(owner, "__dict__")
            except AttributeError:
                space = None
        if type(space) is dict:
            for key, value in list(space.items()):
                if value is method:
                    where = f"{index.path(owner)}:{_key(key).strip(chr(39))} ({of})"
                    is_module = id(space) in index.modules
                    slot = ItemSlot(space, key, where)
                    found.append(Reference(where, old, slot, method, "", not is_module))
            continue
        if type(owner) is list:
            for i, value in enumerate(owner):
                if value is method:
                    where = f"{index.path(owner)}[{i}] ({of})"
                    found.append(
                        Reference(where, old, IndexSlot(owner, i, where), method, "", True)
                    )
            continue
        where = f"{index.path(owner)} ({of})"
        why = f"a {type(owner).__name__} holds the bound method"
        found.append(Reference(where, old, None, method, why, True))
    return found
