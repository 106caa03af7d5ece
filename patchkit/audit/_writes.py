"""Writes: which of them change something foreign, and what is noted of them."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from patchkit.audit._known import DOORS, is_code, is_plain, is_setting
from patchkit.audit._markers import out_of_a_stash
from patchkit.audit._sightings import BlindSpot, Place, Sighting
from patchkit.audit._values import (
    NONE,
    UNKNOWN,
    Bound,
    ClassOf,
    Const,
    DictOf,
    Edit,
    FilePath,
    Func,
    Guard,
    Inst,
    Item,
    Klass,
    OwnModule,
    Param,
    Ref,
    Result,
    Somewhere,
    Unknown,
    Value,
    beyond,
    either,
    exclusive,
    last_name,
    names_module,
    options,
)

if TYPE_CHECKING:
    from patchkit.audit._expressions import Frame
    from patchkit.audit._interpreter import Interpreter

# Methods that Python looks up on the class: what gets one is a class.
_ONLY_ON_CLASSES = frozenset({
    "__init__", "__new__", "__call__", "__post_init__", "__init_subclass__", "__del__",
    "__getattr__", "__getattribute__", "__setattr__", "__delattr__", "__get__", "__set__",
    "__len__", "__bool__", "__getitem__", "__setitem__", "__contains__", "__iter__", "__next__",
    "__enter__", "__exit__", "__eq__", "__hash__", "__repr__", "__reduce__",
})  # fmt: skip


class Writes:
    """Judges writes and notes them."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter

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
                if name == "__code__" and option.attrs:
                    # The function itself does something else from now on.
                    self.emit(frame, node, form, "replace", option, value, guards=guards)
                    continue
                if name in ("__dict__", "__defaults__", "__kwdefaults__") or is_setting(
                    option, name, value
                ):
                    continue
                if option.dotted == "builtins" and name == "__import__":
                    self.blind(
                        "import hook", frame, node,
                        "what replaces __import__ may change any module as it is loaded",
                    )  # fmt: skip
                self.emit(
                    frame, node, form, action or self._action(value), option.child(name), value,
                    guards=guards, must_exist=must_exist,
                )  # fmt: skip
            elif name == "__class__":
                self._swap(option, value, guards, frame, node, form)
            elif isinstance(option, Somewhere) and option.within and not is_code(value):
                continue  # most likely an object's own attribute
            elif isinstance(option, (Somewhere, Item)):
                if not is_plain(value) if isinstance(option, Item) else _matters(name, value):
                    self._write_somewhere(option, name, frame, node)
            elif name in _ONLY_ON_CLASSES and isinstance(option, (Unknown, Param, Result)):
                if any(isinstance(v, (Func, Bound)) for v, _ in options(value)):
                    self.blind(
                        "class of an object", frame, node,
                        f"a class that is known at run time only gets {name}",
                    )  # fmt: skip
            elif isinstance(option, Inst) and isinstance(option.cls, Ref):
                continue  # one object's own attribute: other objects are not affected
            elif isinstance(option, ClassOf):
                self._write_to_class(option, name, value, guards, frame, node, form)
            elif names_module(option) and _matters(name, value):
                self.blind(
                    "dynamic module", frame, node,
                    f"the module that gets {name!r} is computed at run time",
                )  # fmt: skip

    def _write_somewhere(
        self, owner: Somewhere | Item, name: str, frame: Frame, node: ast.AST
    ) -> None:
        if isinstance(owner, Item):
            self.blind(
                "class of an object", frame, node,
                f"what gets {name!r} is an entry of {owner.owner.dotted}, known at run time only",
            )  # fmt: skip
        elif owner.within:
            self.blind(
                "dynamic name", frame, node,
                f"what gets {name!r} is in {owner.within}, under a name known at run time only",
            )  # fmt: skip
        else:
            self.blind(
                "dynamic module", frame, node,
                f"what gets {name!r} is in a module that is known at run time only",
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
                value, guards=guards, of_subclass=True,
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
                elif names_module(option.owner) or isinstance(option.owner, Somewhere):
                    self._write_somewhere(Somewhere(), "a name", frame, node)
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
            if isinstance(option, Ref) and option.dotted == "builtins":
                # `__builtins__["name"] = value`
                if isinstance(index, Const) and isinstance(index.value, str):
                    self.write(option, index.value, value, frame, node, "__dict__")
                continue
            if not isinstance(option, Ref) or not option.attrs:
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
                if self._interpreter.project.is_own(name.value):
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

    def setting(self, name: Value, value: Value) -> None:
        """An environment variable that the project sets."""
        if isinstance(name, Const) and isinstance(name.value, str):
            text = str(value.value) if isinstance(value, Const) else "?"
            self._interpreter.found.settings[name.value] = text

    def note_door(self, name: str, value: Value, frame: Frame, node: ast.AST) -> None:
        """A hook for workers that is set in a dict."""
        self._interpreter.calls.door(name, value, frame, node)

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
        of_subclass: bool = False,
    ) -> None:
        """Note a write to something foreign."""
        if not isinstance(target, (Ref, Item, FilePath)):
            return
        root = (
            target.package
            if isinstance(target, FilePath)
            else (target.owner.root if isinstance(target, Item) else target.root)
        )
        if self._interpreter.project.is_own(root) or root == "__main__":
            return
        if isinstance(target, Ref) and _gives_back(target, replacement):
            return
        if isinstance(replacement, Unknown) and out_of_a_stash(node):
            return
        replacement = _narrowed(replacement, guards)
        raw = self.place(frame, node)
        self._interpreter.found.sightings.append(
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
                of_subclass=of_subclass,
            )
        )

    def blind(self, kind: str, frame: Frame, node: ast.AST, reason: str) -> None:
        """Note something that cannot be followed."""
        spot = BlindSpot(
            kind,
            self.place(frame, node),
            frame.module.line_text(getattr(node, "lineno", 0)),
            reason,
        )
        if spot not in self._interpreter.found.blind_spots:
            self._interpreter.found.blind_spots.append(spot)


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
                isinstance(place, FilePath) and ".".join((place.package, *place.parts)) == name
                for place in spec.args
            )
            for argument in v.args
            for spec, _ in options(argument)
        )
        for v, _ in options(value)
    )


def _gives_back(target: Ref, value: Value) -> bool:
    """Whether a write only puts the original back."""
    found = [v for v, _ in options(value)]
    for index, one in enumerate(found):
        # `classmethod(original)`, where the original came from `Class.name.__func__`
        if isinstance(one, Result) and last_name(one) in ("classmethod", "staticmethod"):
            found[index] = one.args[0] if one.args else one
    return bool(found) and all(isinstance(v, Ref) and v.dotted == target.dotted for v in found)


def _narrowed(value: Value, guards: tuple[Guard, ...]) -> Value:
    """What of a value is left where the same table gave something else: the same entry's."""
    chosen = {g.site: g.branch for g in guards if g.kind == "choice"}
    if not chosen:
        return value
    kept = [
        (v, more)
        for v, more in options(value)
        if all(g.kind != "choice" or chosen.get(g.site, g.branch) == g.branch for g in more)
    ]
    return either(kept) if kept else value


def _matters(name: str, value: Value) -> bool:
    """Whether a write into a module that is not known may be a patch: no note of one's own."""
    if any(v in (NONE, Const(True), Const(False)) for v, _ in options(value)):
        return not name.startswith("_")
    return not is_plain(value)


def _own_module_name(value: Value, frame: Frame) -> bool:
    return isinstance(value, Unknown) and value.text == "__name__"


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
