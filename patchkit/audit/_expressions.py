"""Expressions: from syntax to values, without running anything."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from patchkit.audit._known import DOORS
from patchkit.audit._scopes import LazyName, ModuleState, Scope
from patchkit.audit._sightings import Place
from patchkit.audit._values import (
    UNKNOWN,
    Bound,
    ClassOf,
    Cond,
    Const,
    DictOf,
    Either,
    FilePath,
    Func,
    Guard,
    Inst,
    Item,
    Klass,
    Map,
    OwnModule,
    Param,
    ParsedVersion,
    Ref,
    Result,
    Seq,
    Somewhere,
    Unknown,
    Value,
    Version,
    VersionPart,
    beyond,
    contradict,
    either,
    exclusive,
    names_module,
    options,
)

if TYPE_CHECKING:
    from patchkit.audit._interpreter import Interpreter

_BUILTINS = frozenset(dir(builtins))
_OPERATORS: dict[type, str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip
# Names that every module has, and constants that nobody can write to.
_NO_PLACES = frozenset({
    "__name__", "__file__", "__package__", "__spec__", "NotImplemented", "Ellipsis",
})  # fmt: skip
UNROLL = 300


@dataclass(slots=True)
class Frame:
    """Where the walk is.

    Attributes:
        module: The module of the code being walked.
        scope: The scope in which names are looked up.
        function: The function being walked, None at a module's top.
        guards: The tests passed on the way here.
        call: For a function walked for one of its calls, where the call stands.
        caller: The function, or None, that the outermost call stands in.
        caller_module: The module that the outermost call stands in.
        before_call: How many of the guards were passed before the outermost call.
        given: The packages of what the outermost call passes.
        stack: The functions being walked for a call, against recursion.
        returns: What the function returns.
        yields: What it yields.
    """

    module: ModuleState
    scope: Scope
    function: Func | None = None
    guards: tuple[Guard, ...] = ()
    call: Place | None = None
    caller: Func | None = None
    caller_module: ModuleState | None = None
    before_call: int = 0
    given: frozenset[str] = frozenset()
    stack: tuple[ast.AST, ...] = ()
    returns: list[tuple[Value, tuple[Guard, ...]]] = field(default_factory=list)
    yields: list[Value] = field(default_factory=list)


class Evaluator:
    """Evaluates expressions; calls are handed to the interpreter."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        # What was asked for with `getattr(place, name, None)`.
        self.may_be_missing: set[Ref] = set()
        self._handlers: dict[type, Callable[[Any, Frame], Value]] = {
            ast.Constant: lambda n, f: Const(n.value) if n.value is not ... else UNKNOWN,
            ast.Name: self._name,
            ast.Attribute: lambda n, f: self.attribute(self.value(n.value, f), n.attr, n),
            ast.Subscript: self._subscript,
            ast.Call: interpreter.calls.call,
            ast.Tuple: self._sequence,
            ast.List: self._sequence,
            ast.Set: self._sequence,
            ast.Dict: self._dict,
            ast.JoinedStr: self._fstring,
            ast.BinOp: self._binary,
            ast.BoolOp: self._boolean,
            ast.UnaryOp: self._unary,
            ast.Compare: self._compare,
            ast.IfExp: self._conditional,
            ast.Lambda: self._lambda,
            ast.ListComp: self._comprehension,
            ast.SetComp: self._comprehension,
            ast.GeneratorExp: self._comprehension,
            ast.DictComp: self._dict_comprehension,
            ast.NamedExpr: self._named,
            ast.Await: lambda n, f: self.value(n.value, f),
            ast.Starred: lambda n, f: self.value(n.value, f),
            ast.Yield: self._yield,
            ast.YieldFrom: lambda n, f: self.value(n.value, f) and UNKNOWN,
        }

    def value(self, node: ast.AST | None, frame: Frame) -> Value:
        """The value of an expression."""
        if node is None:
            return UNKNOWN
        handler = self._handlers.get(node.__class__)
        return handler(node, frame) if handler is not None else UNKNOWN

    # ---- names -------------------------------------------------------------------

    def _name(self, node: ast.Name, frame: Frame) -> Value:
        return self.lookup(node.id, frame.scope, frame.guards)

    def lookup(self, name: str, scope: Scope, guards: tuple[Guard, ...]) -> Value:
        """What a name may stand for under the given guards."""
        if name in _NO_PLACES:
            return Unknown(name)
        current: Scope | None = scope
        first = True
        while current is not None:
            if current.kind != "class" or first:
                bindings = current.names.get(name)
                if bindings:
                    found = []
                    for binding in reversed(bindings):
                        if exclusive(binding.guards, guards):
                            continue
                        bound = binding.value
                        value = (
                            self._interpreter.names.own_name(bound)
                            if isinstance(bound, LazyName)
                            else bound
                        )
                        extra = beyond(binding.guards, guards)
                        found.append((value, extra))
                        if not extra:
                            break  # on this way it was certainly bound here last
                    if len(found) > 1:
                        likely = [f for f in found if not contradict(f[1], guards)]
                        found = likely or found
                    if found:
                        return either(found[::-1])
                for module, _ in current.stars:
                    starred = self._interpreter.names.star_name(module, name)
                    if starred is not None:
                        return starred
            first = False
            current = current.parent
        if name == "__builtins__":
            return Ref("builtins")
        if name in _BUILTINS:
            return Ref("builtins", (name,))
        return Unknown(name)

    # ---- attributes ----------------------------------------------------------------

    def attribute(self, owner: Value, name: str, node: ast.AST | None = None) -> Value:
        """``owner.name``."""
        found = options(owner)
        if len(found) == 1 and not found[0][1]:
            return self._attribute(found[0][0], name, node)
        return either([(self._attribute(v, name, node), guards) for v, guards in found])

    def _attribute(self, owner: Value, name: str, node: ast.AST | None) -> Value:
        if isinstance(owner, Ref):
            return _foreign_attribute(owner, name)
        if isinstance(owner, OwnModule):
            return self._interpreter.names.own_name(LazyName(owner.name, name))
        if isinstance(owner, Klass):
            if name == "__dict__":
                return DictOf(owner)
            if name == "__class__":
                return Ref("builtins", ("type",))
            return self._interpreter.names.member(owner, name)
        if isinstance(owner, Inst):
            if name == "__class__":
                return owner.cls
            if isinstance(owner.cls, Klass):
                found = self._interpreter.names.member(owner.cls, name)
                if isinstance(found, Func):
                    kinds = found.last_decorators()
                    if "staticmethod" in kinds:
                        return found
                    return Bound(found, owner.cls if "classmethod" in kinds else owner)
                if isinstance(found, Unknown):
                    return self._interpreter.names.instance_value(owner.cls, name)
                return found
            if isinstance(owner.cls, Ref) and owner.cls.dotted == "importlib.machinery.ModuleSpec":
                package = owner.args[0]
                if isinstance(package, FilePath):
                    if name == "submodule_search_locations":
                        return Seq((package,))
                    if name == "origin":
                        return package.join("__init__.py")
            return UNKNOWN
        if isinstance(owner, Version):
            if name in ("public", "base_version"):
                return Version(owner.package, "str")
            if name == "release":
                return Version(owner.package, "tuple")
            return VersionPart(owner, name)
        if isinstance(owner, FilePath):
            return owner.parent() if name == "parent" else _path_attribute(owner, name)
        if isinstance(owner, Bound):
            if name == "__func__":
                return owner.func
            return owner.self if name == "__self__" else UNKNOWN
        if name != "__dict__" and (isinstance(owner, Somewhere) or names_module(owner)):
            return owner if isinstance(owner, Somewhere) else Somewhere()
        if name == "__class__":
            return ClassOf(owner, "")
        if name == "__dict__":
            return DictOf(owner)
        if isinstance(owner, Func) and name in ("__wrapped__", "__func__"):
            return owner
        return UNKNOWN

    # ---- items -------------------------------------------------------------------

    def _subscript(self, node: ast.Subscript, frame: Frame) -> Value:
        owner = self.value(node.value, frame)
        if isinstance(node.slice, ast.Slice):
            return self._slice(owner, node.slice, frame)
        index = self.value(node.slice, frame)
        found = []
        for value, guards in options(owner):
            if isinstance(value, Map) and not _is_definite(index):
                found += [(v, (*guards, *more)) for v, more in self._any_entry(value, node, frame)]
            else:
                found.append((self.item(value, index), guards))
        return either(found)

    def _slice(self, owner: Value, part: ast.Slice, frame: Frame) -> Value:
        """``owner[low:high]`` of a version, a text or a sequence."""
        ends = []
        for node in (part.lower, part.upper, part.step):
            end = self.value(node, frame) if node is not None else Const(None)
            if not isinstance(end, Const) or not isinstance(end.value, (int, type(None))):
                return UNKNOWN
            ends.append(end.value)
        low, high, step = ends
        for value, _ in options(owner):
            if isinstance(value, Version) and low is None and step is None and high is not None:
                return VersionPart(value, f"[:{high}]")
            if isinstance(value, Seq):
                return Seq(value.items[slice(*ends)])
            if isinstance(value, Const) and isinstance(value.value, str):
                return Const(value.value[slice(*ends)])
        return UNKNOWN

    def _any_entry(
        self, table: Map, node: ast.Subscript, frame: Frame
    ) -> list[tuple[Value, tuple[Guard, ...]]]:
        """Each entry of a table that is asked with a key known at run time only."""
        asked = ast.unparse(node.slice)
        # Two tables that are asked with one name give what belongs together.
        where = id(frame.scope) if isinstance(node.slice, ast.Name) else id(node)
        found: list[tuple[Value, tuple[Guard, ...]]] = []
        for key, value in table.items:
            if isinstance(key, Const):
                guard = Guard(
                    UNKNOWN, hash((where, asked)), hash(key.value), f"{asked} == {key.value!r}",
                    node.lineno, frame.module.file, kind="choice",
                )  # fmt: skip
                found.append((value, (guard,)))
        return found

    def item(self, owner: Value, index: Value) -> Value:
        """``owner[index]``."""
        if isinstance(owner, Ref):
            if owner.dotted == "sys.modules":
                return self._interpreter.names.module_named(index)
            return Item(owner, index)
        if isinstance(owner, DictOf):
            if isinstance(index, Const) and isinstance(index.value, str):
                return self.attribute(owner.owner, index.value)
            return UNKNOWN
        if isinstance(owner, Seq) and isinstance(index, Const) and isinstance(index.value, int):
            try:
                return owner.items[index.value]
            except IndexError:
                return UNKNOWN
        if isinstance(owner, Map):
            for key, value in owner.items:
                if key == index:
                    return value
        if isinstance(owner, Version) and isinstance(index, Const):
            return VersionPart(owner, f"[{index.value!r}]")
        if isinstance(owner, Result) and owner.args and isinstance(owner.args[0], FilePath):
            # `path.parents[1]`
            path = owner.args[0]
            if isinstance(index, Const) and isinstance(index.value, int):
                for _ in range(index.value + 1):
                    path = path.parent()
                return path
        return UNKNOWN

    # ---- literals ----------------------------------------------------------------

    def _sequence(self, node: ast.Tuple | ast.List | ast.Set, frame: Frame) -> Value:
        items: list[Value] = []
        for element in node.elts:
            value = self.value(element, frame)
            if isinstance(element, ast.Starred):
                if not isinstance(value, Seq):
                    return UNKNOWN
                items.extend(value.items)
            else:
                items.append(value)
        return Seq(tuple(items))

    def _dict(self, node: ast.Dict, frame: Frame) -> Value:
        items: list[tuple[Value, Value]] = []
        whole = True
        for key, value in zip(node.keys, node.values, strict=True):
            inner = self.value(value, frame)
            if key is None:
                if isinstance(inner, Map):
                    items.extend(inner.items)
                else:
                    whole = False
            else:
                known = self.value(key, frame)
                if isinstance(known, Const) and known.value in DOORS:
                    self._interpreter.writes.note_door(str(known.value), inner, frame, node)
                items.append((known, inner))
        return Map(tuple(items)) if whole else UNKNOWN

    def _fstring(self, node: ast.JoinedStr, frame: Frame) -> Value:
        text = ""
        for part in node.values:
            inner = part.value if isinstance(part, ast.FormattedValue) else part
            value = self.value(inner, frame)
            if isinstance(part, ast.FormattedValue) and (
                part.format_spec is not None or part.conversion not in (-1, 115)
            ):
                return UNKNOWN
            if isinstance(value, FilePath):
                rest = node.values[node.values.index(part) + 1 :]
                if not text and all(isinstance(r, ast.Constant) for r in rest):
                    return value.join(*(str(r.value) for r in rest))  # type: ignore[attr-defined]
                return UNKNOWN
            if isinstance(value, Ref) and not value.attrs:
                return UNKNOWN
            if not isinstance(value, Const):
                return UNKNOWN
            text += str(value.value)
        return Const(text)

    # ---- operators ---------------------------------------------------------------

    def _binary(self, node: ast.BinOp, frame: Frame) -> Value:
        left, right = self.value(node.left, frame), self.value(node.right, frame)
        if isinstance(node.op, ast.Add):
            if isinstance(left, Const) and isinstance(right, Const):
                if isinstance(left.value, str) and isinstance(right.value, str):
                    return Const(left.value + right.value)
            elif isinstance(left, Seq) and isinstance(right, Seq):
                return Seq(left.items + right.items)
            elif isinstance(left, FilePath) and isinstance(right, Const):
                return left.join(str(right.value))
        elif isinstance(node.op, ast.Div):
            if isinstance(left, FilePath) and isinstance(right, Const):
                return left.join(str(right.value))
        elif isinstance(node.op, ast.BitOr):
            if isinstance(left, Map) and isinstance(right, Map):
                return Map(left.items + right.items)
        elif isinstance(node.op, ast.Mod) and isinstance(left, Const):
            values = right.items if isinstance(right, Seq) else (right,)
            if isinstance(left.value, str) and all(isinstance(v, Const) for v in values):
                try:
                    return Const(left.value % tuple(v.value for v in values))  # type: ignore[union-attr]
                except (TypeError, ValueError):
                    return UNKNOWN
        return UNKNOWN

    def tested(self, value: Value, syntax: ast.AST) -> Value:
        """A value as a condition: what `getattr` may not have found is there or it is not."""
        places = [v for v, _ in options(value) if v != Const(None)]
        if places and all(isinstance(v, Ref) and v in self.may_be_missing for v in places):
            return Cond("held", (value,), syntax)
        return value

    def _boolean(self, node: ast.BoolOp, frame: Frame) -> Value:
        values = [self.value(v, frame) for v in node.values]
        op = "and" if isinstance(node.op, ast.And) else "or"
        if any(isinstance(v, Cond) for v in values):
            values = [self.tested(v, n) for v, n in zip(values, node.values, strict=True)]
            return Cond(op, tuple(values), node)
        if op == "or" and any(isinstance(v, (Ref, Func, Klass, Seq, Map)) for v in values):
            return either([(v, ()) for v in values])
        return Cond(op, tuple(values), node)

    def _unary(self, node: ast.UnaryOp, frame: Frame) -> Value:
        value = self.value(node.operand, frame)
        if isinstance(node.op, ast.Not):
            if isinstance(value, Const):
                return Const(not value.value)
            return Cond("not", (self.tested(value, node.operand),), node)
        if (
            isinstance(node.op, ast.USub)
            and isinstance(value, Const)
            and isinstance(value.value, (int, float))
        ):
            return Const(-value.value)
        return UNKNOWN

    def _compare(self, node: ast.Compare, frame: Frame) -> Value:
        values = [self.value(v, frame) for v in (node.left, *node.comparators)]
        conds: list[Value] = []
        for index, op in enumerate(node.ops):
            left, right = values[index], values[index + 1]
            name = _OPERATORS[op.__class__]
            held = self.tested(left, node) if right == Const(None) else left
            if name == "is not" and held is not left:
                conds.append(held)
            elif name == "is" and held is not left:
                conds.append(Cond("not", (held,), node))
            else:
                conds.append(Cond(name, (left, right), node))
        if len(conds) == 1:
            return conds[0]
        return Cond("and", tuple(conds), node)

    def _conditional(self, node: ast.IfExp, frame: Frame) -> Value:
        yes, no = self._interpreter.statements.branches(node, node.test, frame)
        found = []
        if yes is not None:
            found.append((self._under(node.body, frame, yes), yes))
        if no is not None:
            found.append((self._under(node.orelse, frame, no), no))
        return either(found)

    def _under(self, node: ast.expr, frame: Frame, guards: tuple[Guard, ...]) -> Value:
        before = frame.guards
        frame.guards = (*before, *guards)
        try:
            return self.value(node, frame)
        finally:
            frame.guards = before

    # ---- functions and comprehensions ----------------------------------------------

    def _lambda(self, node: ast.Lambda, frame: Frame) -> Value:
        prefix = f"{frame.function.qualname}.<locals>." if frame.function else ""
        return self._interpreter.definitions.new_function(
            frame, node, f"{prefix}<lambda>", None, (), queue=True
        )

    def _comprehension(self, node: Any, frame: Frame) -> Value:
        if len(node.generators) == 1 and not node.generators[0].ifs:
            source = self.value(node.generators[0].iter, frame)
            if isinstance(source, (Version, VersionPart)):
                return source  # `tuple(int(x) for x in version.split("."))`
        found: list[Value] = []
        whole = self._generators(
            node.generators, frame, lambda f: found.append(self.value(node.elt, f))
        )
        return Seq(tuple(found)) if whole else UNKNOWN

    def _dict_comprehension(self, node: ast.DictComp, frame: Frame) -> Value:
        found: list[tuple[Value, Value]] = []
        whole = self._generators(
            node.generators,
            frame,
            lambda f: found.append((self.value(node.key, f), self.value(node.value, f))),
        )
        return Map(tuple(found)) if whole else UNKNOWN

    def _generators(
        self, generators: list[ast.comprehension], frame: Frame, action: Callable[[Frame], None]
    ) -> bool:
        """Run `action` once per known combination; False where one was not known."""
        outer = frame.scope
        frame.scope = Scope("function", outer)
        try:
            return self._generate(generators, frame, action)
        finally:
            frame.scope = outer

    def _generate(
        self, generators: list[ast.comprehension], frame: Frame, action: Callable[[Frame], None]
    ) -> bool:
        if not generators:
            action(frame)
            return True
        head, *rest = generators
        items, whole = self.iterate(self.value(head.iter, frame))
        for item, _ in items[:UNROLL]:
            self._interpreter.statements.assign(head.target, item, frame, None)
            if head.ifs:
                whole = False
            whole = self._generate(rest, frame, action) and whole
        return whole

    def iterate(self, value: Value) -> tuple[list[tuple[Value, tuple[Guard, ...]]], bool]:
        """The items that a loop over `value` goes through, and whether they are all known."""
        items: list[tuple[Value, tuple[Guard, ...]]] = []
        whole = True
        for option, guards in options(value):
            if isinstance(option, Seq):
                items += [(i, guards) for i in option.items]
            elif isinstance(option, Map):
                items += [(k, guards) for k, _ in option.items]
            else:
                whole = False
        if not items and not whole:
            items = [(UNKNOWN, ())]
        return items, whole

    def _named(self, node: ast.NamedExpr, frame: Frame) -> Value:
        value = self.value(node.value, frame)
        frame.scope.bind(node.target.id, value, frame.guards)
        return value

    def _yield(self, node: ast.Yield, frame: Frame) -> Value:
        frame.yields.append(self.value(node.value, frame))
        return UNKNOWN


