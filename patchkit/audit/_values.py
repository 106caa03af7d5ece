"""What a name or an expression of the audited project may stand for.

The audit never runs the project. It follows names through its modules and keeps, for
each, one of the values below: a place in a foreign package, something the project
defines itself, a constant, or nothing known.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from patchkit.audit._scopes import ModuleState, Scope


@dataclass(frozen=True, slots=True)
class Unknown:
    """Nothing is known; `text` is the source, for messages."""

    text: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of a project function that is looked at without a call."""

    name: str
    annotation: Value | None = None


@dataclass(frozen=True, slots=True)
class Const:
    """A constant."""

    value: str | bytes | int | float | complex | bool | None


@dataclass(frozen=True, slots=True)
class Seq:
    """A list, tuple or set whose length is known."""

    items: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Map:
    """A dict whose keys are known."""

    items: tuple[tuple[Value, Value], ...]


@dataclass(frozen=True, slots=True)
class Ref:
    """A place in a package that is not the project's.

    Attributes:
        module: The part of the path that is certainly a module.
        attrs: The rest: submodules, then names. Where one ends and the other begins
            is decided later, against the version that is asked about.
    """

    module: str
    attrs: tuple[str, ...] = ()

    @property
    def root(self) -> str:
        return self.module.partition(".")[0]

    @property
    def dotted(self) -> str:
        return ".".join((self.module, *self.attrs))

    def child(self, name: str) -> Ref:
        return Ref(self.module, (*self.attrs, name))


@dataclass(frozen=True, slots=True)
class Item:
    """An entry of a foreign container."""

    owner: Ref
    key: Value


