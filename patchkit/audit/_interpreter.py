"""Statements: a walk through the project's modules that collects writes to foreign names.

Each module is walked once at its top, and each of its functions that may patch once by
itself. A function of the project that is *called* with something known is walked again
for that call, so that helpers such as ``patch(target, name, new)`` are seen through.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterable
from typing import ClassVar

from patchkit.audit._calls import Calls
from patchkit.audit._expressions import UNROLL, Evaluator, Frame
from patchkit.audit._known import is_plain, is_setting
from patchkit.audit._prescan import DOORS, GIVEN, look, may_patch
from patchkit.audit._project import Project, SourceFile
from patchkit.audit._scopes import LazyName, ModuleState, Scope
from patchkit.audit._sightings import BlindSpot, CallEdge, Findings, Place, Sighting
from patchkit.audit._values import (
    UNKNOWN,
    Bound,
    ClassOf,
    Cond,
    Const,
    DictOf,
    Edit,
    FilePath,
    Func,
    Guard,
    Handle,
    Inst,
    Item,
    Klass,
    Map,
    OwnModule,
    Param,
    Ref,
    Result,
    Seq,
    Source,
    Unknown,
    Value,
    beyond,
    either,
    exclusive,
    last_name,
    options,
)

MAX_DEPTH = 6
# So deep are calls followed for what they return alone.
MAX_GIVING_DEPTH = 3
# Statements walked for one call of a project's function, calls inside of it included. A
# helper that patches is short; what is longer is an interpreter or a compiler.
MAX_STEPS = 600
_IMPORT_ERRORS = frozenset({
    "ImportError", "ModuleNotFoundError", "Exception", "BaseException", "AttributeError",
})  # fmt: skip
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Interpreter:
    """Walks a project."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.found = Findings()
        self.known_modules: set[str] = set()
        self._states: dict[str, ModuleState | None] = {}
        self._calls = Calls(self)
        self.evaluator = Evaluator(self)
        self._memo: dict[object, tuple[Value, tuple[Value, ...], dict[str, Value]]] = {}
        self._inlined = 0
        self._steps = 0
        self._def_guards: dict[Func, tuple[Guard, ...]] = {}
        self._walked: set[Func] = set()
        self._instance_values: dict[tuple[Klass, str], Value] = {}
        self._instances_read: set[Klass] = set()
        self.helper_names: set[str] = set()
        # Functions whose result may matter; the empty string stands for what needs none.
        self.giver_names: set[str] = {""}
        # Functions that return what they are given.
        self.passing_names: set[str] = set()
        # Top-level names that the project imports from elsewhere.
        self.foreign_names: set[str] = set()
        # Whether a name of a module may stand for something foreign.
        self.possible: Callable[[ModuleState, str], bool] = lambda module, root: True
        self._class_scopes: dict[Klass, Scope] = {}
        self._classes_open: list[Klass] = []

    @property
    def own_namespaces(self) -> set[str]:
        """Operator namespaces that the project defines."""
        return self._calls.own_namespaces

    def close(self) -> None:
        """Let go of everything that was walked."""
        for state in self._states.values():
            if state is not None:
                state.functions.clear()
                state.scope.names.clear()
                state.tree.body.clear()
        for kept in (
            self._states, self._memo, self._def_guards, self._walked, self._class_scopes,
            self._instance_values, self._instances_read,
        ):  # fmt: skip
            kept.clear()
        self.found = Findings()

    # ---- modules -------------------------------------------------------------------

    def state_of(self, file: SourceFile) -> ModuleState | None:
        """The module in a file, parsed but not necessarily walked."""
        key = file.relative
        if key in self._states:
            return self._states[key]
        parsed = self.project.parse(file)
        state = None
        if parsed is not None:
            tree, source = parsed
            state = ModuleState(
                file.module, file.path, file.relative, file.package, tree, source,
                Scope("module", None),
            )  # fmt: skip
        self._states[key] = state
        return state

    def module(self, name: str, importer: SourceFile | None = None) -> ModuleState | None:
        """The project's module of a name, walked; None where there is no such file."""
        file = self.project.find(name, importer)
        if file is None:
            return None
        state = self.state_of(file)
        if state is not None and state.state == "new":
            self.walk_module(state)
        return state

    def walk_module(self, state: ModuleState) -> None:
        """Walk the statements at a module's top."""
        if state.state != "new":
            return
        state.state = "walking"
        frame = Frame(state, state.scope)
        self._body(state.tree.body, frame)
        state.state = "done"

    def walk_functions(
        self,
        state: ModuleState,
        helpers: frozenset[str],
        patching: frozenset[str],
        possible: Callable[[str], bool],
    ) -> None:
        """Walk the functions that may patch by themselves or by calling others."""
        index = 0
        while index < len(state.functions):
            func = state.functions[index]
            index += 1
            if func not in self._walked and may_patch(
                func.node, helpers, patching, possible
            ):
                self._walked.add(func)
                self._standalone(func)

    def _standalone(self, func: Func) -> None:
        scope = Scope("function", func.scope)
        frame = Frame(
            func.module, scope, func, self._def_guards.get(func, ()), stack=(func.node,)
        )
        self._bind_unknown(func, scope, frame)
        if isinstance(func.node, ast.Lambda):
            self.evaluator.value(func.node.body, frame)
        else:
            self._body(func.node.body, frame)

    def _bind_unknown(self, func: Func, scope: Scope, frame: Frame) -> None:
        args = func.node.args
        positional = [*args.posonlyargs, *args.args]
        defaults: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults))
        defaults += args.defaults
        pairs = [
            *zip(positional, defaults, strict=True),
            *zip(args.kwonlyargs, args.kw_defaults, strict=True),
        ]
        outside = Frame(func.module, func.scope, None, frame.guards)
        for index, (arg, default) in enumerate(pairs):
            if index == 0 and func.owner is not None and self._has_self(func):
                scope.bind(arg.arg, self._self_of(func), ())
                continue
            annotation = None
            if arg.annotation is not None:
                annotation = self.evaluator.value(arg.annotation, outside)
                if isinstance(annotation, Const) and isinstance(annotation.value, str):
                    annotation = None
            value: Value = Param(arg.arg, annotation if isinstance(annotation, Ref) else None)
            if default is not None:
                known = self.evaluator.value(default, outside)
                if isinstance(known, (Ref, Func, Klass, Seq, Map)) or (
                    isinstance(known, Const) and isinstance(known.value, str)
                ):
                    value = either([(value, ()), (known, ())])
            scope.bind(arg.arg, value, ())
        for rest in (args.vararg, args.kwarg):
            if rest is not None:
                scope.bind(rest.arg, Param(rest.arg), ())

    @staticmethod
    def _has_self(func: Func) -> bool:
        return "staticmethod" not in func.last_decorators()

    @staticmethod
    def _self_of(func: Func) -> Value:
        assert func.owner is not None
        if "classmethod" in func.last_decorators() or func.qualname.endswith(
            ("__new__", "__init_subclass__")
        ):
            return func.owner
        return Inst(func.owner)

    # ---- names of the project ------------------------------------------------------

    def own_name(self, lazy: LazyName) -> Value:
        """A name of one of the project's modules."""
        state = self.module(lazy.module)
        if state is not None:
            bindings = state.scope.names.get(lazy.name)
            if bindings:
                found = []
                for binding in bindings:
                    value = binding.value
                    if isinstance(value, LazyName):
                        if value == lazy:
                            continue
                        value = self.own_name(value)
                    found.append((value, binding.guards))
                if found:
                    return either(found)
            submodule = f"{lazy.module}.{lazy.name}"
            if self.project.find(submodule) is not None:
                return OwnModule(submodule)
            for module, _ in state.scope.stars:
                starred = self.star_name(module, lazy.name)
                if starred is not None:
                    return starred
            return Unknown(lazy.name)
        submodule = f"{lazy.module}.{lazy.name}"
        if self.project.find(submodule) is not None or self._is_folder(submodule):
            return OwnModule(submodule)
        return Unknown(lazy.name)

    def _is_folder(self, module: str) -> bool:
        start = module + "."
        return any(name.startswith(start) for name in self.project.by_module)

    def star_name(self, module: str, name: str) -> Value | None:
        """A name that ``from module import *`` may have brought."""
        if name.startswith("__"):
            return None
        if self.project.is_own(module):
            state = self.module(module)
            if state is None or (name not in state.scope.names and not state.scope.stars):
                return None
            value = self.own_name(LazyName(module, name))
            return None if isinstance(value, Unknown) else value
        return None if hasattr(builtins, name) else Ref(module, (name,))

    def member(self, klass: Klass, name: str, depth: int = 0) -> Value:
        """A member of one of the project's classes, or of its bases."""
        scope = self._class_scopes.get(klass)
        if scope is not None and name in scope.names:
            found = []
            for binding in scope.names[name]:
                value = binding.value
                found.append(
                    (self.own_name(value) if isinstance(value, LazyName) else value, binding.guards)
                )
            return either(found)
        if depth < 12:
            for base in klass.bases:
                for option, _ in options(base):
                    if isinstance(option, Klass):
                        value = self.member(option, name, depth + 1)
                        if not isinstance(value, Unknown):
                            return value
        return UNKNOWN

    def instance_value(self, klass: Klass, name: str) -> Value:
        """What ``__init__`` of a class stores under ``self.name``, where it is simple."""
        if klass not in self._instances_read:
            self._instances_read.add(klass)
            init = self.member(klass, "__init__")
            if isinstance(init, Func) and not isinstance(init.node, ast.Lambda):
                frame = Frame(init.module, Scope("function", init.scope), init)
                self._bind_unknown(init, frame.scope, frame)
                for statement in init.node.body:
                    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                        target = statement.targets[0]
                        if isinstance(target, ast.Attribute) and isinstance(
                            statement.value, (ast.Name, ast.Attribute, ast.Constant)
                        ):
                            self._instance_values[klass, target.attr] = self.evaluator.value(
                                statement.value, frame
                            )
        return self._instance_values.get((klass, name), UNKNOWN)

    def module_named(self, name: Value) -> Value:
        """What ``sys.modules[name]`` or ``import_module(name)`` gives."""
        found: list[tuple[Value, tuple[Guard, ...]]] = []
        for option, guards in options(name):
            if isinstance(option, Unknown) and option.text == "__name__":
                found.append((OwnModule("__name__"), guards))
            elif isinstance(option, Const) and isinstance(option.value, str):
                text = option.value
                if self.project.is_own(text):
                    found.append((OwnModule(text), guards))
                else:
                    self.known_modules.add(text)
                    found.append((Ref(text), guards))
            else:
                found.append((Result(Ref("importlib", ("import_module",)), (option,)), guards))
        return either(found)

    # ---- statements ----------------------------------------------------------------

    def _body(self, body: list[ast.stmt], frame: Frame) -> None:
        before = frame.guards
        for statement in body:
            self._statement(statement, frame)
        frame.guards = before

    def _statement(self, node: ast.stmt, frame: Frame) -> None:
        kind = node.__class__
        if frame.call is not None:
            self._steps += 1
            if self._steps > MAX_STEPS:
                if self._steps == MAX_STEPS + 1:
                    self._cut(frame)
                return
        if kind in _FUNCTIONS:
            self._function(node, frame)  # type: ignore[arg-type]
            return
        handler = self._HANDLERS.get(kind)
        if handler is not None:
            handler(self, node, frame)

    def _cut(self, frame: Frame) -> None:
        """Note a call that is not followed to its end."""
        assert frame.call is not None
        module = frame.caller_module or frame.module
        spot = BlindSpot(
            "long call", frame.call, _line_at(module, frame.call.line),
            f"what it is given was followed through {MAX_STEPS} statements, and no further",
        )  # fmt: skip
        if spot not in self.found.blind_spots:
            self.found.blind_spots.append(spot)

    def _expr(self, node: ast.Expr, frame: Frame) -> None:
        if node.value.__class__ is not ast.Constant:
            self.evaluator.value(node.value, frame)

    def _assign(self, node: ast.Assign, frame: Frame) -> None:
        value = self.evaluator.value(node.value, frame)
        for target in node.targets:
            self.assign(target, value, frame, node)

    def _ann_assign(self, node: ast.AnnAssign, frame: Frame) -> None:
        if node.value is not None:
            self.assign(node.target, self.evaluator.value(node.value, frame), frame, node)

    def _aug_assign(self, node: ast.AugAssign, frame: Frame) -> None:
        added = self.evaluator.value(node.value, frame)
        if isinstance(node.target, ast.Name):
            joined = self.evaluator.value(
                ast.copy_location(
                    ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value), node
                ),
                frame,
            )
            frame.scope.bind(node.target.id, joined, frame.guards)
            return
        self.assign(node.target, Result(Ref("operator", ("iadd",)), (added,)), frame, node)

    def assign(
        self, target: ast.expr, value: Value, frame: Frame, node: ast.stmt | None
    ) -> None:
        """Bind a name, or write to an attribute or an entry."""
        if isinstance(target, ast.Name):
            frame.scope.bind(target.id, value, frame.guards)
        elif isinstance(target, (ast.Tuple, ast.List)):
            self._unpack(target, value, frame, node)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, UNKNOWN, frame, node)
        elif isinstance(target, ast.Attribute):
            owner = self.evaluator.value(target.value, frame)
            self.write(owner, target.attr, value, frame, node or target, "assignment")
        elif isinstance(target, ast.Subscript):
            owner = self.evaluator.value(target.value, frame)
            if isinstance(target.slice, ast.Slice):
                return
            index = self.evaluator.value(target.slice, frame)
            self.write_item(owner, index, value, frame, node or target, target.value)

    def _unpack(
        self, target: ast.Tuple | ast.List, value: Value, frame: Frame, node: ast.stmt | None
    ) -> None:
        count = len(target.elts)
        for option, guards in options(value):
            items: list[Value] = [UNKNOWN] * count
            if isinstance(option, Seq):
                star = next(
                    (i for i, e in enumerate(target.elts) if isinstance(e, ast.Starred)), None
                )
                if star is None and len(option.items) == count:
                    items = list(option.items)
                elif star is not None and len(option.items) >= count - 1:
                    after = count - star - 1
                    items = list(option.items[:star])
                    items.append(Seq(option.items[star : len(option.items) - after]))
                    items += option.items[len(option.items) - after :] if after else ()
            before = frame.guards
            frame.guards = (*before, *guards)
            for element, item in zip(target.elts, items, strict=True):
                inner = element.value if isinstance(element, ast.Starred) else element
                self.assign(inner, item, frame, node)
            frame.guards = before

    def _delete(self, node: ast.Delete, frame: Frame) -> None:
        for target in node.targets:
            if isinstance(target, ast.Attribute):
                owner = self.evaluator.value(target.value, frame)
                for option, guards in options(owner):
                    if isinstance(option, Ref):
                        self.emit(
                            frame, node, "del", "delete", option.child(target.attr), UNKNOWN,
                            guards=guards, must_exist=True,
                        )  # fmt: skip
            elif isinstance(target, ast.Subscript):
                owner = self.evaluator.value(target.value, frame)
                index = self.evaluator.value(target.slice, frame)
                self.delete_item(owner, index, frame, node)

    def delete_item(self, owner: Value, index: Value, frame: Frame, node: ast.AST) -> None:
        """``del owner[index]``."""
        for option, guards in options(owner):
            if not isinstance(option, Ref) or option.root == "os":
                continue
            if option.dotted == "sys.modules":
                continue  # a module that is to be imported again: nothing is replaced
            if option.attrs and option.attrs[-1].lstrip("_").isupper():
                self.emit(
                    frame, node, "del", "delete", option, UNKNOWN, guards=guards,
                    key=_key(index), must_exist=True,
                )  # fmt: skip

    # ---- control flow --------------------------------------------------------------

    def branches(
        self, node: ast.AST, test: ast.expr, frame: Frame
    ) -> tuple[tuple[Guard, ...] | None, tuple[Guard, ...] | None]:
        """The guards of both branches of a test; None for one that never runs."""
        cond = self.evaluator.value(test, frame)
        known = _static_truth(test, cond)
        if known is True:
            return (), None
        if known is False:
            return None, ()
        line, file = getattr(test, "lineno", 0), frame.module.file
        yes = Guard(cond, id(node), 0, test, line, file)
        no = Guard(Cond("not", (cond,)), id(node), 1, test, line, file, negated=True)
        return (yes,), (no,)

    def _if(self, node: ast.If, frame: Frame) -> None:
        yes, no = self.branches(node, node.test, frame)
        before = frame.guards
        if yes is not None:
            frame.guards = (*before, *yes)
            self._body(node.body, frame)
        if no is not None:
            frame.guards = (*before, *no)
            self._body(node.orelse, frame)
        frame.guards = before
        # What follows a branch that leaves runs only when the branch was not taken.
        if yes is not None and no is not None:
            if _leaves(node.body):
                frame.guards = (*before, *no)
            elif node.orelse and _leaves(node.orelse):
                frame.guards = (*before, *yes)

    def _assert(self, node: ast.Assert, frame: Frame) -> None:
        yes, _ = self.branches(node, node.test, frame)
        if yes:
            frame.guards = (*frame.guards, *yes)

    def _for(self, node: ast.For | ast.AsyncFor, frame: Frame) -> None:
        items, _ = self.evaluator.iterate(self.evaluator.value(node.iter, frame))
        before = frame.guards
        for item, guards in items[:UNROLL]:
            frame.guards = (*before, *guards)
            self.assign(node.target, item, frame, None)
            self._body(node.body, frame)
        frame.guards = before
        self._body(node.orelse, frame)

    def _while(self, node: ast.While, frame: Frame) -> None:
        self.evaluator.value(node.test, frame)
        self._body(node.body, frame)
        self._body(node.orelse, frame)

    def _with(self, node: ast.With | ast.AsyncWith, frame: Frame) -> None:
        before = frame.guards
        for item in node.items:
            value = self.evaluator.value(item.context_expr, frame)
            entered = self._calls.enter(value)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, entered, frame, node)
            if (
                isinstance(value, Result)
                and isinstance(value.func, Ref)
                and value.func.dotted == "contextlib.suppress"
            ):
                names = {_error_name(a) for a in value.args}
                frame.guards = (*frame.guards, *self._try_guard(node, names, frame)[0])
        self._body(node.body, frame)
        frame.guards = before

    def _try(self, node: ast.Try, frame: Frame) -> None:
        names: set[str] = set()
        for handler in node.handlers:
            names |= self._caught(handler, frame)
        inside, outside = self._try_guard(node, names, frame)
        before = frame.guards
        frame.guards = (*before, *inside)
        self._body(node.body, frame)
        frame.guards = (*before, *inside)
        self._body(node.orelse, frame)
        leaves = bool(node.handlers)
        for index, handler in enumerate(node.handlers):
            cond = outside if self._caught(handler, frame) & _IMPORT_ERRORS else UNKNOWN
            text = cond.text if isinstance(cond, Cond) else f"except at line {handler.lineno}"
            guard = Guard(
                cond, id(node), index + 1, text, handler.lineno, frame.module.file, kind="except"
            )
            frame.guards = (*before, guard)
            if handler.name:
                frame.scope.bind(handler.name, UNKNOWN, frame.guards)
            self._body(handler.body, frame)
            leaves = leaves and _leaves(handler.body)
        frame.guards = before
        self._body(node.finalbody, frame)
        if leaves:
            frame.guards = (*before, *inside)  # whoever comes here came through the body

    def _caught(self, handler: ast.ExceptHandler, frame: Frame) -> set[str]:
        if handler.type is None:
            return {"BaseException"}
        value = self.evaluator.value(handler.type, frame)
        items = value.items if isinstance(value, Seq) else (value,)
        return {_error_name(v) for v in items}

    def _try_guard(
        self, node: ast.AST, caught: set[str], frame: Frame
    ) -> tuple[tuple[Guard, ...], Value]:
        """The guard of a try's body, and the condition under which its handlers run."""
        wanted: list[Value] = []
        if caught & _IMPORT_ERRORS:
            for statement in getattr(node, "body", ()):
                wanted += self._imported(statement, frame)
        line, file = getattr(node, "lineno", 0), frame.module.file
        if not wanted:
            return (Guard(UNKNOWN, id(node), 0, "", line, file, kind="try"),), UNKNOWN
        text = ", ".join(v.dotted for v in wanted if isinstance(v, Ref))
        inside = Cond("importable", tuple(wanted), f"{text} can be imported")
        outside = Cond("not", (inside,), f"{text} cannot be imported")
        return (Guard(inside, id(node), 0, inside.text, line, file, kind="try"),), outside

    def _imported(self, node: ast.stmt, frame: Frame) -> list[Value]:
        if isinstance(node, ast.Import):
            return [
                Ref(a.name)
                for a in node.names
                if not self.project.is_own(a.name, self._file(frame))
            ]
        if isinstance(node, ast.ImportFrom):
            base = self._base(node, frame)
            if not base or self.project.is_own(base, self._file(frame)):
                return []
            return [Ref(base) if a.name == "*" else Ref(base, (a.name,)) for a in node.names]
        return []

    def _match(self, node: ast.Match, frame: Frame) -> None:
        self.evaluator.value(node.subject, frame)
        before = frame.guards
        for index, case in enumerate(node.cases):
            guard = Guard(
                UNKNOWN, id(node), index, f"case {ast.unparse(case.pattern)}", node.lineno,
                frame.module.file,
            )  # fmt: skip
            frame.guards = (*before, guard)
            self._body(case.body, frame)
        frame.guards = before

    def _return(self, node: ast.Return, frame: Frame) -> None:
        if node.value is not None:
            value = self.evaluator.value(node.value, frame)
            frame.returns.append((value, frame.guards))

    def _outer(self, node: ast.Global | ast.Nonlocal, frame: Frame) -> None:
        frame.scope.outer.update(node.names)

    # ---- imports -------------------------------------------------------------------

    def _file(self, frame: Frame) -> SourceFile | None:
        return self.project.by_path.get(frame.module.path)

    def _base(self, node: ast.ImportFrom, frame: Frame) -> str:
        if not node.level:
            return node.module or ""
        parts = frame.module.package.split(".") if frame.module.package else []
        if node.level > 1:
            parts = parts[: 1 - node.level]
        return ".".join([*parts, node.module] if node.module else parts)

    def _import(self, node: ast.Import, frame: Frame) -> None:
        file = self._file(frame)
        for alias in node.names:
            own = self.project.find(alias.name, file)
            if own is not None:
                self._note_import(frame, own.module)
                if alias.asname:
                    frame.scope.bind(alias.asname, OwnModule(own.module), frame.guards)
                else:
                    top, dot, _ = alias.name.partition(".")
                    frame.scope.bind(top, OwnModule(top if dot else own.module), frame.guards)
                continue
            top = alias.name.partition(".")[0]
            if self.project.is_own(top, file):
                frame.scope.bind(alias.asname or top, OwnModule(top), frame.guards)
                continue
            self.known_modules.add(alias.name)
            if alias.asname:
                frame.scope.bind(alias.asname, Ref(alias.name), frame.guards)
            else:
                frame.scope.bind(top, Ref(top), frame.guards)

    def _import_from(self, node: ast.ImportFrom, frame: Frame) -> None:
        base = self._base(node, frame)
        if not base:
            return
        file = self._file(frame)
        own = self.project.find(base, file)
        is_own = node.level > 0 or own is not None or self.project.is_own(base, file)
        name_of_base = own.module if own is not None else base
        if own is not None:
            self._note_import(frame, own.module)
        elif not is_own:
            self.known_modules.add(base)
        for alias in node.names:
            local = alias.asname or alias.name
            if alias.name == "*":
                frame.scope.stars.append((name_of_base, frame.guards))
            elif is_own:
                submodule = self.project.find(f"{name_of_base}.{alias.name}")
                if submodule is not None:
                    self._note_import(frame, submodule.module)
                frame.scope.bind(local, LazyName(name_of_base, alias.name), frame.guards)
            else:
                frame.scope.bind(local, Ref(base, (alias.name,)), frame.guards)

    def _note_import(self, frame: Frame, module: str) -> None:
        if frame.call is None:
            source = frame.function.reference if frame.function else frame.module.name
            self.found.imports.add((source, module))

    # ---- definitions ---------------------------------------------------------------

    def new_function(
        self,
        frame: Frame,
        node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
        qualname: str,
        owner: Klass | None,
        decorators: tuple[Value, ...],
        *,
        queue: bool,
    ) -> Func:
        """A function of the project; queued when it is to be walked by itself."""
        func = Func(frame.module, qualname, node, frame.scope, owner, decorators)
        self._def_guards[func] = frame.guards
        if queue and frame.call is None:
            frame.module.functions.append(func)
        return func

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, frame: Frame) -> None:
        owner = self._classes_open[-1] if frame.scope.kind == "class" else None
        if owner is not None:
            qualname = f"{owner.qualname}.{node.name}"
        elif frame.function is not None:
            qualname = f"{frame.function.qualname}.<locals>.{node.name}"
        else:
            qualname = node.name
        decorators = tuple(self.evaluator.value(d, frame) for d in node.decorator_list)
        func = self.new_function(frame, node, qualname, owner, decorators, queue=True)
        frame.scope.bind(node.name, func, frame.guards)
        for value, syntax in zip(reversed(decorators), reversed(node.decorator_list), strict=True):
            self._calls.decorate(value, func, frame, syntax)

    def _class(self, node: ast.ClassDef, frame: Frame) -> None:
        prefix = ""
        if frame.scope.kind == "class":
            prefix = f"{self._classes_open[-1].qualname}."
        elif frame.function is not None:
            prefix = f"{frame.function.qualname}.<locals>."
        bases = tuple(self.evaluator.value(b, frame) for b in node.bases)
        for keyword in node.keywords:
            self.evaluator.value(keyword.value, frame)
        outer = frame.scope
        scope = Scope("class", outer)
        klass = Klass(frame.module, prefix + node.name, node, outer, bases)
        self._class_scopes[klass] = scope
        decorators = [self.evaluator.value(d, frame) for d in node.decorator_list]
        frame.scope = scope
        self._classes_open.append(klass)
        try:
            self._body(node.body, frame)
        finally:
            self._classes_open.pop()
            frame.scope = outer
        outer.bind(node.name, klass, frame.guards)
        for value, syntax in zip(reversed(decorators), reversed(node.decorator_list), strict=True):
            self._calls.decorate(value, klass, frame, syntax)

    def class_members(self, klass: Klass) -> Iterable[tuple[str, Value]]:
        """The names that a class body binds."""
        scope = self._class_scopes.get(klass)
        for name, bindings in scope.names.items() if scope else ():
            value = bindings[-1].value
            if not isinstance(value, LazyName):
                yield name, value

    # ---- calls ---------------------------------------------------------------------

    def call(self, node: ast.Call, frame: Frame) -> Value:
        """A call expression."""
        return self._calls.call(node, frame)

    def inline(
        self,
        func: Func,
        args: tuple[Value, ...],
        kwargs: dict[str, Value],
        frame: Frame,
        node: ast.AST,
        *,
        effects_only: bool = False,
    ) -> Value:
        """Walk a function of the project for one call of it; what it returns."""
        if frame.call is None:
            self.found.edges.append(CallEdge(frame.function, frame.module, func, frame.guards))
        if func.node in frame.stack or len(frame.stack) > MAX_DEPTH:
            return UNKNOWN
        looked = look(func.node)
        given = (*args, *kwargs.values())
        roots = self._foreign_roots(given)
        if frame.call is not None:
            # What does not come from the outermost call is met when the function is
            # walked by itself.
            roots &= frame.given
        foreign = bool(roots)
        handed_on = not self.helper_names.isdisjoint(looked.passed)
        patches = (foreign and (looked.when_called or handed_on)) or (
            (foreign or (frame.call is None and any(map(_is_definite, given))))
            and any(self.possible(func.module, root) for root in looked.alone)
        )
        gives = not effects_only and (
            not self.giver_names.isdisjoint(looked.gives) or (foreign and GIVEN in looked.gives)
        )
        if not patches and not (gives and len(frame.stack) <= MAX_GIVING_DEPTH):
            return UNKNOWN
        key = (
            id(func.node), id(func.scope), tuple(map(_mark, args)),
            tuple((name, _mark(value)) for name, value in sorted(kwargs.items())),
            (frame.call or self.place(frame, node), frame.guards) if patches else None,
        )  # fmt: skip
        if key in self._memo:
            return self._memo[key][0]
        if frame.call is None:
            self._steps = 0
        elif self._steps > MAX_STEPS:
            return UNKNOWN
        # The arguments are kept alive: some of them are remembered by their identity.
        self._memo[key] = (UNKNOWN, args, kwargs)
        self._inlined += 1
        scope = Scope("function", func.scope)
        inner = Frame(
            func.module, scope, func,
            (*frame.guards, *beyond(self._def_guards.get(func, ()), frame.guards)),
            call=frame.call or self.place(frame, node),
            caller=frame.caller if frame.call else frame.function,
            caller_module=frame.caller_module or frame.module,
            before_call=frame.before_call if frame.call else len(frame.guards),
            given=frame.given if frame.call else frozenset(roots),
            stack=(*frame.stack, func.node),
        )  # fmt: skip
        self._bind_call(func, args, kwargs, scope, inner)
        depth = len(inner.guards)
        if isinstance(func.node, ast.Lambda):
            result = self.evaluator.value(func.node.body, inner)
        else:
            self._body(func.node.body, inner)
            if inner.yields and "contextmanager" in func.last_decorators():
                result = Result(Ref("contextlib", ("contextmanager",)), (inner.yields[0],))
            else:
                result = either([(v, g[depth:]) for v, g in inner.returns])
        self._memo[key] = (result, args, kwargs)
        return result

    def _foreign_roots(self, values: Iterable[Value], depth: int = 0) -> set[str]:
        """The packages that arguments are of, or name; paths and classes count as any."""
        found: set[str] = set()
        for value in values:
            for option, _ in options(value):
                if isinstance(option, Ref):
                    found.add(option.root)
                elif isinstance(option, Item):
                    found.add(option.owner.root)
                elif isinstance(option, (DictOf, ClassOf)):
                    found |= self._foreign_roots((option.owner,), depth + 1) or {""}
                elif isinstance(option, (FilePath, Source, Handle)):
                    found.add("")
                elif isinstance(option, Const) and isinstance(option.value, str):
                    root, dot, _rest = option.value.replace(":", ".").partition(".")
                    if dot and root in self.foreign_names:
                        found.add(root)
                elif isinstance(option, Inst) and isinstance(option.cls, Ref):
                    if option.cls.dotted == "importlib.machinery.ModuleSpec":
                        found.add("")
                elif depth < 3 and isinstance(option, Seq):
                    found |= self._foreign_roots(option.items[:40], depth + 1)
                elif depth < 3 and isinstance(option, Map):
                    pairs = (v for pair in option.items[:40] for v in pair)
                    found |= self._foreign_roots(pairs, depth + 1)
                elif isinstance(option, Bound):
                    found |= self._foreign_roots((option.self,), depth + 1)
        return found

    def _bind_call(
        self,
        func: Func,
        args: tuple[Value, ...],
        kwargs: dict[str, Value],
        scope: Scope,
        frame: Frame,
    ) -> None:
        spec = func.node.args
        positional = [*spec.posonlyargs, *spec.args]
        outside = Frame(func.module, func.scope, None, frame.guards, call=frame.call)
        defaults: list[ast.expr | None] = [None] * (len(positional) - len(spec.defaults))
        defaults += spec.defaults
        left = dict(kwargs)
        for index, (arg, default) in enumerate(zip(positional, defaults, strict=True)):
            if index < len(args):
                value = args[index]
            elif arg.arg in left:
                value = left.pop(arg.arg)
            else:
                value = self.evaluator.value(default, outside)
            scope.bind(arg.arg, value, ())
        for arg, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
            value = left.pop(arg.arg) if arg.arg in left else self.evaluator.value(default, outside)
            scope.bind(arg.arg, value, ())
        if spec.vararg:
            scope.bind(spec.vararg.arg, Seq(args[len(positional) :]), ())
        if spec.kwarg:
            rest = tuple((Const(k), v) for k, v in left.items())
            scope.bind(spec.kwarg.arg, Map(rest), ())

    def peek(self, node: ast.expr, frame: Frame) -> Value:
        """The value of a name or a chain of attributes; of nothing that would be called."""
        if isinstance(node, ast.Name):
            return self.evaluator.lookup(node.id, frame.scope, ())
        if isinstance(node, ast.Attribute):
            return self.evaluator.attribute(self.peek(node.value, frame), node.attr)
        return UNKNOWN

    # ---- writes --------------------------------------------------------------------

    def write(
        self,
        owner: Value,
        name: str,
        value: Value,
        frame: Frame,
        node: ast.AST,
        form: str,
        *,
        must_exist: bool = False,
        action: str | None = None,
    ) -> None:
        """``owner.name = value``."""
        for option, guards in options(owner):
            if exclusive(guards, frame.guards):
                continue
            if isinstance(option, Ref):
                if name == "__class__":
                    self.emit(frame, node, form, "class-swap", option, value, guards=guards)
                    continue
                if name == "__dict__" or is_setting(option, name, value):
                    continue
                self.emit(
                    frame, node, form, action or self._action(value), option.child(name), value,
                    guards=guards, must_exist=must_exist,
                )  # fmt: skip
            elif name == "__class__":
                self._swap(option, value, guards, frame, node, form)
            elif isinstance(option, Inst) and isinstance(option.cls, Ref):
                continue  # one object's own attribute: other objects are not affected
            elif isinstance(option, ClassOf):
                self._write_to_class(option, name, value, guards, frame, node, form)
            elif isinstance(option, Result) and _names_module(option):
                self.blind(
                    "dynamic module", frame, node,
                    f"the module that gets {name!r} is computed at run time",
                )  # fmt: skip

    def _write_to_class(
        self,
        owner: ClassOf,
        name: str,
        value: Value,
        guards: tuple[Guard, ...],
        frame: Frame,
        node: ast.AST,
        form: str,
    ) -> None:
        inner = owner.owner
        if isinstance(inner, Inst):
            self.write(inner.cls, name, value, frame, node, form)
            return
        if isinstance(inner, Param) and _names_class(inner.annotation):
            # The class of an annotated parameter is that class or a subclass of it.
            self.emit(
                frame, node, form, self._action(value),
                inner.annotation.child(name),  # type: ignore[union-attr]
                value, guards=guards,
            )  # fmt: skip
            return
        if is_plain(value):
            return
        self.blind(
            "class of an object", frame, node,
            f"the class that gets {name!r} is that of an object known at run time only",
        )  # fmt: skip

    def _swap(
        self,
        owner: Value,
        value: Value,
        guards: tuple[Guard, ...],
        frame: Frame,
        node: ast.AST,
        form: str,
    ) -> None:
        """``object.__class__ = value``."""
        target: Value | None = None
        if isinstance(owner, Inst):
            target = owner.cls if _names_class(owner.cls) else None
            if target is None:
                return
        elif isinstance(owner, Param) and _names_class(owner.annotation):
            target = owner.annotation
        else:
            # An object of unknown class that becomes one of our subclass of a foreign
            # class was, as far as it makes sense at all, one of that foreign class.
            for option, _ in options(value):
                if isinstance(option, Klass):
                    target = self._foreign_base(option)
        if isinstance(target, Ref):
            self.emit(frame, node, form, "class-swap", target, value, guards=guards)
        elif not isinstance(owner, (OwnModule, Klass, Func)):
            known = [v for v, _ in options(value) if isinstance(v, (Klass, Ref))]
            if known and not (isinstance(owner, Param) and owner.name == "self"):
                self.blind(
                    "class of an object", frame, node,
                    "an object known at run time only gets another class",
                )  # fmt: skip

    def _foreign_base(self, klass: Klass, depth: int = 0) -> Ref | None:
        for base in klass.bases:
            for option, _ in options(base):
                if _names_class(option):
                    return option  # type: ignore[return-value]
                if isinstance(option, Klass) and depth < 8:
                    found = self._foreign_base(option, depth + 1)
                    if found is not None:
                        return found
        return None

    def write_item(
        self,
        owner: Value,
        index: Value,
        value: Value,
        frame: Frame,
        node: ast.AST,
        syntax: ast.AST | None = None,
        form: str = "assignment",
    ) -> None:
        """``owner[index] = value``."""
        if isinstance(index, Const) and index.value in DOORS:
            self.note_door(str(index.value), value, frame, node)
        for option, guards in options(owner):
            if isinstance(option, DictOf):
                if isinstance(index, Const) and isinstance(index.value, str):
                    self.write(option.owner, index.value, value, frame, node, "__dict__")
                elif isinstance(option.owner, Ref):
                    self.blind(
                        "dynamic name", frame, node,
                        f"the name written into {option.owner.dotted}.__dict__ is not constant",
                    )  # fmt: skip
                continue
            if isinstance(option, Ref) and option.dotted == "sys.modules":
                self._write_module(index, value, guards, frame, node)
                continue
            if isinstance(option, Item):
                option = option.owner
            if not isinstance(option, Ref) or not option.attrs:
                if isinstance(option, Ref) and is_setting(option, "", value):
                    continue
                continue
            owner_ref = Ref(option.module, option.attrs[:-1])
            if is_setting(owner_ref, option.attrs[-1], value) or is_setting(option, "[]", value):
                if option.dotted == "os.environ":
                    self.setting(index, value)
                continue
            if option.root in ("os", "sys"):
                continue
            self.emit(
                frame, node, "item", "register", option, value, guards=guards, key=_key(index)
            )

    def note_door(self, name: str, value: Value, frame: Frame, node: ast.AST) -> None:
        """A hook for workers that is set in a dict."""
        self._calls.door(name, value, frame, node)

    def setting(self, name: Value, value: Value) -> None:
        """An environment variable that the project sets."""
        if isinstance(name, Const) and isinstance(name.value, str):
            text = str(value.value) if isinstance(value, Const) else "?"
            self.found.settings[name.value] = text

    def _write_module(
        self,
        index: Value,
        value: Value,
        guards: tuple[Guard, ...],
        frame: Frame,
        node: ast.AST,
    ) -> None:
        for name, more in options(index):
            if isinstance(name, Const) and isinstance(name.value, str):
                if self.project.is_own(name.value):
                    continue
                target = Ref(name.value)
                if isinstance(value, Ref) and value.dotted == name.value:
                    continue
                if _is_itself(value, name.value):
                    continue
                self.emit(
                    frame, node, "sys.modules", "module", target, value, guards=(*guards, *more)
                )
            elif not _own_module_name(name, frame) and not isinstance(value, OwnModule):
                self.blind(
                    "dynamic module", frame, node,
                    "the name written into sys.modules is computed at run time",
                )  # fmt: skip

    def _action(self, value: Value) -> str:
        return "value" if is_plain(value) else "replace"

    # ---- what was seen -------------------------------------------------------------

    def place(self, frame: Frame, node: ast.AST) -> Place:
        return Place(
            frame.module.file, getattr(node, "lineno", 0), getattr(node, "col_offset", 0),
            getattr(node, "end_lineno", 0) or 0,
        )  # fmt: skip

    def emit(
        self,
        frame: Frame,
        node: ast.AST,
        form: str,
        action: str,
        target: Value,
        replacement: Value,
        *,
        guards: tuple[Guard, ...] = (),
        key: str | None = None,
        edits: tuple[Edit, ...] = (),
        must_exist: bool = False,
    ) -> None:
        """Note a write to something foreign."""
        if not isinstance(target, (Ref, Item, FilePath)):
            return
        root = target.package if isinstance(target, FilePath) else (
            target.owner.root if isinstance(target, Item) else target.root
        )
        if self.project.is_own(root) or root == "__main__":
            return
        if isinstance(target, Ref) and _gives_back(target, replacement):
            return
        raw = self.place(frame, node)
        self.found.sightings.append(
            Sighting(
                form=form,
                action=action,
                target=target,
                replacement=replacement,
                place=frame.call or raw,
                module=(frame.caller_module or frame.module) if frame.call else frame.module,
                function=frame.caller if frame.call else frame.function,
                guards=(*frame.guards, *beyond(guards, frame.guards)),
                key=key,
                through=raw if frame.call else None,
                before_call=frame.before_call if frame.call else None,
                edits=edits,
                must_exist=must_exist,
            )
        )

    def blind(self, kind: str, frame: Frame, node: ast.AST, reason: str) -> None:
        """Note something that cannot be followed."""
        spot = BlindSpot(kind, self.place(frame, node), _source_line(frame.module, node), reason)
        if spot not in self.found.blind_spots:
            self.found.blind_spots.append(spot)

    _HANDLERS: ClassVar[dict[type, Callable[..., None]]] = {
        ast.Expr: _expr,
        ast.Assign: _assign,
        ast.AnnAssign: _ann_assign,
        ast.AugAssign: _aug_assign,
        ast.Delete: _delete,
        ast.If: _if,
        ast.Assert: _assert,
        ast.For: _for,
        ast.AsyncFor: _for,
        ast.While: _while,
        ast.With: _with,
        ast.AsyncWith: _with,
        ast.Try: _try,
        ast.Match: _match,
        ast.Return: _return,
        ast.Global: _outer,
        ast.Nonlocal: _outer,
        ast.Import: _import,
        ast.ImportFrom: _import_from,
        ast.ClassDef: _class,
    }
    if hasattr(ast, "TryStar"):
        _HANDLERS[ast.TryStar] = _try