def rebind(name: str, value: Value, frame: Frame) -> None:
    """What a name of this scope stands for after a change of what it stood for."""
    if name in frame.scope.names:
        frame.scope.bind(name, value, frame.guards)


def _is_definite(index: Value) -> bool:
    """Whether a key is one key: a constant, or nothing that was ever one."""
    return isinstance(index, (Const, Ref, Func, Klass, Either))


def _foreign_attribute(owner: Ref, name: str) -> Value:
    if name == "__version__" or (name == "VERSION" and owner.module in ("torch", "vllm")):
        return Version(owner.root)
    if name in ("__version_tuple__", "version_info") and owner.root != "sys":
        return Version(owner.root, "tuple")
    if name == "version_info" and owner.dotted == "sys":
        return Version("python", "tuple")
    if name == "__file__":
        return module_path(owner)
    if name == "__path__":
        return Seq((module_path(owner).parent(),))
    if name == "__dict__":
        return DictOf(owner)
    if name == "__class__":
        return ClassOf(owner, f"{owner.dotted}.__class__")
    if name in ("__wrapped__", "__func__"):
        return owner
    return owner.child(name)


def module_path(module: Ref) -> FilePath:
    """The file of a module: whether it is a package is settled when it is looked for."""
    package, *parts = module.dotted.split(".")
    return FilePath(package, (*parts, "__init__.py"))


def _path_attribute(path: FilePath, name: str) -> Value:
    if name == "parents":
        return Result(Ref("pathlib", ("Path", "parents")), (path,))
    if name in ("name", "stem", "suffix"):
        return Const(path.parts[-1] if path.parts else path.package)
    return UNKNOWN


__all__ = ["UNROLL", "Evaluator", "Frame", "Param", "ParsedVersion", "module_path"]
