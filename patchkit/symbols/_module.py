"""Reading one module, without importing anything.

The unit is a *raw module*: records of everything the module defines, and what its
names refer to elsewhere. Nothing here knows of other modules.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from patchkit.symbols._facts import (
    KEYWORD_ONLY,
    POSITIONAL_ONLY,
    POSITIONAL_OR_KEYWORD,
    VAR_KEYWORD,
    VAR_POSITIONAL,
    ModuleFacts,
    Record,
    facts_of,
)
from patchkit.symbols._normalform import (
    class_body,
    constant_token,
    digest_of,
    function_body,
    is_docstring,
    sketch_of,
    tokens,
)
from patchkit.symbols._rendering import render
from patchkit.symbols.errors import SourceUnreadableError

MAX_SOURCE_BYTES = 32 << 20
_VALUE_LENGTH = 160

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Names that Python itself makes static or class methods.
_IMPLICIT = {
    "__new__": "staticmethod",
    "__init_subclass__": "classmethod",
    "__class_getitem__": "classmethod",
}
_DECORATED_KINDS = {
    "staticmethod": "staticmethod",
    "classmethod": "classmethod",
    "property": "property",
    "abstractproperty": "property",
    "abstractclassmethod": "classmethod",
    "abstractstaticmethod": "staticmethod",
    "cached_property": "cached_property",
}
# An annotation that compilers read is no noise: it changes what is compiled.
_MEANINGFUL_ANNOTATION = re.compile(r"\bconstexpr\b")


@dataclass(slots=True)
class RawModule:
    """Records and references of one module, before anything is resolved."""

    module: str
    file: str
    records: dict[str, Record] = field(default_factory=dict)
    references: dict[str, str] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    exports: list[str] | None = None
    lazy: dict[str, str] = field(default_factory=dict)
    dynamic: bool = False


@dataclass(slots=True)
class _Definition:
    """One definition of a name; `branch` is the path of branches it stands in."""

    branch: tuple
    record: Record | None = None
    reference: str | None = None
    accessor: bool = False


def parse_source(source: bytes | str, file: str) -> ast.Module:
    """The syntax tree, or a SourceUnreadableError that says why there is none."""
    if len(source) > MAX_SOURCE_BYTES:
        raise SourceUnreadableError(file, f"{len(source):,} bytes are more than any module has")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # foreign code's invalid escapes are not ours to tell
            return ast.parse(source)
    except SyntaxError as error:
        problem = f"not valid for this Python: {error.msg}"
        raise SourceUnreadableError(file, problem, error.lineno) from None
    except (RecursionError, MemoryError):
        raise SourceUnreadableError(file, "it nests deeper than the parser can follow") from None
    except ValueError as error:  # null bytes, numbers beyond the interpreter's limit
        raise SourceUnreadableError(file, str(error)) from None


def read_raw(source: bytes | str, module: str, file: str) -> RawModule:
    """Read one module into records; never imports it."""
    tree = parse_source(source, file)
    return _Reader(module, file).read(tree)


def read_module(source: bytes | str, module: str, file: str) -> ModuleFacts:
    """Read one module; never imports it.

    Args:
        source: Its text, or its bytes with whatever encoding they declare.
        module: Its dotted name.
        file: Its path relative to the directory that contains the package.
    """
    raw = read_raw(source, module, file)
    return ModuleFacts(
        module=module,
        file=file,
        symbols={name: facts_of(f"{module}:{name}", r) for name, r in raw.records.items()},
        references=raw.references,
        stars=tuple(raw.stars),
        exports=None if raw.exports is None else tuple(raw.exports),
        lazy=raw.lazy,
        dynamic=raw.dynamic,
    )


def instance_attribute(
    source: bytes, module: str, file: str, owner: str, name: str
) -> Record | None:
    """What the methods of a class assign to ``self.name``, None where none does.

    Asked only for members that the class body does not define, so the text is looked at
    before it is parsed.
    """
    if not re.search(rb"\.%s\s*(:[^=\n]+)?=[^=]" % re.escape(name.encode()), source):
        return None
    scope: list[ast.stmt] = parse_source(source, file).body
    for part in owner.split("."):
        found = [n for n, _, _ in _statements(scope, (), False)]
        classes = [n for n in found if isinstance(n, ast.ClassDef) and n.name == part]
        if not classes:
            return None
        scope = classes[-1].body
    for method, _, _ in _statements(scope, (), False):
        if not isinstance(method, _FUNCTIONS) or not method.args.args:
            continue
        receiver = method.args.args[0].arg
        for node in ast.walk(method):
            if isinstance(node, ast.Assign):
                targets, note = node.targets, None
            elif isinstance(node, ast.AnnAssign):
                targets, note = [node.target], node.annotation
            else:
                continue
            for target in targets:
                if (
                    isinstance(target, ast.Attribute)
                    and target.attr == name
                    and isinstance(target.value, ast.Name)
                    and target.value.id == receiver
                ):
                    return _attribute_record(node.value, note, node, file, False)
    return None


class _Reader:
    """Collects the definitions of one module, class by class."""

    def __init__(self, module: str, file: str) -> None:
        self._raw = RawModule(module, file)
        is_package = file.endswith("__init__.py")
        self._package = module if is_package else module.rpartition(".")[0]
        self._tables: list[ast.Dict] = []
        self._lazy_stars: list[str] = []

    def read(self, tree: ast.Module) -> RawModule:
        scope = self._scope(tree.body, "")
        raw = self._raw
        for name, definitions in scope.items():
            self._settle(name, definitions)
        if "__getattr__" in scope:
            raw.dynamic = True
            self._served(scope)
            for node in tree.body:
                if isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
                    self._shims(node)
        if raw.dynamic:
            raw.stars += self._lazy_stars
        return raw

    def _served(self, scope: dict[str, list[_Definition]]) -> None:
        """Names that the module's ``__getattr__`` serves out of a dict of its own."""
        raw = self._raw
        for table in self._tables:
            for key, value in zip(table.keys, table.values, strict=True):
                if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
                    continue
                name = key.value
                if name in scope or raw.lazy.get(name) != "":
                    continue
                del raw.lazy[name]
                body = value.body if isinstance(value, ast.Lambda) else value
                record = _attribute_record(body, None, key, raw.file, False)
                raw.records[name] = record

    def _shims(self, function: ast.FunctionDef) -> None:
        """Old names that it still answers: ``if name == "Old": from .m import New``."""
        argument = function.args.args[0].arg if function.args.args else ""
        for node in ast.walk(function):
            if not (isinstance(node, ast.If) and isinstance(node.test, ast.Compare)):
                continue
            test = node.test
            compared = [test.left, *test.comparators]
            names = [c.value for c in compared if isinstance(c, ast.Constant)]
            if not any(isinstance(c, ast.Name) and c.id == argument for c in compared):
                continue
            imported = {
                local: target
                for inner in node.body
                if isinstance(inner, ast.ImportFrom)
                for local, target in imported_names(inner, self._package)
            }
            for inner in node.body:
                if isinstance(inner, ast.Return) and isinstance(inner.value, ast.Name):
                    target = imported.get(inner.value.id) or self._raw.references.get(
                        inner.value.id, f"{self._raw.module}:{inner.value.id}"
                    )
                    for name in names:
                        if isinstance(name, str):
                            self._raw.lazy[name] = target

    # ---- scopes ----------------------------------------------------------------

    def _scope(self, body: list[ast.stmt], prefix: str) -> dict[str, list[_Definition]]:
        """The definitions of one module or class body, in order."""
        found: dict[str, list[_Definition]] = {}
        for statement, branch, typing_only in _statements(body, (), False):
            self._statement(statement, branch, typing_only, prefix, found)
        return found

    def _statement(
        self,
        node: ast.stmt,
        branch: tuple,
        typing_only: bool,
        prefix: str,
        found: dict[str, list[_Definition]],
    ) -> None:
        kind = node.__class__
        if kind in _FUNCTIONS:
            if not typing_only:
                self._add_function(node, branch, prefix, found)  # type: ignore[arg-type]
        elif kind is ast.ClassDef:
            if not typing_only:
                record = self._class(node, prefix)  # type: ignore[arg-type]
                _define(found, node.name, _Definition(branch, record=record))  # type: ignore[attr-defined]
        elif kind is ast.ImportFrom or kind is ast.Import:
            self._imports(node, branch, typing_only, prefix, found)  # type: ignore[arg-type]
        elif kind is ast.Assign:
            if not typing_only:
                for target in node.targets:  # type: ignore[attr-defined]
                    self._assign(target, node.value, None, node, branch, prefix, found)  # type: ignore[attr-defined]
        elif kind is ast.AnnAssign:
            if typing_only and isinstance(node.target, ast.Name):  # type: ignore[attr-defined]
                # Declared for type checkers; a dynamic module may serve it at run time.
                name = prefix + node.target.id  # type: ignore[attr-defined]
                self._raw.lazy.setdefault(name, "")
            elif not typing_only:
                self._assign(
                    node.target,  # type: ignore[attr-defined]
                    node.value,  # type: ignore[attr-defined]
                    node.annotation,  # type: ignore[attr-defined]
                    node, branch, prefix, found,
                )  # fmt: skip
        elif kind is ast.AugAssign:
            target = node.target  # type: ignore[attr-defined]
            if isinstance(target, ast.Name):
                if target.id == "__all__" and not prefix:
                    self._export(node.value, more=True)  # type: ignore[attr-defined]
                elif target.id in found:
                    record = _attribute_record(node.value, None, node, self._raw.file, False)  # type: ignore[attr-defined]
                    found[target.id].append(_Definition((*branch, "+="), record=record))
        elif kind is ast.Delete and not branch:
            for target in node.targets:  # type: ignore[attr-defined]
                if isinstance(target, ast.Name):
                    found.pop(target.id, None)

    # ---- functions ---------------------------------------------------------------

    def _add_function(
        self,
        node: ast.FunctionDef | ast.AsyncFunctionDef,
        branch: tuple,
        prefix: str,
        found: dict[str, list[_Definition]],
    ) -> None:
        decorators = [render(d) for d in node.decorator_list]
        last_names = [d.partition("(")[0].rpartition(".")[2] for d in decorators]
        name = node.name
        earlier = found.get(name)
        if "overload" in last_names:
            if earlier and earlier[-1].record and earlier[-1].record.get("_overload"):
                earlier[-1].record["overloads"] += 1
                return
            record = self._function(node, decorators, last_names, prefix)
            record["_overload"], record["overloads"] = True, 1
            _define(found, name, _Definition(branch, record=record))
            return
        record = self._function(node, decorators, last_names, prefix)
        if earlier:
            accessor = f"{name}."
            if any(d.startswith(accessor) for d in decorators):
                # `@x.setter`: one more part of the property, whatever it is called with.
                found[name].append(_Definition(branch, record=record, accessor=True))
                return
            before = earlier[-1].record
            if before is not None and before.get("_overload"):
                record["overloads"] = before["overloads"]
                found[name] = earlier[:-1]
        _define(found, name, _Definition(branch, record=record))

    def _function(
        self,
        node: ast.FunctionDef | ast.AsyncFunctionDef,
        decorators: list[str],
        last_names: list[str],
        prefix: str,
    ) -> Record:
        body = tokens(function_body(node.body))
        seen = set(body)
        kind = "method" if prefix else "function"
        if prefix:
            kind = _IMPLICIT.get(node.name, kind)
        for last in last_names:
            if last in _DECORATED_KINDS and (prefix or last != "property"):
                kind = _DECORATED_KINDS[last]
                break
        is_async = node.__class__ is ast.AsyncFunctionDef
        record: Record = {"kind": kind}
        parameters = _parameters(node.args)
        if parameters:
            record["parameters"] = parameters
        if node.returns is not None:
            record["returns"] = render(node.returns)
        if is_async:
            record["is_async"] = True
        if ("Yield" in seen or "YieldFrom" in seen) and _yields(node.body):
            record["is_generator"] = True
        if decorators:
            record["decorators"] = decorators
        body_digest = digest_of(body)
        record["body_digest"] = body_digest
        record["digest"] = digest_of(
            [body_digest, *_signature_tokens(parameters), kind, str(is_async), *decorators]
        )
        record["file"] = self._raw.file
        record["line"] = node.lineno
        record["sketch"] = sketch_of(seen)
        return record

    # ---- classes -----------------------------------------------------------------

    def _class(self, node: ast.ClassDef, prefix: str) -> Record:
        name = prefix + node.name
        body = class_body(node.body)
        scope = self._scope(body, name + ".")
        own: list[str] = []
        members: list[str] = []
        sketched: list[str] = []
        for member, definitions in scope.items():
            self._settle(f"{name}.{member}", definitions)
            record = self._raw.records.get(f"{name}.{member}")
            if record is not None and record["kind"] != "attribute":
                members.append(f"{member} {record['digest']}")
                sketched.append(f"def {member}")
            sketched.append(f"has {member}")
        for statement in body:
            if statement.__class__ not in _FUNCTIONS and statement.__class__ is not ast.ClassDef:
                own += tokens([statement])
        bases = [self._base(b) for b in node.bases]
        bases += [f"{k.arg or '**'}={render(k.value)}" for k in node.keywords]
        decorators = [render(d) for d in node.decorator_list]
        record = {"kind": "class"}
        parameters = self._constructor(name, node, decorators)
        if parameters:
            record["parameters"] = parameters
        if decorators:
            record["decorators"] = decorators
        body_digest = digest_of([*sorted(members), *own])
        record["body_digest"] = body_digest
        record["digest"] = digest_of([body_digest, *bases, "@", *decorators])
        record["file"] = self._raw.file
        record["line"] = node.lineno
        if bases:
            record["bases"] = bases
        record["sketch"] = sketch_of([*sketched, *own])
        return record

    def _base(self, node: ast.expr) -> str:
        """A base class as a symbol when the file imports or defines it, else as source."""
        text = render(node)
        head, dot, rest = text.partition(".")
        target = self._raw.references.get(head)
        if target is not None and "[" not in text and "(" not in text:
            if ":" in target:
                return target + dot + rest
            return f"{target}:{rest}" if rest else text
        return text

    def _constructor(self, name: str, node: ast.ClassDef, decorators: list[str]) -> list[list[Any]]:
        for method in ("__init__", "__new__"):
            record = self._raw.records.get(f"{name}.{method}")
            if record is not None and record["kind"] != "attribute":
                return record.get("parameters", [])[1:]
        if any("dataclass" in d for d in decorators):
            keyword_only = any("kw_only=True" in d for d in decorators)
            return list(_dataclass_parameters(node.body, keyword_only))
        return []

    # ---- attributes --------------------------------------------------------------

    def _assign(
        self,
        target: ast.expr,
        value: ast.expr | None,
        annotation: ast.expr | None,
        node: ast.stmt,
        branch: tuple,
        prefix: str,
        found: dict[str, list[_Definition]],
    ) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            values: list[ast.expr | None] = [value] * len(target.elts)
            if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
                values = list(value.elts)
            for element, part in zip(target.elts, values, strict=True):
                self._assign(element, part, None, node, branch, prefix, found)
            return
        if not isinstance(target, ast.Name):
            if not prefix and _replaces_itself(target):
                self._raw.dynamic = True
            return
        name = target.id
        if not prefix:
            if name == "__all__":
                self._export(value, more=False)
            elif isinstance(value, ast.Dict):
                self._tables.append(value)
        if isinstance(value, ast.Name) and annotation is None:
            known = found.get(value.id)
            if known is not None:
                reference = f"{self._raw.module}:{prefix}{value.id}"
            else:
                reference = self._raw.references.get(value.id, "")
            if reference:
                _define(found, name, _Definition(branch, reference=reference))
                return
        elif isinstance(value, ast.Attribute) and annotation is None:
            head, _, rest = render(value).partition(".")
            imported = self._raw.references.get(head)
            if imported is not None and head.isidentifier():
                joined = f"{imported}.{rest}" if ":" in imported else f"{imported}:{rest}"
                _define(found, name, _Definition(branch, reference=joined))
                return
        record = self._value_record(name, value, annotation, node, prefix)
        _define(found, name, _Definition(branch, record=record))

    def _value_record(
        self,
        name: str,
        value: ast.expr | None,
        annotation: ast.expr | None,
        node: ast.stmt,
        prefix: str,
    ) -> Record:
        record = _attribute_record(value, annotation, node, self._raw.file, bool(prefix))
        if isinstance(value, ast.Lambda):
            parameters = _parameters(value.args)
            record["kind"] = "method" if prefix else "function"
            if parameters:
                record["parameters"] = parameters
        elif prefix and isinstance(value, ast.Call):
            called = render(value.func).rpartition(".")[2]
            if called in ("property", "staticmethod", "classmethod"):
                record["kind"] = called
        return record

    # ---- imports -----------------------------------------------------------------

    def _imports(
        self,
        node: ast.Import | ast.ImportFrom,
        branch: tuple,
        typing_only: bool,
        prefix: str,
        found: dict[str, list[_Definition]],
    ) -> None:
        raw = self._raw
        for local, target in imported_names(node, self._package):
            if local == "*":
                if not prefix:
                    (self._lazy_stars if typing_only else raw.stars).append(target)
                continue
            if typing_only:
                raw.lazy[prefix + local] = target
                continue
            if not prefix:
                raw.references.setdefault(local, target)
            _define(found, local, _Definition(branch, reference=target))

    def _export(self, value: ast.expr | None, *, more: bool) -> None:
        names = [
            e.value
            for e in getattr(value, "elts", ())
            if isinstance(e, ast.Constant) and isinstance(e.value, str)
        ]
        self._raw.exports = [*(self._raw.exports or []), *names] if more else names

    # ---- several definitions of one name -------------------------------------------

    def _settle(self, name: str, definitions: list[_Definition]) -> None:
        """Decide what a name is that is defined once, or in several branches."""
        raw = self._raw
        raw.references.pop(name, None)
        if len(definitions) == 1:
            only = definitions[0]
            if only.record is not None:
                only.record.pop("_overload", None)
                raw.records[name] = only.record
            elif only.reference:
                raw.references[name] = only.reference
            return
        records = [d.record for d in definitions if d.record is not None]
        for record in records:
            record.pop("_overload", None)
        chosen = self._chosen(definitions)
        if chosen.record is None:
            raw.references[name] = chosen.reference or ""
            return
        first = dict(chosen.record)
        others = [d.reference or "" for d in definitions if d.record is None]
        first["body_digest"] = digest_of([*(r["body_digest"] for r in records), *others])
        first["digest"] = digest_of([*(r["digest"] for r in records), *others])
        if not any(d.accessor for d in definitions):
            first["alternatives"] = len(definitions) - 1
            first["lines"] = [r["line"] for r in records]
        raw.records[name] = first

    def _chosen(self, definitions: list[_Definition]) -> _Definition:
        """The definition that is meant where several branches each have one.

        The first one that is code: `try: from m import f` before `except ImportError:
        f = None`. But not an import from another package when the module has code of
        its own, since that code is what can be read here.
        """
        code = [d for d in definitions if d.record and d.record["kind"] != "attribute"]
        top = self._raw.module.partition(".")[0]
        for definition in definitions:
            if definition in code:
                return definition
            if definition.reference and (
                not code or definition.reference.partition(":")[0].partition(".")[0] == top
            ):
                return definition
        return definitions[0]


