"""Who holds the old object: every reference, found by identity, without running foreign code.

The collector knows which objects refer to which, so one pass over its lists
finds all holders at any depth, in C. What it can't see (C++, running frames)
is counted: a reference count above the number of references found is told.
"""

from __future__ import annotations

import gc
import inspect
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from types import (
    AsyncGeneratorType,
    CellType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
)
from typing import Any

from patchkit.engine import _inert as inert
from patchkit.engine import _shape as shape
from patchkit.engine._frozen import frozen_objects
from patchkit.engine._slots import (
    AttributeSlot,
    CellSlot,
    DefaultSlot,
    IndexSlot,
    ItemSlot,
    RegistrySlot,
    Slot,
)

_DESCRIPTORS = (GetSetDescriptorType, MemberDescriptorType)
_SUSPENDABLE = (GeneratorType, CoroutineType, AsyncGeneratorType)
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


class _Owners(dict[int, Private]):
    """Identity of an object -> those that refer to it."""


class _ById(dict[int, Any]):
    """The old objects by identity."""


class _Index:
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
        self.owners = _Owners()

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
            if type(value) is dict and _is_instance_dict(owner, value):
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


@dataclass(frozen=True, slots=True, eq=False)
class Scan:
    """The result of one search.

    Attributes:
        references: Every reference found, but those of the engine itself.
        unseen: Identity of an old object -> references that nothing shows.
    """

    references: tuple[Reference, ...]
    unseen: dict[int, int]


def scan(olds: Private, owners: Iterable[Any], *, ignored: Iterable[int] = ()) -> Scan:
    """Search for all references to the old objects.

    Args:
        olds: Raw attributes and the functions inside; only this list may hold them.
        owners: Classes and modules that define them, to save looking for those.
        ignored: Identities of containers of the caller.
    """
    if not olds:
        return Scan((), {})
    frozen = frozen_objects() > 0
    # Nothing can be counted against what the collector does not show.
    unseen, holders = _unseen(olds) if not frozen else ({}, _walk(olds))
    made = Private(shape.made)  # kept alive: an identity means nothing once its object is gone
    cells = {id(cell) for function in made for cell in function.__closure__ or ()}
    index = _Index(cells.union(ignored))
    index.know(owners)
    by_id = _ById((id(o), o) for o in olds)
    holders = Private(h for h in holders if not index.own(h) and id(h) not in by_id)
    index.learn(holders)
    found = [reference for holder in holders for reference in _inside(holder, by_id, index)]
    index.owners.clear()  # no cycles: garbage would be a holder for the next scan
    return Scan(tuple(found), unseen)


bookkeeping |= {_Owners, _ById, _Index, Scan}


def _walk(olds: Private) -> Private:
    """Holders reachable from loaded modules by name, for when the collector was frozen.

    One level into classes, functions and containers: less than the collector shows.
    """
    wanted = set(map(id, olds))
    found: dict[int, Any] = {id(h): h for h in referrers_of(olds)}

    def look(holder: Any, inside: Iterable[Any]) -> None:
        if any(id(value) in wanted for value in inside):
            found[id(holder)] = holder

    for module in list(sys.modules.values()):
        if not inert.is_module(module):
            continue
        space = inert.namespace(module)
        look(space, list(space.values()))
        for value in list(space.values()):
            kind = type(value)
            if inert.is_class(value):
                look(value, list(inert.namespace(value).values()))
            elif kind is dict:
                look(value, [*value.values(), *value])
            elif kind in (list, tuple, set, frozenset):
                look(value, value)
            elif kind is partial:
                look(value, (value.func, *value.args))
            elif kind is FunctionType:
                look(value.__defaults__, value.__defaults__ or ())
                look(value.__kwdefaults__, (value.__kwdefaults__ or {}).values())
                for cell in value.__closure__ or ():
                    look(cell, gc.get_referents(cell))
    return Private(found.values())


def _inside(holder: Any, olds: _ById, index: _Index) -> list[Reference]:
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


def _functions_of_cell(cell: CellType, index: _Index) -> Iterable[FunctionType]:
    for closure in index.owners.get(id(cell), ()):
        for function in index.owners.get(id(closure), ()):
            if type(function) is FunctionType:
                yield function


def _in_dict(holder: dict[Any, Any], olds: _ById, index: _Index) -> list[Reference]:
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
            instance = owner is not None and _is_instance_dict(owner, holder)
            label = f"{name}.{key}" if instance else f"{name}[{_key(key)}]"
            slot, where = ItemSlot(holder, key, label), label
        found.append(Reference(where, value, slot, value, "", instance))
    return found


def _key(key: Any) -> str:
    return repr(key) if type(key) in inert.ATOM_TYPES else type(key).__name__


def _is_instance_dict(owner: Any, space: dict[Any, Any]) -> bool:
    if type(owner) in (dict, list, tuple, set, frozenset, CellType) or inert.is_module(owner):
        return False
    try:
        return object.__getattribute__(owner, "__dict__") is space
    except AttributeError:
        return False


def _in_method(method: MethodType, olds: _ById, index: _Index) -> list[Reference]:
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


def _unseen(olds: Private) -> tuple[dict[int, int], Private]:
    """References that neither the collector nor a frame shows, per object, and all holders.

    C++ registries hold objects without telling the collector. Local variables
    of running frames do too, and are counted apart: a variable is no caller.
    """
    excess, holders = _count(olds)
    for attempt in (0, 1, 2):
        if not excess:
            break
        del holders
        time.sleep(0.002 * attempt)  # other threads may just be calling it
        excess, holders = _count(olds)
        for identity in _in_local_variables(excess):
            excess[identity] -= 1
        excess = {key: count for key, count in excess.items() if count > 0}
    return excess, holders


def _count(olds: Private) -> tuple[dict[int, int], Private]:
    seen = dict.fromkeys(map(id, olds), 0)
    holders = referrers_of(olds)
    for i in range(len(holders)):
        if id(holders[i]) in seen:  # one old object holds another; now this list holds it too
            seen[id(holders[i])] += 1
        if type(holders[i]) is not FrameType:
            for identity in map(id, gc.get_referents(holders[i])):
                if identity in seen:
                    seen[identity] += 1
    excess = {
        # One for the list of arguments of getrefcount itself.
        id(olds[i]): sys.getrefcount(olds[i]) - 1 - seen[id(olds[i])]
        for i in range(len(olds))
    }
    return {key: count for key, count in excess.items() if count > 0}, holders


def _in_local_variables(wanted: dict[int, int]) -> list[int]:
    """Identities of the wanted objects that local variables hold, once per variable."""
    found = []
    tops = sys._current_frames()
    for thread in list(tops):
        frame: FrameType | None = tops.pop(thread)  # this frame must not hold itself
        while frame is not None:
            code = frame.f_code
            own = str(frame.f_globals.get("__name__")).startswith("patchkit.engine.")
            if code.co_flags & inspect.CO_OPTIMIZED and not own:  # not a module or class body
                plain = set(code.co_varnames) - set(code.co_cellvars)
                values = frame.f_locals
                found += [
                    id(value)
                    for name, value in values.items()
                    if name in plain and id(value) in wanted
                ]
                if type(values) is dict:
                    # Before 3.13 this is a copy that the frame keeps: it would hold on to
                    # everything (tensors!) for as long as the function runs.
                    values.clear()
            frame = frame.f_back
    return found