def _names_class(value: Value | None) -> bool:
    """Whether a value stands for a class of somebody's, not for a construct of typing."""
    return isinstance(value, Ref) and value.root not in (
        "abc", "typing", "typing_extensions", "builtins", "types", "collections", "enum",
    )  # fmt: skip


def _is_itself(value: Value, name: str) -> bool:
    """Whether a module is only loaded by hand, from where it lies anyway."""
    return any(
        isinstance(v, Result)
        and last_name(v) == "module_from_spec"
        and any(
            isinstance(spec, Inst)
            and any(
                isinstance(place, FilePath)
                and ".".join((place.package, *place.parts)) == name
                for place in spec.args
            )
            for argument in v.args
            for spec, _ in options(argument)
        )
        for v, _ in options(value)
    )


def _gives_back(target: Ref, value: Value) -> bool:
    """Whether a write only puts the original back."""
    found = options(value)
    return bool(found) and all(
        isinstance(v, Ref) and v.dotted == target.dotted for v, _ in found
    )


def _static_truth(test: ast.expr, cond: Value) -> bool | None:
    if isinstance(cond, Const):
        return bool(cond.value)
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)
    if name == "TYPE_CHECKING":
        return False
    if isinstance(cond, Cond) and cond.op == "not" and isinstance(test, ast.UnaryOp):
        inner = _static_truth(test.operand, cond.args[0])
        return None if inner is None else not inner
    if isinstance(cond, Cond) and cond.op in ("==", "!=", "is", "is not", "in", "not in"):
        left, right = cond.args
        positive = cond.op in ("==", "is", "in")
        if isinstance(left, Const) and isinstance(right, Const) and "in" not in cond.op.split():
            return (left.value == right.value) is positive
        if (
            isinstance(left, Const)
            and isinstance(right, Seq)
            and "in" in cond.op.split()
            and all(isinstance(v, Const) for v in right.items)
        ):
            return (left in right.items) is positive
        if (
            cond.op in ("is", "is not")
            and right == Const(None)
            and isinstance(left, (Func, Klass, Seq, Map, OwnModule))
        ):
            return cond.op == "is not"
    return None