def _define(found: dict[str, list[_Definition]], name: str, new: _Definition) -> None:
    """A later definition replaces an earlier one unless it stands in a branch of its own."""
    earlier = found.get(name)
    if earlier is None:
        found[name] = [new]
        return
    depth = len(new.branch)
    kept = [d for d in earlier if d.branch[:depth] != new.branch]
    found[name] = [*kept, new]


def _statements(
    body: list[ast.stmt], branch: tuple, typing_only: bool
) -> Iterator[tuple[ast.stmt, tuple, bool]]:
    """Every statement of a scope that can define a name, with the branch it stands in."""
    for node in body:
        kind = node.__class__
        if kind is ast.If:
            test = node.test  # type: ignore[attr-defined]
            for_types = _type_checking(test)
            inside = for_types is True
            yield from _statements(
                node.body,  # type: ignore[attr-defined]
                branch if inside or for_types is False else (*branch, (id(node), "if")),
                typing_only or inside,
            )
            yield from _statements(
                node.orelse,  # type: ignore[attr-defined]
                branch if for_types is not None else (*branch, (id(node), "else")),
                typing_only or for_types is False,
            )
        elif kind in _TRIES:
            yield from _statements(node.body, (*branch, (id(node), "try")), typing_only)  # type: ignore[attr-defined]
            for index, handler in enumerate(node.handlers):  # type: ignore[attr-defined]
                yield from _statements(
                    handler.body, (*branch, (id(node), f"except{index}")), typing_only
                )
            yield from _statements(node.orelse, (*branch, (id(node), "try")), typing_only)  # type: ignore[attr-defined]
            yield from _statements(node.finalbody, branch, typing_only)  # type: ignore[attr-defined]
        elif kind is ast.With or kind is ast.AsyncWith:
            yield from _statements(node.body, branch, typing_only)  # type: ignore[attr-defined]
        elif kind is ast.For or kind is ast.While:
            inner = (*branch, (id(node), "loop"))
            yield from _statements(node.body, inner, typing_only)  # type: ignore[attr-defined]
            yield from _statements(node.orelse, branch, typing_only)  # type: ignore[attr-defined]
        elif kind is ast.Match:
            for index, case in enumerate(node.cases):  # type: ignore[attr-defined]
                yield from _statements(
                    case.body, (*branch, (id(node), f"case{index}")), typing_only
                )
        else:
            yield node, branch, typing_only


