"""``unittest.mock.patch`` in its forms, and pytest's ``monkeypatch``."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from patchkit.audit._handlers import Args, Handler, Kwargs
from patchkit.audit._known import (
    dotted_ref,
)
from patchkit.audit._values import (
    UNKNOWN,
    Const,
    Map,
    Ref,
    Result,
    Value,
    options,
)

if TYPE_CHECKING:
    from patchkit.audit._expressions import Frame
    from patchkit.audit._interpreter import Interpreter


_MOCKS = ("unittest.mock.patch", "mock.patch", "mock.mock.patch")


class MockCalls:
    """Models mocks."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self.table: dict[str, Handler] = {}
        for mock in _MOCKS:
            self.table[mock] = self.mock
            self.table[f"{mock}.object"] = self.mock_object
            self.table[f"{mock}.dict"] = self.mock_dict
            self.table[f"{mock}.multiple"] = self.mock_multiple

    def mock(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        target = args[0] if args else kwargs.get("target", UNKNOWN)
        new = args[1] if len(args) > 1 else self._mocked(kwargs)
        for option, guards in options(target):
            if isinstance(option, Const) and isinstance(option.value, str):
                found = dotted_ref(option.value)
                if (
                    found is not None
                    and found.attrs
                    and not self._interpreter.project.is_own(found.root)
                ):
                    owner = Ref(found.module, found.attrs[:-1])
                    before = frame.guards
                    frame.guards = (*before, *guards)
                    self._interpreter.writes.write(
                        owner, found.attrs[-1], new, frame, node, "mock.patch", must_exist=True
                    )
                    frame.guards = before
            else:
                self._interpreter.writes.blind(
                    "dynamic name", frame, node, "the target of patch() is computed at run time"
                )
        return Result(Ref("unittest", ("mock", "_patch")), ())

    @staticmethod
    def _mocked(kwargs: Kwargs) -> Value:
        for name in ("new", "new_callable", "wraps", "side_effect"):
            if name in kwargs:
                return kwargs[name]
        return Result(Ref("unittest", ("mock", "MagicMock")), ())

    def mock_object(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        target = args[0] if args else kwargs.get("target", UNKNOWN)
        name = args[1] if len(args) > 1 else kwargs.get("attribute", UNKNOWN)
        new = args[2] if len(args) > 2 else self._mocked(kwargs)
        self._interpreter.calls.attributes.set_on(
            target, name, new, frame, node, "mock.patch.object"
        )
        return Result(Ref("unittest", ("mock", "_patch")), ())

    def mock_dict(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        target = args[0] if args else kwargs.get("in_dict", UNKNOWN)
        values = args[1] if len(args) > 1 else kwargs.get("values", UNKNOWN)
        if isinstance(target, Const) and isinstance(target.value, str):
            target = dotted_ref(target.value) or UNKNOWN
        pairs = values.items if isinstance(values, Map) else ((UNKNOWN, UNKNOWN),)
        extra = tuple(
            (Const(k), v) for k, v in kwargs.items() if k not in ("in_dict", "values", "clear")
        )
        for key, value in (*pairs, *extra) if isinstance(values, Map) or not extra else extra:
            self._interpreter.writes.write_item(
                target, key, value, frame, node, None, "mock.patch.dict"
            )
        return Result(Ref("unittest", ("mock", "_patch")), ())

    def mock_multiple(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        target = args[0] if args else kwargs.get("target", UNKNOWN)
        if isinstance(target, Const) and isinstance(target.value, str):
            target = dotted_ref(target.value) or UNKNOWN
        for name, value in kwargs.items():
            if name not in ("target", "spec", "create", "spec_set", "autospec", "new_callable"):
                self._interpreter.calls.attributes.set_on(
                    target, Const(name), value, frame, node, "mock.patch.multiple"
                )
        return Result(Ref("unittest", ("mock", "_patch")), ())

    def monkeypatch(
        self, name: str, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST
    ) -> Value:
        if name == "setattr" and len(args) == 2:
            self.mock((args[0], args[1]), kwargs, frame, node)
        elif name == "setattr" and len(args) > 2:
            self._interpreter.calls.attributes.set_on(
                args[0], args[1], args[2], frame, node, "monkeypatch"
            )
        elif name == "setitem" and len(args) > 2:
            self._interpreter.writes.write_item(args[0], args[1], args[2], frame, node)
        return UNKNOWN