@dataclass(frozen=True, slots=True)
class OwnModule:
    """A module of the project."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Func:
    """A function of the project, compared by identity.

    Attributes:
        module: The module that defines it.
        qualname: Its qualified name.
        node: Its definition.
        scope: The scope around it.
        owner: The class around it, if any.
        decorators: What its decorators stand for, outermost first.
    """

    module: ModuleState
    qualname: str
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: Scope
    owner: Klass | None = None
    decorators: tuple[Value, ...] = ()

    def __repr__(self) -> str:
        return f"<Func {self.reference}>"

    @property
    def reference(self) -> str:
        return f"{self.module.name}:{self.qualname}"

    @property
    def local(self) -> bool:
        """Whether no import can reach it."""
        return "<locals>" in self.qualname or "<lambda>" in self.qualname

    def last_decorators(self) -> set[str]:
        return {last_name(d) for d in self.decorators}


@dataclass(frozen=True, slots=True, eq=False)
class Klass:
    """A class of the project, compared by identity."""

    module: ModuleState
    qualname: str
    node: ast.ClassDef
    scope: Scope
    bases: tuple[Value, ...] = ()

    def __repr__(self) -> str:
        return f"<Klass {self.reference}>"

    @property
    def reference(self) -> str:
        return f"{self.module.name}:{self.qualname}"

    @property
    def local(self) -> bool:
        return "<locals>" in self.qualname


@dataclass(frozen=True, slots=True)
class Inst:
    """An instance of a class."""

    cls: Value
    args: tuple[Value, ...] = ()
    kwargs: tuple[tuple[str, Value], ...] = ()


@dataclass(frozen=True, slots=True)
class Bound:
    """A function of the project with its first argument filled in."""

    func: Func
    self: Value


@dataclass(frozen=True, slots=True)
class Result:
    """What a call returned that could not be followed."""

    func: Value
    args: tuple[Value, ...] = ()
    kwargs: tuple[tuple[str, Value], ...] = ()


@dataclass(frozen=True, slots=True)
class Somewhere:
    """Something in a module whose name is known at run time only.

    Attributes:
        within: The module or class, where that is known, and only the name in it is not.
    """

    within: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class DictOf:
    """The ``__dict__`` of something."""

    owner: Value


@dataclass(frozen=True, slots=True)
class ClassOf:
    """The class of an object whose class is not known."""

    owner: Value
    text: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Version:
    """The version of a package, as a string, a parsed version or a tuple."""

    package: str
    form: str = "str"


@dataclass(frozen=True, slots=True)
class VersionPart:
    """Some part of a version: ``.major``, ``[:2]`` …"""

    of: Version
    part: str


@dataclass(frozen=True, slots=True)
class ParsedVersion:
    """``Version("0.30")``."""

    text: str


@dataclass(frozen=True, slots=True)
class Specifiers:
    """``SpecifierSet(">=0.30")``."""

    text: str


@dataclass(frozen=True, slots=True)
class FilePath:
    """A file or folder of an installed package; `parts` are relative to the package."""

    package: str
    parts: tuple[str, ...] = ()

    @property
    def relative(self) -> str:
        return "/".join((self.package, *self.parts))

    def join(self, *more: str) -> FilePath:
        parts = list(self.parts)
        for piece in more:
            for part in piece.replace("\\", "/").split("/"):
                if part == "..":
                    if not parts:
                        return self  # outside of the package: nothing of ours any more
                    parts.pop()
                elif part and part != ".":
                    parts.append(part)
        return FilePath(self.package, tuple(parts))

    def parent(self) -> FilePath:
        return FilePath(self.package, self.parts[:-1])


@dataclass(frozen=True, slots=True)
class Edit:
    """One replacement in a text: by a string or by a regular expression."""

    anchor: str
    replacement: str | None = None
    regex: bool = False
    line: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Source:
    """The text of a file of an installed package, or of one function, after edits."""

    origin: FilePath | Ref
    edits: tuple[Edit, ...] = ()
    lines: bool = False


@dataclass(frozen=True, slots=True)
class Handle:
    """An open file of an installed package."""

    path: FilePath
    writable: bool


@dataclass(frozen=True, slots=True)
class Cond:
    """A condition: an operation over values and conditions.

    `op` is a comparison (``==``, ``<`` …, ``in``), ``and``, ``or``, ``not``,
    ``hasattr``, ``held`` (what ``getattr(place, name, None)`` found), ``importable``,
    ``startswith`` or ``contains``.
    """

    op: str
    args: tuple[Value, ...]
    syntax: ast.AST | str = field(default="", compare=False, repr=False)

    @property
    def text(self) -> str:
        """The condition in words; written out only when somebody asks."""
        return _written(self.syntax)


@dataclass(frozen=True, slots=True)
class Either:
    """One of several values, each with the guards under which it was bound."""

    options: tuple[tuple[Value, tuple[Guard, ...]], ...]


@dataclass(frozen=True, slots=True)
class Guard:
    """One branch of a test in the project's source.

    Attributes:
        cond: What has to be true.
        site: Identity of the statement that branches.
        branch: Which of its branches this is: two branches of one site exclude
            each other.
        test: The source of the test, or its syntax.
        line: Its line.
        file: Its file.
        kind: "if", "try", "except", or "choice": one entry of a table whose key is known
            at run time only.
    """

    cond: Value = field(compare=False)
    site: int
    branch: int
    test: ast.AST | str = field(compare=False, repr=False)
    line: int = field(default=0, compare=False)
    file: str = field(default="", compare=False)
    kind: str = field(default="if", compare=False)
    negated: bool = field(default=False, compare=False)

    @property
    def text(self) -> str:
        """The test in words; written out only when somebody asks."""
        text = _written(self.test)
        return f"not ({text})" if self.negated else text


def _written(code: ast.AST | str) -> str:
    try:
        return code if isinstance(code, str) else ast.unparse(code)
    except RecursionError:
        return "a condition that nests too deeply to be written out"


Value: TypeAlias = (
    Unknown | Param | Const | Seq | Map | Ref | Item | OwnModule | Func | Klass | Inst | Bound
    | Result | DictOf | ClassOf | Version | VersionPart | ParsedVersion | Specifiers | FilePath
    | Source | Handle | Cond | Either | Somewhere
)  # fmt: skip

UNKNOWN = Unknown()
# So many values are kept for one name; what has more is a table of settings.
_ALTERNATIVES = 24
NONE = Const(None)


def shared(first: tuple[Guard, ...], second: tuple[Guard, ...]) -> int:
    """How many guards two paths have in common before they part."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if a is not b and a != b:
            break
        count += 1
    return count


