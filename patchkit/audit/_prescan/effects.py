"""What the names of a function may stand for, and what each write and each call depends on."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from patchkit.audit._known import DESCRIPTIVE, DOORS, REGISTERING, WRAPPING_CALLS
from patchkit.audit._prescan.looks import GIVEN, PASSED, RETURNED, Import, Looked
from patchkit.audit._prescan.syntax import (
    copied_from,
    innermost,
    is_special,
    last_of,
    parameters,
    part_of,
    root_of,
)

# Calls that patch, or may: whatever they are given.
_ALWAYS = frozenset({
    "exec", "impl", "py_impl", "when_imported", "register_post_import_hook", "curse", "Patch",
    "patches", "patch_function_wrapper", "apply_patch", "register_patch", "register_patches",
    "add_patch", "patch_attr", "Library", "custom_op", "triton_op", "register_kernel",
    "register_autograd", "mc_patchface", *WRAPPING_CALLS,
})  # fmt: skip
_SETTERS = frozenset({"setattr", "delattr", "__setattr__", "__delattr__"})
_CONTAINER_CALLS = frozenset({
    "update", "setdefault", "insert", "append", "extend", "pop", "__setitem__",
})  # fmt: skip
_WRITES = frozenset({"write", "writelines", "write_text", "write_bytes", "copy", "copyfile"})
# Methods that may give a module or a class …
_GIVING = frozenset({
    "import_module", "resolve_name", "getmodule", "locate", "attrgetter", "Library", "get_class",
    "version", "parse", "Version",
})  # fmt: skip
# … an entry of a table …
_LOOKUPS = frozenset({"get", "pop", "setdefault"})
# … or a path or a text of an installed package, where files of it are in reach.
_GIVING_SOURCE = frozenset({
    "find_spec", "read_text", "read", "join", "replace", "getsource", "files", "joinpath",
    "dirname", "resolve", "absolute", "split", "partition", "readlines", "sub", "open",
    "getfile", "getsourcefile", "with_name",
})  # fmt: skip
_MAKING = frozenset({
    "dict", "list", "set", "tuple", "len", "int", "str", "float", "bool", "sum", "max", "min",
    "sorted", "range", "isinstance", "deepcopy", "copy", "repr", "id", "abs", "round", "open",
    "super", "defaultdict", "hasattr", "callable", "issubclass", "hash", "print", "input",
})  # fmt: skip
# What a test of a version, or of a name's existence, looks like.
_VERSION_TEST = re.compile(r"ersion|VERSION|hasattr|\bparse\(|\b[vV]\d*\b|\bver\b")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LITERALS = (
    ast.List, ast.Dict, ast.Set, ast.Tuple, ast.ListComp, ast.DictComp, ast.SetComp,
    ast.GeneratorExp,
)  # fmt: skip
_PLAIN = (ast.Constant, ast.JoinedStr, ast.Compare, ast.UnaryOp)

# Functions, called by their bare names, that give a module, a class or a path.
_GIVING_NAMES = frozenset({
    "getattr", "__import__", "vars", "type", "globals", "next", "iter", "cast", "wraps",
    "partial", "Path", "reversed", "sorted", "zip", "enumerate", "map", "filter", "chain",
    *_GIVING, *_GIVING_SOURCE,
})  # fmt: skip
# What a name may stand for.
HARMLESS = 0  # neither a module or class of others, nor anything that holds one
HOLDER = 1  # a container made here: writing into it is harmless, its items may not be
MAYBE = 2


class Effects:
    """One look at some nodes: a function with its inner ones, or a module's top."""

    def __init__(
        self, nodes: list[ast.AST], outside: Mapping[str, int], reads_source: bool
    ) -> None:
        self.names: dict[str, int] = {}
        self._outside = outside
        self._reads_source = reads_source
        self._parameters: set[str] = set()
        self._receivers: set[str] = set()
        self._functions: set[str] = set()
        self.imported: list[tuple[str, Import]] = []
        self._derived: dict[str, set[str]] = {}
        self._through: dict[str, set[str]] = {}
        self._copies: set[str] = set()
        self._passed: set[str] = set()
        self._tables: set[str] = set()
        self._alone: set[str] = set()
        self._when_called = False
        self._setter = False
        self._gives: set[str] = set()
        self._called: set[str] = set()
        self._called_with: set[tuple[str, str]] = set()
        self._nodes = nodes

    def result(self) -> Looked:
        triggers: list[ast.AST] = []
        for node in self._nodes:
            kind = node.__class__
            if kind is ast.Call:
                triggers.append(node)
            elif kind is ast.Assign:
                triggers.append(node)
                for target in node.targets:  # type: ignore[attr-defined]
                    self._note(target, node.value)  # type: ignore[attr-defined]
            elif kind in _NOTED:
                self._other(node, triggers)
        for node in triggers:
            self._trigger(node)
        return Looked(
            frozenset(self._alone),
            self._when_called,
            self._setter,
            frozenset(self._called),
            frozenset(self._called_with),
            frozenset(self._passed),
            frozenset(self._gives),
        )

    def _other(self, node: ast.AST, triggers: list[ast.AST]) -> None:
        if isinstance(node, _FUNCTIONS):
            own, receivers = parameters(node.args)
            self._parameters |= own
            self._receivers |= receivers
            if not isinstance(node, ast.Lambda):
                self._functions.add(node.name)
                self.names.setdefault(node.name, HARMLESS)
        elif isinstance(node, ast.ClassDef):
            self.names.setdefault(node.name, HARMLESS)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
            if node.value is not None:
                self._note(node.target, node.value)
                triggers.append(node)
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            self._note_loop(node.target, node.iter)
        elif isinstance(node, ast.withitem):
            if node.optional_vars is not None:
                self._note(node.optional_vars, node.context_expr)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                local = alias.asname or alias.name
                if isinstance(node, ast.Import):
                    origin: Import = (alias.name, 0, "")
                    local = alias.asname or alias.name.partition(".")[0]
                else:
                    origin = (node.module or "", node.level, alias.name)
                self.names[local] = MAYBE
                self.imported.append((local, origin))
        elif isinstance(node, ast.Global):
            for name in node.names:
                self.names[name] = self._outside.get(name, MAYBE)
        elif isinstance(node, ast.keyword):
            if node.arg in DOORS:
                self._alone.add("")
        elif isinstance(node, ast.Dict):
            if any(isinstance(k, ast.Constant) and k.value in DOORS for k in node.keys):
                self._alone.add("")
        else:
            triggers.append(node)

    # ---- what names may stand for --------------------------------------------------

    def _note(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            parts = getattr(value, "elts", None)
            for index, element in enumerate(target.elts):
                whole = parts is not None and len(parts) == len(target.elts)
                self._note(element, parts[index] if whole else value)  # type: ignore[index]
        elif isinstance(target, ast.Name):
            weight = self._weight(value)
            if copied_from(value) in self._parameters:
                self._copies.add(target.id)
            if weight == HOLDER and isinstance(value, _LITERALS[:4]):
                if self._foreign_roots(value):
                    self._tables.add(target.id)
            self.names[target.id] = max(self.names.get(target.id, 0), weight)
            if weight == MAYBE:
                origins = {r for r in self._origins(value) if r != target.id}
                self._derived.setdefault(target.id, set()).update(origins)
            giver = part_of(value)
            if giver is not None:
                self._through.setdefault(target.id, set()).add(giver)

    def _is_given(self, name: str) -> bool:
        """Whether a local name stands for a parameter, or for a class in it."""
        todo, seen = [name], {name}
        while todo:
            for giver in self._through.get(todo.pop(), ()):
                if giver in self._parameters:
                    return True
                if giver not in seen:
                    seen.add(giver)
                    todo.append(giver)
        return False

    def _note_loop(self, target: ast.expr, iterated: ast.expr) -> None:
        while (
            isinstance(iterated, ast.Call)
            and isinstance(iterated.func, ast.Name)
            and iterated.func.id in ("list", "tuple", "set", "sorted")
            and iterated.args
        ):
            iterated = iterated.args[0]  # the items are those of what is copied
        if isinstance(target, (ast.Tuple, ast.List)):
            for element in target.elts:
                self._note_loop(element, iterated)
        elif isinstance(target, ast.Name):
            weight = HARMLESS if self._loops_harmlessly(iterated) else MAYBE
            self.names[target.id] = max(self.names.get(target.id, 0), weight)
            if weight == MAYBE:
                origins = {r for r in self._origins(iterated) if r != target.id}
                self._derived.setdefault(target.id, set()).update(origins)

    def _weight(self, value: ast.expr) -> int:
        """How much a value may be a module, a class or a container of others."""
        if isinstance(value, ast.Call):
            func = value.func
            if isinstance(func, ast.Attribute):
                return self._weight_of_method(func)
            if isinstance(func, ast.Name):
                if func.id in _MAKING:
                    giving = func.id == "open" and self._reads_source
                    return MAYBE if giving else HOLDER
                # A class by its spelling: what it makes is an object.
                return HARMLESS if func.id.lstrip("_")[:1].isupper() else MAYBE
            return MAYBE
        if isinstance(value, _LITERALS):
            return HOLDER
        if isinstance(value, ast.BinOp):
            return MAYBE if self._reads_source else HARMLESS
        return HARMLESS if isinstance(value, _PLAIN) else MAYBE

    def _origins(self, value: ast.expr) -> set[str]:
        """The names, or calls, on which it depends what a value is."""
        if isinstance(value, ast.Call):
            func = value.func
            if isinstance(func, ast.Name) and func.id not in _GIVING_NAMES:
                return self._returned(func.id, value)
            if isinstance(func, ast.Attribute) and func.attr not in _GIVING_NAMES:
                if func.attr in ("items", "values", "keys", "get", "pop", "copy"):
                    root = root_of(func.value)
                    if root is None and isinstance(func.value, ast.Call):
                        return self._origins(func.value)
                    return {""} if root is None else {root}
                return self._returned(func.attr, value)
            return {""}
        if isinstance(value, (ast.Name, ast.Attribute, ast.Subscript)):
            root = root_of(value)
            if root is None:
                inner = innermost(value)
                return self._origins(inner) if isinstance(inner, ast.Call) else {""}
            return {root}
        if isinstance(value, ast.BoolOp):
            return set().union(*map(self._origins, value.values))
        if isinstance(value, ast.IfExp):
            return self._origins(value.body) | self._origins(value.orelse)
        if isinstance(value, (ast.Tuple, ast.List, ast.Set)):
            return set().union(*map(self._origins, value.elts))
        if isinstance(value, _PLAIN):
            return set()
        return {""}

    def _returned(self, name: str, call: ast.Call) -> set[str]:
        """On what the result of a call of the project's own depends."""
        found = {RETURNED + name}
        todo = [*call.args, *(k.value for k in call.keywords)]
        for given in todo:
            if isinstance(given, (ast.List, ast.Tuple, ast.Set)):
                todo += given.elts
            elif isinstance(given, ast.Dict):
                todo += given.values
            elif isinstance(given, (ast.Name, ast.Attribute)):
                root = root_of(given)
                if root is not None and root not in self._parameters | self._receivers:
                    found.add(f"{PASSED}{name}:{root}")
        return found

    def _weight_of_method(self, func: ast.Attribute) -> int:
        if func.attr in _GIVING:
            return MAYBE
        root = root_of(func.value)
        if func.attr in _LOOKUPS:
            mine = root is None or root in self._receivers or root in self._parameters
            return HARMLESS if mine else MAYBE
        if func.attr in _GIVING_SOURCE and self._reads_source:
            return MAYBE
        if func.attr in ("split", "partition") and "ersion" in last_of(func.value):
            return MAYBE
        # A function of a module of the project's may give anything.
        if root in self._receivers:
            return MAYBE if self._is_method_call(func) else HARMLESS
        return HARMLESS

    @staticmethod
    def _is_method_call(func: ast.Attribute) -> bool:
        return isinstance(func.value, ast.Name)

    def _loops_harmlessly(self, iterated: ast.expr) -> bool:
        if isinstance(iterated, ast.Call):
            func = iterated.func
            if isinstance(func, ast.Attribute):
                if func.attr in ("items", "values", "keys", "copy"):
                    root = root_of(func.value)
                    if root in self._parameters or root in self._receivers:
                        return True
                    return isinstance(func.value, ast.Call) and self._weight(func.value) == HARMLESS
                return True
            if isinstance(func, ast.Name) and func.id in ("range", "open"):
                return True
            return (
                isinstance(func, ast.Name)
                and func.id in ("enumerate", "zip")
                and all(map(self._loops_harmlessly, iterated.args))
            )
        root = root_of(iterated)
        return root in self._receivers or (root is not None and root in self._parameters)

    def _standing(self, root: str) -> int:
        known = self.names.get(root)
        return self._outside.get(root, MAYBE) if known is None else known

    def _roots(self, name: str) -> set[str]:
        """The names, or calls, on which it depends what a name stands for."""
        found: set[str] = set()
        imported = {local for local, _ in self.imported}
        todo, seen = [name], {name}
        while todo:
            current = todo.pop()
            if not current or current.startswith((RETURNED, PASSED)):
                found.add(current)
                continue
            if current in imported:
                found.add(current)
            derived = self._derived.get(current)
            if derived is not None:
                todo += [r for r in derived if r not in seen]
                seen |= derived
            elif (
                current not in imported
                and current != name
                and (current in self._parameters or current in self._receivers)
            ):
                continue  # the caller knows
            elif current in self._outside:
                if self._outside[current] == MAYBE:
                    found.add(current)
                elif self._outside[current] == HOLDER:
                    found.add("")
            elif current not in imported:
                known = self.names.get(current)
                if known is None or known == MAYBE or (known == HOLDER and current != name):
                    found.add("")
        return found

    def _foreign_roots(self, node: ast.expr) -> set[str]:
        """The names on which it depends whether an argument is something foreign."""
        if isinstance(node, ast.Constant):
            dotted = isinstance(node.value, str) and "." in node.value and " " not in node.value
            return {""} if dotted else set()
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            return set().union(*map(self._foreign_roots, node.elts))
        if isinstance(node, ast.Dict):
            return set().union(*map(self._foreign_roots, node.values))
        if isinstance(node, ast.Starred):
            return self._foreign_roots(node.value)
        if isinstance(node, (ast.Attribute, ast.Name, ast.Subscript)):
            root = root_of(node)
            if root is None:
                inner = innermost(node)
                return self._foreign_roots(inner) if isinstance(inner, ast.Call) else {""}
            if root in self._receivers or root in self._parameters:
                return set()
            return self._roots(root) if self._standing(root) != HARMLESS else set()
        if isinstance(node, ast.Call):
            return self._origins(node) if self._weight(node) == MAYBE else set()
        if isinstance(node, ast.IfExp):
            return self._foreign_roots(node.body) | self._foreign_roots(node.orelse)
        if isinstance(node, ast.BoolOp):
            return set().union(*map(self._foreign_roots, node.values))
        return {""} if isinstance(node, ast.JoinedStr) else set()

    # ---- triggers ------------------------------------------------------------------

    def _trigger(self, node: ast.AST) -> None:
        if isinstance(node, ast.Call):
            self._call(node)
        elif isinstance(node, (ast.Return, ast.Yield)):
            if node.value is not None:
                self._gives |= self._given(node.value)
        elif isinstance(node, (ast.Assign, ast.Delete)):
            for target in node.targets:
                self._target(target)
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            self._target(node.target)

    def _given(self, node: ast.expr) -> set[str]:
        """The functions on which it depends whether a returned value matters."""
        if isinstance(node, ast.Name):
            if node.id in self._functions:
                return {""}
            if node.id in self._parameters and node.id not in self.names:
                return {GIVEN}
            if node.id in self._receivers or self._standing(node.id) == HARMLESS:
                return set()
            if self._standing(node.id) == HOLDER:
                if node.id in self._copies:
                    return {GIVEN}
                return {""} if node.id in self._tables else set()
            return self._given_by(self._roots(node.id))
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            root = root_of(node)
            if root is None:
                inner = innermost(node)
                return self._given(inner) if isinstance(inner, ast.Call) else {""}
            if root in self._receivers or root in self._parameters:
                return set()
            return {""} if self._standing(root) == MAYBE else set()
        if isinstance(node, (ast.Tuple, ast.List)):
            return set().union(*map(self._given, node.elts))
        if isinstance(node, ast.Dict):
            return set().union(*map(self._given, node.values))
        if isinstance(node, ast.Call):
            if self._weight(node) != MAYBE:
                return set()
            return self._given_by(self._origins(node))
        if isinstance(node, ast.IfExp):
            return self._given(node.body) | self._given(node.orelse)
        if isinstance(node, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
            return {""} if _VERSION_TEST.search(ast.unparse(node)) else set()
        if isinstance(node, ast.BinOp):
            return {""} if self._reads_source else set()
        return {""} if isinstance(node, ast.Lambda) else set()

    @staticmethod
    def _given_by(roots: set[str]) -> set[str]:
        """Roots as what a giving function depends on: other functions, or nothing."""
        return {
            r.removeprefix(RETURNED) if r.startswith(RETURNED) else ""
            for r in roots
            if not r.startswith(PASSED)
        }

    def _target(self, target: ast.expr) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for element in target.elts:
                self._target(element)
        elif isinstance(target, ast.Attribute):
            if target.attr not in DESCRIPTIVE:
                self._write(target.value, special=target.attr == "__class__")
        elif isinstance(target, ast.Subscript):
            if isinstance(target.slice, ast.Name) and target.slice.id == "__name__":
                return  # `sys.modules[__name__]`: the module itself
            self._write(target.value, container=True)

    def _write(self, owner: ast.expr, *, special: bool = False, container: bool = False) -> None:
        root = root_of(owner)
        special = special or is_special(owner)
        if root is None:
            # What a call gives may be a module or a class.
            inner = innermost(owner)
            if isinstance(inner, ast.Call) and not special:
                if self._weight(inner) == MAYBE:
                    self._alone |= self._origins(inner)
            elif not isinstance(inner, ast.Constant):
                self._alone.add("")
        elif root in self._receivers:
            if special or root == "cls":
                self._when_called = True
        elif root in self._parameters and root not in self.names:
            self._when_called = True
            self._setter = self._setter or not container
            if special:
                self._alone.add("")
        else:
            standing = self._standing(root)
            if root in self._through and self._is_given(root):
                self._when_called = True
                self._setter = self._setter or not container
            direct = container and isinstance(owner, ast.Name)
            if special:
                self._alone.add("")
            elif standing == MAYBE:
                self._alone |= self._roots(root)
            elif standing == HOLDER and not direct:
                self._alone.add("")

    def _call(self, node: ast.Call) -> None:
        func = node.func
        name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
        if not name:
            return
        if isinstance(func, ast.Attribute):
            base = root_of(func.value)
            own = (
                base is None
                or base in self._receivers
                or (base not in self._parameters and self._standing(base) == MAYBE)
            )
        else:
            own = True
        if own:
            self._called.add(name)
        for argument in node.args:
            # A function that is handed over may be called by whom it is handed to.
            if isinstance(argument, ast.Name):
                self._called.add(argument.id)
        if own:
            for given in (*node.args, *(k.value for k in node.keywords)):
                for root in self._foreign_roots(given):
                    self._called_with.add((name, root))
                base = root_of(given)
                if base is not None and base in self._parameters:
                    self._passed.add(name)
        if name in _SETTERS:
            if node.args:
                self._write(node.args[0])
        elif name == "patch" or (
            name in ("object", "dict", "multiple")
            and isinstance(func, ast.Attribute)
            and last_of(func.value) == "patch"
        ):
            self._alone.add("")
        elif name in _CONTAINER_CALLS:
            self._container_call(func, node)
        elif name in _WRITES:
            if self._reads_source:
                self._alone.add("")
                self._when_called = self._when_called or bool(self._parameters)
                self._setter = self._setter or bool(self._parameters)
        elif REGISTERING.match(name):
            self._registering(func, node)
        elif name in _ALWAYS:
            if name in ("impl", "wrap", "_wrap") and isinstance(func, ast.Attribute):
                base = root_of(func.value)
                if base in self._parameters:
                    self._when_called = self._setter = True
                    return
                if base in self._receivers and name != "impl":
                    return
            self._alone.add("")
        elif name == "setitem":  # of pytest's monkeypatch
            self._alone.add("")

    def _container_call(self, func: ast.expr, node: ast.Call) -> None:
        """``CONTAINER.update(…)``: of the containers of others only those in capitals count."""
        if not isinstance(func, ast.Attribute):
            return
        owner = func.value
        special = is_special(owner)
        root = root_of(owner)
        if root in self._parameters:
            self._when_called = True
            if not special:
                return
        if root in self._receivers and not special:
            return
        if root is not None and not special and self._standing(root) != MAYBE:
            return
        last = last_of(owner)
        stem = last.lstrip("_")
        if (
            special
            or stem.isupper()
            or "registry" in stem.lower()
            or "mapping" in stem.lower()
            or last in ("modules", "environ", "meta_path", "path_hooks")
            or (isinstance(owner, ast.Name) and owner.id in self.names)
        ):
            self._alone |= {""} if root is None or special else self._roots(root) or {root}

    def _registering(self, func: ast.expr, node: ast.Call) -> None:
        if not isinstance(func, ast.Attribute):
            return
        root = root_of(func.value)
        if root in self._receivers:
            return
        if root in self._parameters:
            self._when_called = True
            return
        if root is None:
            self._alone.add("")
        elif self._standing(root) == MAYBE:
            self._alone |= self._roots(root)


_NOTED = frozenset({
    ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.AnnAssign, ast.NamedExpr,
    ast.For, ast.AsyncFor, ast.comprehension, ast.withitem, ast.Import, ast.ImportFrom,
    ast.Global, ast.keyword, ast.Dict, ast.AugAssign, ast.Delete, ast.Return, ast.Yield,
})  # fmt: skip
