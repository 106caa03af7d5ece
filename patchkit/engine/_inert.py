"""Looking at foreign objects without running any of their code.

``getattr``, ``dir`` and ``isinstance`` run ``__getattr__``, ``__dir__`` and
``__class__`` of whatever they meet; on a process full of lazy modules that
imports the world. Everything here goes through slots of the built-in types.
"""

from __future__ import annotations

import functools
import os
import sys
from types import FunctionType, ModuleType
from typing import Any, Final


class _Missing:
    """There is nothing in the slot."""

    def __repr__(self) -> str:
        return "nothing"

    def __reduce__(self) -> str:
        return "MISSING"


MISSING: Final = _Missing()
# Equal ones of these are often one object: identity says nothing about them.
ATOM_TYPES: Final = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented)}
)
LRU_CACHE: Final = type(functools.lru_cache(lambda: None))

_class_dict: Any = type.__dict__["__dict__"].__get__
_class_mro: Any = type.__dict__["__mro__"].__get__
_module_dict: Any = ModuleType.__dict__["__dict__"].__get__  # type: ignore[index]


def is_module(value: object) -> bool:
    return issubclass(type(value), ModuleType)


def is_class(value: object) -> bool:
    return issubclass(type(value), type)


def namespace(owner: Any) -> Any:
    """The raw names of a module (its dict) or a class (a read-only view)."""
    return _module_dict(owner) if is_module(owner) else _class_dict(owner)


def mro(cls: Any) -> tuple[type, ...]:
    return _class_mro(cls)


def lineage(cls: Any) -> tuple[Any, Any]:
    """The tuples a class itself holds of its bases."""
    return _class_mro(cls), type.__dict__["__bases__"].__get__(cls)


def raw(owner: Any, name: str) -> Any:
    """What the owner itself holds under a name, unbound, or MISSING."""
    return namespace(owner).get(name, MISSING)


def defining_class(cls: type, name: str) -> type | None:
    """The class of the method resolution order that holds the name."""
    return next((base for base in mro(cls) if name in _class_dict(base)), None)


def function_of(value: Any) -> FunctionType | None:
    """The plain function inside a raw attribute, if it has one."""
    kind = type(value)
    if kind is FunctionType:
        return value
    if issubclass(kind, (staticmethod, classmethod)):
        return function_of(value.__func__)
    if issubclass(kind, property):
        return function_of(value.fget)
    if issubclass(kind, functools.cached_property):
        return function_of(value.func)
    if kind is LRU_CACHE:
        return function_of(value.__wrapped__)
    return None


def wrapped_by(function: FunctionType) -> Any:
    """What ``functools.wraps`` recorded, or MISSING."""
    return function.__dict__.get("__wrapped__", MISSING)


def layers(value: Any) -> list[Any]:
    """The object, what it wraps, and so on down to the innermost function."""
    chain: list[Any] = []
    current: Any = value
    while current is not MISSING and all(current is not seen for seen in chain):
        chain.append(current)
        function = function_of(current)
        if function is None:
            break
        if function is not current:
            chain.append(function)
        current = wrapped_by(function)
    return chain


def home(function: FunctionType) -> str:
    """The module whose code the function really is (``__module__`` can be copied)."""
    name = function.__globals__.get("__name__", "?")
    return name if isinstance(name, str) else "?"


def class_name(cls: Any) -> str:
    space = _class_dict(cls)
    module = space.get("__module__", "builtins")
    return f"{module}:{type.__dict__['__qualname__'].__get__(cls)}"


def short_file(file: str, module: str) -> str:
    """The path from the package's parent folder on: equal on every machine."""
    top = module.partition(".")[0]
    parts = file.replace(os.sep, "/").split("/")
    for index in range(len(parts) - 1, -1, -1):
        if parts[index] == top or parts[index] == f"{top}.py":
            return "/".join(parts[index:])
    return parts[-1]


def describe(value: Any) -> str:
    """One line about any object, saying where it comes from."""
    if value is MISSING:
        return "nothing"
    function = function_of(value)
    if function is not None:
        code = function.__code__
        where = f"{short_file(code.co_filename, home(function))}:{code.co_firstlineno}"
        return f"{kind_of(value, None)} {function.__module__}:{function.__qualname__} ({where})"
    if is_class(value):
        return f"class {class_name(value)}"
    if is_module(value):
        return f"module {namespace(value).get('__name__', '?')}"
    if type(value) in (bool, int, float, str, bytes, type(None)):
        return f"{type(value).__name__} {value!r:.60}"
    return f"an object of type {class_name(type(value))}"


def content_of(value: Any) -> str:
    """Plain data in words that are equal in every process; of anything else, what it is."""
    kind = type(value)
    if kind is dict:
        return f"dict({', '.join(f'{content_of(k)}: {content_of(v)}' for k, v in value.items())})"
    if kind in (list, tuple):
        return f"{kind.__name__}({', '.join(map(content_of, value))})"
    if kind in (set, frozenset):  # the order of strings in it is this process's own
        return f"{kind.__name__}({', '.join(sorted(map(content_of, value)))})"
    return repr(value) if kind in ATOM_TYPES else describe(value)


def kind_of(value: Any, owner: Any) -> str:
    """The kind in the words of the symbol manifests; ``value`` for everything else."""
    kind = type(value)
    if kind is FunctionType:
        return "method" if owner is not None and is_class(owner) else "function"
    if kind is LRU_CACHE:
        return "cached-function"
    for base, name in (
        (staticmethod, "staticmethod"),
        (classmethod, "classmethod"),
        (property, "property"),
        (functools.cached_property, "cached_property"),
        (type, "class"),
    ):
        if issubclass(kind, base):
            return name
    return "value"


def loaded(module: str) -> Any:
    """The module if it is loaded, else None; never an import."""
    found = sys.modules.get(module)
    return found if found is not None and is_module(found) else None
