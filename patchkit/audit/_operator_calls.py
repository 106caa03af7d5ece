"""``torch.library``: implementations of operators."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from patchkit.audit._handlers import Args, Handler, Kwargs
from patchkit.audit._known import (
    EXISTING_NAMESPACES,
    is_code,
)
from patchkit.audit._values import (
    UNKNOWN,
    Const,
    Func,
    Inst,
    Ref,
    Result,
    Seq,
    Value,
    last_name,
)

if TYPE_CHECKING:
    from patchkit.audit._expressions import Frame
    from patchkit.audit._interpreter import Interpreter


class OperatorCalls:
    """Models operator registrations."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self.table: dict[str, Handler] = {
            "torch.library.Library": self.library,
            "torch.library.define": self.define_operator,
            "torch.library.custom_op": self.define_operator,
            "torch.library.triton_op": self.define_operator,
            "torch.library.impl": self.library_impl,
            "torch.library.register_kernel": self.library_impl,
            "torch.library.register_autograd": self.library_impl,
        }  # fmt: skip
        self.own_namespaces: set[str] = set()

    def library(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if len(args) > 1 and isinstance(args[0], Const) and args[1] == Const("DEF"):
            self.own_namespaces.add(str(args[0].value))
        return Inst(Ref("torch", ("library", "Library")), args)

    def define_operator(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if args and isinstance(args[0], Const) and isinstance(args[0].value, str):
            namespace = args[0].value.partition("::")[0]
            if namespace not in EXISTING_NAMESPACES:
                self.own_namespaces.add(namespace)
        return Result(Ref("torch", ("library", "define")), args)

    def library_impl(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
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
            self.dispatch(args, kwargs, given, frame, node)
            return UNKNOWN
        kind = "register_kernel" if name == "register_kernel" else "impl"
        return Result(Ref("torch", ("library", kind)), args, tuple(kwargs.items()))

    def dispatch(
        self, args: Args, kwargs: Kwargs, function: Value, frame: Frame, node: ast.AST
    ) -> None:
        """``torch.library.impl("ns::op" or lib, …)`` and its like."""
        namespace, rest = "", args
        if args and isinstance(args[0], Inst):  # a Library object
            namespace = _namespace(args[0])
            rest = args[1:]
        operator = rest[0] if rest else kwargs.get("qualname", kwargs.get("op", UNKNOWN))
        self.operator(
            self._operator_ref(operator, namespace), function, dispatch_key(rest[1:]) or
            dispatch_key(tuple(kwargs.values())), frame, node,
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

    def operator(
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
        self._interpreter.writes.emit(
            frame, node, "torch.library", "dispatch", target, function, key=key or None,
            must_exist=True,
        )  # fmt: skip

    def library_method(
        self, base: Inst, name: str, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST
    ) -> Value:
        if name == "define" and args:
            namespace = _namespace(base)
            if namespace and namespace not in EXISTING_NAMESPACES:
                self.own_namespaces.add(namespace)
        elif name == "impl" and len(args) + len(kwargs) > 1:
            operator = args[0] if args else kwargs.get("op_name", UNKNOWN)
            function = args[1] if len(args) > 1 else kwargs.get("fn", UNKNOWN)
            key = dispatch_key(args[2:]) or dispatch_key(tuple(kwargs.values()))
            if not key and len(base.args) > 2:
                key = dispatch_key(base.args[2:])
            target = self._operator_ref(operator, _namespace(base))
            self.operator(target, function, key, frame, node)
        return UNKNOWN


def _namespace(library: Inst) -> str:
    first = library.args[0] if library.args else UNKNOWN
    return str(first.value) if isinstance(first, Const) else ""


def dispatch_key(args: Args) -> str:
    for value in args:
        if isinstance(value, Const) and isinstance(value.value, str):
            return value.value
        if isinstance(value, Ref) and "DispatchKey" in value.dotted:
            return value.attrs[-1]
        if isinstance(value, Seq):
            found = dispatch_key(value.items)
            if found:
                return found
    return ""
