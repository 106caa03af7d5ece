"""The classes that a model is built of, found in the source of its module.

From the causal model's class on, every class is followed that its code names: classes
of the same module, base classes, and classes of sibling model modules. What comes from
elsewhere is a leaf: an operator of the library.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from patchkit.kit._sources import module_file, module_source

# What a forward method calls of these is arithmetic, whether it was built or not.
_OPERATORS = "vllm.model_executor.layers."

# Modules of interfaces and of plumbing: their classes compute nothing.
_PLUMBING = ("interfaces", "interfaces_base", "utils", "adapters")


@dataclass(frozen=True, slots=True)
class ClassSource:
    """A class of a model's module."""

    module: str
    name: str
    node: ast.ClassDef

    @property
    def symbol(self) -> str:
        return f"{self.module}:{self.name}"

    def has(self, method: str) -> bool:
        return any(isinstance(n, ast.FunctionDef) and n.name == method for n in self.node.body)


@dataclass(slots=True)
class Walked:
    """What a model is built of.

    Attributes:
        classes: The model's own, outermost first.
        leaves: ``module:name`` of what a library provides and a class uses while it is
            constructed, or of vLLM's layers at any time, to the classes that do so.
    """

    classes: list[ClassSource] = field(default_factory=list)
    leaves: dict[str, list[str]] = field(default_factory=dict)


def walk(module: str, name: str, siblings: str) -> Walked:
    """Follow a model's classes.

    Args:
        module: Module of the causal model.
        name: Its class.
        siblings: Prefix of the modules whose classes count as the model's own.
    """
    walked = Walked()
    _Walk(siblings, walked).follow(module, name)
    return walked


class _Module:
    def __init__(self, module: str) -> None:
        self.name = module
        self.package = _is_package(module)
        tree = ast.parse(module_source(module))
        self.classes = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
        self.assigned = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        self.imported: dict[str, tuple[str, str]] = {}
        self.modules: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    source = self._absolute(node)
                    self.imported[alias.asname or alias.name] = (source, alias.name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    self.modules[alias.asname or alias.name] = alias.name

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        kept = parts[: len(parts) - node.level + int(self.package)]
        return ".".join([*kept, *([node.module] if node.module else [])])


class _Walk:
    def __init__(self, siblings: str, walked: Walked) -> None:
        self._siblings, self._walked = siblings, walked
        self._modules: dict[str, _Module] = {}
        self._seen: set[tuple[str, str]] = set()

    def _module(self, name: str) -> _Module:
        if name not in self._modules:
            self._modules[name] = _Module(name)
        return self._modules[name]

    def follow(self, module: str, name: str) -> None:
        if (module, name) in self._seen:
            return
        self._seen.add((module, name))
        home = self._module(module)
        node = home.classes.get(name)
        if node is None:
            source = home.imported.get(name)
            if source is not None and self._own(source[0]):
                self.follow(*source)
            return
        self._walked.classes.append(ClassSource(module, name, node))
        symbol = f"{module}:{name}"
        for base in node.bases:
            self._base(home, base)
        for used, building in _names(node):
            self._use(home, used, building, symbol)

    def _use(self, home: _Module, used: str, building: bool, user: str) -> None:
        first = used.partition(".")[0]
        if first in home.assigned and first not in home.classes:
            # A table of the module's, such as layer types by name.
            for text in _used(home.assigned.pop(first)):
                self._use(home, text, building, user)
            return
        target = self._resolve(home, used)
        if target is None:
            return
        if self._own(target[0]):
            self.follow(*target)
        elif building or target[0].startswith(_OPERATORS):
            users = self._walked.leaves.setdefault(":".join(target), [])
            if user not in users:
                users.append(user)

    def _base(self, home: _Module, base: ast.expr) -> None:
        target = self._resolve(home, ast.unparse(base))
        if target is not None and self._own(target[0]):
            self.follow(*target)

    def _own(self, module: str) -> bool:
        return (
            module.startswith(self._siblings)
            and module.rpartition(".")[2] not in _PLUMBING
            and module_file(module) is not None
        )

    def _resolve(self, home: _Module, text: str) -> tuple[str, str] | None:
        """The module and name behind a name or a dotted one, as imported in ``home``."""
        first, _, rest = text.partition(".")
        if not rest:
            if first in home.classes:
                return home.name, first
            return home.imported.get(first)
        if first in home.imported:
            source = home.imported[first]
            return f"{source[0]}.{source[1]}", rest
        if first in home.modules:
            return home.modules[first], rest
        return None


def _names(node: ast.ClassDef) -> Iterator[tuple[str, bool]]:
    """Names that a class's code uses, and whether while it is constructed.

    Annotations are left out: they name what a caller passes.
    """
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef):
            building = statement.name.startswith(("__init__", "_init"))
            for text in _used(statement):
                yield text, building
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            # Class attributes may name classes, too.
            for text in _used(statement):
                yield text, False


def _used(node: ast.AST) -> Iterator[str]:
    annotations = {id(inner) for part in _annotations(node) for inner in ast.walk(part)}
    inside = {id(inner.value) for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
    for inner in ast.walk(node):
        if id(inner) in annotations or id(inner) in inside:
            continue
        if isinstance(inner, (ast.Name, ast.Attribute)) and (text := _dotted(inner)):
            yield text


def _annotations(node: ast.AST) -> Iterator[ast.expr]:
    for inner in ast.walk(node):
        if isinstance(inner, (ast.arg, ast.AnnAssign)) and inner.annotation:
            yield inner.annotation
        elif isinstance(inner, ast.FunctionDef) and inner.returns:
            yield inner.returns


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _is_package(module: str) -> bool:
    file = module_file(module)
    return file is not None and file.name == "__init__.py"
