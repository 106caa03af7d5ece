"""What the walk through the project's code comes upon, before any version is asked about."""

from __future__ import annotations

from dataclasses import dataclass, field

from patchkit.audit._scopes import ModuleState
from patchkit.audit._values import Edit, FilePath, Func, Guard, Item, Ref, Value


@dataclass(frozen=True, slots=True)
class Place:
    """A position in the project."""

    file: str
    line: int
    column: int = 0
    end_line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True, eq=False)
class Sighting:
    """One write to something foreign.

    Attributes:
        form: How it is written: "assignment", "setattr", "mock.patch", "wrapt" …
        action: What it does: "replace", "wrap", "value", "register", "dispatch",
            "delete", "class-swap", "module", "rewrite".
        target: What is written to.
        key: The entry of a registry, or the dispatch key.
        replacement: What is written.
        place: Where it stands; for a helper's write, where the helper is called.
        function: The function it stands in, None at the module's top.
        module: The module it stands in.
        guards: The tests it stands under.
        through: Where the helper writes, when a helper does.
        before_call: How many of the guards stand outside of the helper.
        edits: For source rewriting, the replacements.
        must_exist: Whether the way it is written fails when the target is absent.
        of_subclass: Whether the class written to may be any subclass of the one named.
    """

    form: str
    action: str
    target: Ref | Item | FilePath
    replacement: Value
    place: Place
    module: ModuleState
    function: Func | None
    guards: tuple[Guard, ...]
    key: str | None = None
    through: Place | None = None
    before_call: int | None = None
    edits: tuple[Edit, ...] = ()
    must_exist: bool = False
    of_subclass: bool = False


@dataclass(frozen=True, slots=True)
class BlindSpot:
    """Something that may patch and that static reading cannot follow."""

    kind: str
    place: Place
    text: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class CallEdge:
    """A call of one project function from another, or from a module's top."""

    caller: Func | None
    module: ModuleState
    callee: Func
    guards: tuple[Guard, ...]


@dataclass(frozen=True, slots=True)
class Door:
    """An entry point through which other processes come into the project.

    Attributes:
        group: ``vllm.general_plugins``, ``worker_process_setup_hook`` …
        name: The name of the entry, where it has one.
        target: What it names, ``module:function`` or a module.
        place: Where it is declared.
    """

    group: str
    name: str
    target: str
    place: Place


@dataclass(slots=True)
class Findings:
    """Everything one walk came upon."""

    sightings: list[Sighting] = field(default_factory=list)
    blind_spots: list[BlindSpot] = field(default_factory=list)
    edges: list[CallEdge] = field(default_factory=list)
    imports: set[tuple[str, str]] = field(default_factory=set)
    doors: list[Door] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
