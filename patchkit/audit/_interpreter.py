"""The walk through a project: what is known on the way, and the parts that know how.

Each module is walked once at its top, and each of its functions that may patch once by
itself. A function of the project that is *called* with something known is walked again
for that call, so that helpers such as ``patch(target, name, new)`` are seen through.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

from patchkit.audit._calls import Calls
from patchkit.audit._definitions import Definitions
from patchkit.audit._expressions import Evaluator, Frame
from patchkit.audit._imports import Imports
from patchkit.audit._inlining import Inlining
from patchkit.audit._names import Names
from patchkit.audit._prescan import may_patch
from patchkit.audit._project import Project, SourceFile
from patchkit.audit._scopes import ModuleState, Scope
from patchkit.audit._sightings import Findings
from patchkit.audit._statements import Statements
from patchkit.audit._values import Func
from patchkit.audit._writes import Writes


class Interpreter:
    """Walks a project.

    Attributes:
        project: The files.
        found: What was come upon.
        known_modules: Foreign names that are imported as modules.
        helper_names: Functions that patch what they are given.
        giver_names: Functions whose result may matter; the empty string stands for what
            needs none.
        passing_names: Functions that return what they are given.
        foreign_names: Top-level names that the project imports from elsewhere.
        possible: Whether a name of a module may stand for something foreign.
    """

    def __init__(self, project: Project) -> None:
        self.project = project
        self.found = Findings()
        self.known_modules: set[str] = set()
        self.helper_names: set[str] = set()
        self.giver_names: set[str] = {""}
        self.passing_names: set[str] = set()
        self.foreign_names: set[str] = set()
        self.possible: Callable[[ModuleState, str], bool] = lambda module, root: True
        self._states: dict[str, ModuleState | None] = {}
        self._walked: set[Func] = set()
        self.names = Names(self)
        self.imports = Imports(self)
        self.definitions = Definitions(self)
        self.inlining = Inlining(self)
        self.writes = Writes(self)
        self.calls = Calls(self)
        self.evaluator = Evaluator(self)
        self.statements = Statements(self)

    def close(self) -> None:
        """Let go of everything that was walked."""
        for state in self._states.values():
            if state is not None:
                state.functions.clear()
                state.scope.names.clear()
                state.tree.body.clear()
        for kept in (
            self._states, self._walked, self.inlining.memo, self.definitions.def_guards,
            self.definitions.class_scopes, self.names.instance_values, self.names.instances_read,
        ):  # fmt: skip
            kept.clear()
        self.found = Findings()

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
        self.statements.body(state.tree.body, frame)
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
            if func not in self._walked and may_patch(func.node, helpers, patching, possible):
                self._walked.add(func)
                self._standalone(func)

    def _standalone(self, func: Func) -> None:
        scope = Scope("function", func.scope)
        frame = Frame(
            func.module, scope, func, self.definitions.def_guards.get(func, ()), stack=(func.node,)
        )
        self.definitions.bind_unknown(func, scope, frame)
        if isinstance(func.node, ast.Lambda):
            self.evaluator.value(func.node.body, frame)
        else:
            self.statements.body(func.node.body, frame)