_TRIES = tuple(t for t in (ast.Try, getattr(ast, "TryStar", None)) if t is not None)


def _type_checking(test: ast.expr) -> bool | None:
    """True for ``if TYPE_CHECKING``, False for ``if not TYPE_CHECKING``, else None."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _type_checking(test.operand)
        return None if inner is None else not inner
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)
    return True if name == "TYPE_CHECKING" else None


def _replaces_itself(target: ast.expr) -> bool:
    """``sys.modules[__name__] = …``, as lazy modules do."""
    return isinstance(target, ast.Subscript) and render(target.value) == "sys.modules"


def imported_names(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[tuple[str, str]]:
    """Local name -> what it refers to, of one import statement."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.asname:
                yield alias.asname, alias.name
            else:
                top = alias.name.partition(".")[0]
                yield top, top
        return
    base = node.module or ""
    if node.level:
        parent = package.split(".")
        if node.level > 1:
            parent = parent[: 1 - node.level]
        base = ".".join([*parent, base] if base else parent)
    for alias in node.names:
        if alias.name == "*":
            yield "*", base
        else:
            yield alias.asname or alias.name, f"{base}:{alias.name}"


def _parameters(args: ast.arguments) -> list[list[Any]]:
    found: list[list[Any]] = []
    posonly, plain, defaults = args.posonlyargs, args.args, args.defaults
    required = len(posonly) + len(plain) - len(defaults)
    index = 0
    for group, kind in ((posonly, POSITIONAL_ONLY), (plain, POSITIONAL_OR_KEYWORD)):
        for arg in group:
            default = render(defaults[index - required]) if index >= required else None
            found.append([arg.arg, kind, default, _annotation(arg.annotation)])
            index += 1
    if args.vararg:
        found.append([args.vararg.arg, VAR_POSITIONAL, None, _annotation(args.vararg.annotation)])
    for arg, value in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        default = render(value) if value is not None else None
        found.append([arg.arg, KEYWORD_ONLY, default, _annotation(arg.annotation)])
    if args.kwarg:
        found.append([args.kwarg.arg, VAR_KEYWORD, None, _annotation(args.kwarg.annotation)])
    return found