def exclusive(first: tuple[Guard, ...], second: tuple[Guard, ...]) -> bool:
    """Whether no run can be under both."""
    if not first or not second:
        return False
    common = shared(first, second)
    mine, others = first[common:], second[common:]
    if not mine or not others:
        return False
    branches = {g.site: g.branch for g in mine}
    return any(branches.get(g.site, g.branch) != g.branch for g in others)


def contradict(first: tuple[Guard, ...], second: tuple[Guard, ...]) -> bool:
    """Whether two paths test one name and want different answers.

    The name may have been bound again in between, so this only ranks alternatives.
    """
    wanted = {
        g.test.id: g.negated for g in first if g.kind == "if" and isinstance(g.test, ast.Name)
    }
    return any(
        isinstance(g.test, ast.Name)
        and g.kind == "if"
        and wanted.get(g.test.id, g.negated) != g.negated
        for g in second
    )


def beyond(guards: tuple[Guard, ...], known: tuple[Guard, ...]) -> tuple[Guard, ...]:
    """The guards that are not among those that are known to hold."""
    if not guards:
        return ()
    rest = guards[shared(guards, known) :]
    return tuple(g for g in rest if g not in known) if rest else ()


def options(value: Value) -> list[tuple[Value, tuple[Guard, ...]]]:
    """The values that `value` may be, flattened."""
    if isinstance(value, Either):
        return [
            (inner, (*guards, *more))
            for option, guards in value.options
            for inner, more in options(option)
        ]
    return [(value, ())]


def either(found: list[tuple[Value, tuple[Guard, ...]]]) -> Value:
    """One value out of several."""
    flat: list[tuple[Value, tuple[Guard, ...]]] = []
    for value, guards in found:
        for inner, more in options(value):
            entry = (inner, (*guards, *more))
            if entry not in flat and _consistent(entry[1]):
                flat.append(entry)
    if not flat:
        return UNKNOWN
    if len(flat) == 1 and not flat[0][1]:
        return flat[0][0]
    return Either(tuple(flat[:_ALTERNATIVES]))


def _consistent(guards: tuple[Guard, ...]) -> bool:
    """Whether no table was asked for two of its entries at once."""
    chosen: dict[int, int] = {}
    return all(
        g.kind != "choice" or chosen.setdefault(g.site, g.branch) == g.branch for g in guards
    )


def first_of(value: Value, kind: type) -> Value | None:
    """The first option that is of a kind."""
    return next((v for v, _ in options(value) if isinstance(v, kind)), None)


def names_module(value: Value) -> bool:
    """Whether a value is a module whose name is known at run time only."""
    return (
        isinstance(value, Result)
        and isinstance(value.func, Ref)
        and value.func.dotted in ("importlib.import_module", "sys.modules")
    )


def last_name(value: Value) -> str:
    """The last name of what a value stands for, or the empty string."""
    if isinstance(value, Ref):
        return value.attrs[-1] if value.attrs else value.module.rpartition(".")[2]
    if isinstance(value, (Func, Klass)):
        return value.qualname.rpartition(".")[2]
    if isinstance(value, Result):
        return last_name(value.func)
    if isinstance(value, Bound):
        return last_name(value.func)
    if isinstance(value, Inst):
        return last_name(value.cls)
    return ""


def constant(value: Value) -> object:
    """The Python object behind constants and sequences of them; raises ValueError else."""
    if isinstance(value, Const):
        return value.value
    if isinstance(value, Seq):
        return tuple(constant(v) for v in value.items)
    raise ValueError("not a constant")