def _leaves(body: list[ast.stmt]) -> bool:
    """Whether a block never runs through to its end."""
    if not body:
        return False
    last = body[-1]
    if isinstance(last, (ast.Return, ast.Raise, ast.Continue, ast.Break)):
        return True
    if isinstance(last, ast.If):
        return _leaves(last.body) and _leaves(last.orelse)
    if isinstance(last, (ast.With, ast.AsyncWith)):
        return _leaves(last.body)
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        return ast.unparse(last.value.func) in ("sys.exit", "exit", "os._exit", "pytest.skip")
    return False


def _is_definite(value: Value) -> bool:
    return isinstance(value, (Const, Func, Klass))


def _mark(value: Value) -> object:
    """Something hashable that stands for a value: itself where that is cheap."""
    if isinstance(value, (Const, Ref, Func, Klass, OwnModule)):
        return value
    if isinstance(value, (Unknown, Param, Result, Cond)):
        return None
    return id(value)


def _names_module(value: Result) -> bool:
    return isinstance(value.func, Ref) and value.func.dotted == "importlib.import_module"


def _own_module_name(value: Value, frame: Frame) -> bool:
    return isinstance(value, Unknown) and value.text == "__name__"


def _error_name(value: Value) -> str:
    if isinstance(value, Ref):
        return value.attrs[-1] if value.attrs else value.module
    if isinstance(value, Klass):
        return value.node.name
    return ""


def _key(index: Value) -> str:
    found = [str(v.value) for v, _ in options(index) if isinstance(v, Const)]
    if found:
        return found[0]
    for value, _ in options(index):
        if isinstance(value, Ref):
            return value.dotted
        if isinstance(value, (Func, Klass)):
            return value.reference
    return "?"


def _source_line(module: ModuleState, node: ast.AST) -> str:
    return _line_at(module, getattr(node, "lineno", 0))


def _line_at(module: ModuleState, line: int) -> str:
    lines = module.source.splitlines()
    return lines[line - 1].strip()[:160] if 0 < line <= len(lines) else ""


__all__ = ["Bound", "Interpreter"]