def _annotation(node: ast.expr | None) -> str | None:
    if node is None:
        return None
    return node.id if node.__class__ is ast.Name else render(node)  # type: ignore[attr-defined]


def _signature_tokens(parameters: list[list[Any]]) -> list[str]:
    """What of a signature decides how a call binds; annotations do only where compiled."""
    found = []
    for name, kind, default, annotation in parameters:
        # A parameter without a default is not one whose default is None.
        found.append(f"{name}\x01{kind}" if default is None else f"{name}\x01{kind}\x01{default}")
        if annotation is not None and _MEANINGFUL_ANNOTATION.search(annotation):
            found.append(annotation)
    return found


def _attribute_record(
    value: ast.expr | None,
    annotation: ast.expr | None,
    node: ast.stmt | ast.expr,
    file: str,
    in_class: bool,
) -> Record:
    record: Record = {"kind": "attribute"}
    if annotation is not None:
        record["returns"] = render(annotation)
    parts = tokens([value]) if value is not None else ["unset"]
    body_digest = digest_of(parts)
    record["body_digest"] = body_digest
    # In a class an annotation makes a field (dataclasses, pydantic, typed dicts).
    record["digest"] = digest_of(
        [body_digest, record["returns"]] if annotation is not None and in_class else [body_digest]
    )
    record["file"] = file
    record["line"] = node.lineno
    if value is not None:
        record["value"] = _short(value, parts)
    return record


