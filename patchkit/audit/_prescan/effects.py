"""The second time over what may patch: what each write and each call depends on."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from patchkit.audit._known import DESCRIPTIVE, REGISTERING, WRAPPING_CALLS
from patchkit.audit._prescan.looks import Looked
from patchkit.audit._prescan.names import HOLDER, MAYBE, Names
from patchkit.audit._prescan.origins import foreign, given_back, origins
from patchkit.audit._prescan.syntax import innermost, is_special, last_of, root_of
from patchkit.audit._prescan.weights import weight

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


def effects(triggers: Iterable[ast.AST], names: Names) -> Looked:
    """What the nodes that may patch come to."""
    found = _Effects(names)
    for node in triggers:
        found.note(node)
    return Looked(
        frozenset(found.alone),
        found.when_called,
        found.setter,
        frozenset(found.called),
        frozenset(found.called_with),
        frozenset(found.passed),
        frozenset(found.gives),
    )


class _Effects:
    """What has been come upon so far; the attributes are those of `Looked`."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self.alone: set[str] = set()
        self.when_called = False
        self.setter = False
        self.called: set[str] = set()
        self.called_with: set[tuple[str, str]] = set()
        self.passed: set[str] = set()
        self.gives: set[str] = set()

    def note(self, node: ast.AST) -> None:
        if isinstance(node, ast.Call):
            self._call(node)
        elif isinstance(node, (ast.Return, ast.Yield)):
            if node.value is not None:
                self.gives |= given_back(node.value, self._names)
        elif isinstance(node, (ast.Assign, ast.Delete)):
            for target in node.targets:
                self._target(target)
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            self._target(node.target)
        elif isinstance(node, (ast.keyword, ast.Dict)):
            self.alone.add("")  # a door for workers

    # ---- writes ----------------------------------------------------------------------

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
        names = self._names
        root = root_of(owner)
        special = special or is_special(owner)
        if root is None:
            # What a call gives may be a module or a class.
            inner = innermost(owner)
            if isinstance(inner, ast.Call) and not special:
                if weight(inner, names) == MAYBE:
                    self.alone |= origins(inner, names)
            elif not isinstance(inner, ast.Constant):
                self.alone.add("")
        elif root in names.receivers:
            if special or root == "cls":
                self.when_called = True
        elif root in names.parameters and root not in names.weights:
            self.when_called = True
            self.setter = self.setter or not container
            if special:
                self.alone.add("")
        else:
            standing = names.standing(root)
            if root in names.through and names.is_given(root):
                self.when_called = True
                self.setter = self.setter or not container
            direct = container and isinstance(owner, ast.Name)
            if special:
                self.alone.add("")
            elif standing == MAYBE:
                self.alone |= names.roots(root)
            elif standing == HOLDER and not direct:
                self.alone.add("")

    # ---- calls -----------------------------------------------------------------------

    def _call(self, node: ast.Call) -> None:
        func = node.func
        name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
        if not name:
            return
        self._handed_on(name, func, node)
        if name in _SETTERS:
            if node.args:
                self._write(node.args[0])
        elif name == "patch" or (
            name in ("object", "dict", "multiple")
            and isinstance(func, ast.Attribute)
            and last_of(func.value) == "patch"
        ):
            self.alone.add("")
        elif name in _CONTAINER_CALLS:
            self._container_call(func)
        elif name in _WRITES:
            if self._names.reads_source:
                self.alone.add("")
                self.when_called = self.when_called or bool(self._names.parameters)
                self.setter = self.setter or bool(self._names.parameters)
        elif REGISTERING.match(name):
            self._registering(func)
        elif name in _ALWAYS:
            self._patching_call(name, func)
        elif name == "setitem":  # of pytest's monkeypatch
            self.alone.add("")

    def _handed_on(self, name: str, func: ast.expr, node: ast.Call) -> None:
        """What a function of the project's, if it is one, is called with."""
        names = self._names
        if isinstance(func, ast.Attribute):
            base = root_of(func.value)
            own = (
                base is None
                or base in names.receivers
                or (base not in names.parameters and names.standing(base) == MAYBE)
            )
        else:
            own = True
        if own:
            self.called.add(name)
        for argument in node.args:
            # A function that is handed over may be called by whom it is handed to.
            if isinstance(argument, ast.Name):
                self.called.add(argument.id)
        if own:
            for argument in (*node.args, *(k.value for k in node.keywords)):
                for root in foreign(argument, names):
                    self.called_with.add((name, root))
                base = root_of(argument)
                if base is not None and base in names.parameters:
                    self.passed.add(name)

    def _patching_call(self, name: str, func: ast.expr) -> None:
        """A call that patches, unless it is a method of the caller's or of one's own object."""
        if name in ("impl", "wrap", "_wrap") and isinstance(func, ast.Attribute):
            base = root_of(func.value)
            if base in self._names.parameters:
                self.when_called = self.setter = True
                return
            if base in self._names.receivers and name != "impl":
                return
        self.alone.add("")

    def _container_call(self, func: ast.expr) -> None:
        """``CONTAINER.update(…)``: of the containers of others only those in capitals count."""
        if not isinstance(func, ast.Attribute):
            return
        names = self._names
        owner = func.value
        special = is_special(owner)
        root = root_of(owner)
        if root in names.parameters:
            self.when_called = True
            if not special:
                return
        if root in names.receivers and not special:
            return
        if root is not None and not special and names.standing(root) != MAYBE:
            return
        last = last_of(owner)
        stem = last.lstrip("_")
        if (
            special
            or stem.isupper()
            or "registry" in stem.lower()
            or "mapping" in stem.lower()
            or last in ("modules", "environ", "meta_path", "path_hooks")
            or (isinstance(owner, ast.Name) and owner.id in names.weights)
        ):
            self.alone |= {""} if root is None or special else names.roots(root) or {root}

    def _registering(self, func: ast.expr) -> None:
        if not isinstance(func, ast.Attribute):
            return
        names = self._names
        root = root_of(func.value)
        if root in names.receivers:
            return
        if root in names.parameters:
            self.when_called = True
            return
        if root is None:
            self.alone.add("")
        elif names.standing(root) == MAYBE:
            self.alone |= names.roots(root)