def _short(value: ast.expr, parts: list[str]) -> str:
    """A value as source; long ones are cut, since their digest says the rest."""
    if len(parts) > 400:
        return f"<{value.__class__.__name__} of {len(parts)} tokens>"
    text = render(value)
    return text if len(text) <= _VALUE_LENGTH else text[: _VALUE_LENGTH - 1] + "…"


def _dataclass_parameters(body: list[ast.stmt], keyword_only: bool) -> Iterator[list[Any]]:
    kind = KEYWORD_ONLY if keyword_only else POSITIONAL_OR_KEYWORD
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            annotation = render(node.annotation)
            if "ClassVar" in annotation:
                continue
            if annotation in ("KW_ONLY", "dataclasses.KW_ONLY"):
                kind = KEYWORD_ONLY
                continue
            default = render(node.value) if node.value is not None else None
            if default is not None and "init=False" in default:
                continue
            if default is not None and default.partition("(")[0].endswith("field"):
                # `field(...)` is a default only when it says so.
                default = default if "default" in default else None
            yield [node.target.id, kind, default, annotation]


def _yields(body: list[ast.stmt]) -> bool:
    """Whether these statements yield in their own scope."""
    stack: list[ast.AST] = list(body)
    while stack:
        node = stack.pop()
        kind = node.__class__
        if kind is ast.Yield or kind is ast.YieldFrom:
            return True
        if kind in _FUNCTIONS or kind is ast.Lambda or kind is ast.ClassDef:
            continue
        stack.extend(ast.iter_child_nodes(node))
    return False


__all__ = [
    "RawModule",
    "constant_token",
    "imported_names",
    "is_docstring",
    "parse_source",
    "read_module",
    "read_raw",
]
