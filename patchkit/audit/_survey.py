"""From a folder to everything in it that writes to foreign names."""

from __future__ import annotations

import ast
import gc
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path

from patchkit.audit._doors import declared_doors
from patchkit.audit._interpreter import Interpreter
from patchkit.audit._known import EXISTING_NAMESPACES
from patchkit.audit._markers import OwnNames
from patchkit.audit._prescan import GIVEN, PASSED, RETURNED, FileLook, look_at_file, remember
from patchkit.audit._project import WELL_KNOWN, Project, SourceFile, parse_text
from patchkit.audit._scopes import ModuleState
from patchkit.audit._sightings import Findings, Place, Sighting
from patchkit.audit._values import (
    FilePath,
    Func,
    Item,
    Klass,
    Param,
    Ref,
    Result,
    Unknown,
    Value,
    last_name,
    options,
)

_ROUNDS = 4
_WORD = re.compile(rb"\w")
_CALLED_WITH = re.compile(rb"(?<!attr)\(\s*[\"']$")
_OF_ANYTHING = re.compile(rb"[\w)\]]\.$")
_OF_ITSELF = re.compile(rb"\b(?:self|cls)\.$")
# How often what a helper is given may be handed on before it is written to.
_HANDED_ON = 2
# Below this many files a second process costs more than it brings.
_WORTH_A_POOL = 300
_WORKERS = 2


class Survey:
    """One walk through a project.

    Attributes:
        project: The files.
        found: What was come upon; sightings of one write are merged.
    """

    def __init__(self, project: Project, *, workers: int = _WORKERS) -> None:
        self.project = project
        self._workers = workers
        self.interpreter = Interpreter(project)
        self.found: Findings = self.interpreter.found
        self._looks: dict[str, FileLook] = {}
        self._chosen: dict[str, ModuleState] = {}
        self._possibilities: dict[tuple[str, str], bool] = {}
        self._uses: dict[str, bool] = {}

    def run(self) -> Survey:
        with collector_paused():
            self._look()
            self.interpreter.giver_names = self._givers()
            self.interpreter.passing_names = {
                name
                for seen in self._looks.values()
                for name, origins in seen.giving
                if GIVEN in origins
            }
            self.interpreter.foreign_names = self._foreign_names()
            names = self._helpers()
            self.interpreter.helper_names = set(names)
            self.interpreter.possible = lambda state, root: self._possible(
                self.project.by_path[state.path], root
            )
            self._choose(
                lambda file, look: (
                    any(self._possible(file, root) for root in look.alone)
                    or any(
                        n in names and self._possible(file, root) for n, root in look.called_with
                    )
                )
            )
            self._walk(names)
            self._callers(names)
        self.found.doors += declared_doors(self.project)
        self.found.sightings = _merged(self._existing(self.found.sightings))
        return self

    # ---- choosing --------------------------------------------------------------------

    def _look(self) -> None:
        """Look at every file that may matter, in two processes where it is worth it."""
        files = self.project.candidates()
        if self._workers < 2 or len(files) < _WORTH_A_POOL or not _may_fork():
            for file in files:
                self._note_look(file, _look_at(file.data or b""))
            return
        chunks = [files[i : i + 40] for i in range(0, len(files), 40)]
        with ProcessPoolExecutor(self._workers, mp_context=get_context("fork")) as pool:
            jobs = pool.map(_look_at_many, [[str(f.path) for f in chunk] for chunk in chunks])
            for chunk, looks in zip(chunks, jobs, strict=True):
                for file, seen in zip(chunk, looks, strict=True):
                    self._note_look(file, seen)

    def _note_look(self, file: SourceFile, seen: FileLook | tuple[str, int]) -> None:
        if isinstance(seen, FileLook):
            self._looks[file.relative] = seen
        else:
            self.project.note_unreadable(file, *seen)

    def _helpers(self) -> frozenset[str]:
        """Names of functions that write to what they are given, directly or through others."""
        names: set[str] = set()
        setters: set[str] = set()
        for seen in self._looks.values():
            names |= seen.helpers
            setters |= seen.setters
        for _ in range(_HANDED_ON):
            more = {
                name
                for seen in self._looks.values()
                for name, called in seen.passing
                if name not in setters and not setters.isdisjoint(called)
            }
            if not more:
                break
            setters |= more
        names |= setters
        # A file without any trigger may still call a helper.
        self._look_further(names)
        return frozenset(names)

    def _foreign_names(self) -> set[str]:
        """Top-level names that the project imports and does not have itself."""
        found = set(WELL_KNOWN) | set(self.project.packages)
        for seen in self._looks.values():
            for origins in seen.imports.values():
                found.update(m.partition(".")[0] for m, level, _ in origins if not level)
        return found - self.project.own_roots

    def _givers(self) -> set[str]:
        """Names of functions whose result may matter."""
        names = {""}
        for _ in range(_ROUNDS):
            more = {
                name
                for seen in self._looks.values()
                for name, origins in seen.giving
                if name not in names and not names.isdisjoint(origins)
            }
            if not more:
                break
            names |= more
        return names

    def _look_further(self, names: Iterable[str]) -> None:
        """Look at files without a trigger of their own that mention one of the names."""
        rest = [f for f in self.project.files if f.relative not in self._looks]
        for file in self.project.mentioning(names, rest):
            self._note_look(file, _look_at(file.data or b""))

    def _possible(self, file: SourceFile, root: str, depth: int = 0) -> bool:
        """Whether a name of a file may stand for something foreign."""
        if not root or depth > 8:
            return True
        if root.startswith(RETURNED):
            return root.removeprefix(RETURNED) in self.interpreter.giver_names
        if root.startswith(PASSED):
            name, _, given = root.removeprefix(PASSED).partition(":")
            return name in self.interpreter.passing_names and self._possible(file, given)
        key = (file.relative, root)
        known = self._possibilities.get(key)
        if known is None:
            self._possibilities[key] = True  # modules that import a name from each other
            known = self._possibilities[key] = self._trace(file, root, depth)
        return known

    def _trace(self, file: SourceFile, root: str, depth: int) -> bool:
        look = self._looks.get(file.relative)
        if look is None:
            seen = _look_at(self.project.text(file))
            if not isinstance(seen, FileLook):
                return True
            look = self._looks[file.relative] = seen
        origins = look.imports.get(root)
        if origins is None:
            return root not in look.defined
        for module, level, name in origins:
            if level:
                parts = file.package.split(".") if file.package else []
                parts = parts[: len(parts) - level + 1]
                module = ".".join([*parts, module] if module else parts)
            own = self.project.find(module, file)
            if own is None:
                # A folder without __init__.py, or a name that is made at run time.
                if not self.project.is_own(module, file) or name == "*":
                    return True
                if self.project.find(f"{module}.{name}") is not None:
                    return True
                continue
            if not name or name == "*" or self.project.find(f"{own.module}.{name}") is not None:
                return True
            if self._possible(own, name, depth + 1):
                return True
        return False

    def _choose(self, wanted: Callable[[SourceFile, FileLook], bool]) -> None:
        """Parse the files that are wanted and keep them."""
        for file in self.project.files:
            seen = self._looks.get(file.relative)
            if file.relative not in self._chosen and seen is not None and wanted(file, seen):
                state = self.interpreter.state_of(file)
                if state is not None:
                    remember(state.tree, seen.functions)
                    self._chosen[file.relative] = state

    # ---- walking ---------------------------------------------------------------------

    def _walk(self, helpers: frozenset[str]) -> None:
        for state in list(self._chosen.values()):
            self.interpreter.walk_module(state)
        for state in list(self._chosen.values()):
            self._walk_functions(state, helpers, frozenset())

    def _walk_functions(
        self, state: ModuleState, helpers: frozenset[str], patching: frozenset[str]
    ) -> None:
        file = self.project.by_path[state.path]
        self.interpreter.walk_functions(
            state, helpers, patching, lambda root: self._possible(file, root)
        )

    def _callers(self, helpers: frozenset[str]) -> None:
        """Walk whatever calls a function that patches: under which tests is it called?"""
        known: set[Func] = set()
        for _ in range(_ROUNDS):
            wanted: dict[str, set[str]] = {}
            for func in self._patching() - known:
                known.add(func)
                name = getattr(func.node, "name", "")
                if name and not func.local and not name.startswith("__"):
                    wanted.setdefault(name, set()).add(func.module.name)
            if not wanted:
                break
            self._look_further(wanted)
            for file in self.project.files:
                look = self._looks.get(file.relative)
                if look is None:
                    continue
                names = frozenset(
                    n
                    for n, homes in wanted.items()
                    if n in look.called and _links(file, look, n, homes)
                )
                if names:
                    state = self.interpreter.state_of(file)
                    if state is not None:
                        remember(state.tree, look.functions)
                        self._chosen.setdefault(file.relative, state)
                        self.interpreter.walk_module(state)
                        self._walk_functions(state, helpers, names)

    @property
    def known_modules(self) -> set[str]:
        """Foreign names that the project imports as modules."""
        return self.interpreter.known_modules

    @property
    def functions(self) -> dict[str, Func]:
        """The project's functions that were met, by reference."""
        return {f.reference: f for s in self._chosen.values() for f in s.functions}

    def close(self) -> None:
        """Let go of the syntax trees: they and their scopes refer to each other."""
        self.interpreter.close()
        self._chosen.clear()
        self._looks.clear()

    def imports_of(self, module: str) -> None:
        """Walk a module that was not walked yet, so that what it imports is known."""
        self.interpreter.module(module)

    def _patching(self) -> set[Func]:
        """Functions in which a write was seen, and those that call them."""
        found = {s.function for s in self.found.sightings if s.function is not None}
        while True:
            more = {
                e.caller
                for e in self.found.edges
                if e.callee in found and e.caller is not None and e.caller not in found
            }
            if not more:
                return found
            found |= more

    def _existing(self, sightings: list[Sighting]) -> list[Sighting]:
        """Without what is the project's own after all.

        Implementations of operators that the project defines itself, modules that it
        makes under names of its own, and the assignment by which a rewritten function
        is put in its place, which the rewriting stands for already.
        """
        own = self.interpreter.calls.operators.own_namespaces
        names = OwnNames(self.project.own_roots)
        imported = self.interpreter.foreign_names | {
            m.partition(".")[0] for m in self.interpreter.known_modules
        }
        rewritten = {
            (s.function, s.target.dotted)
            for s in sightings
            if s.action == "rewrite" and isinstance(s.target, Ref)
        }
        kept = []
        for sighting in sightings:
            target = sighting.target
            if isinstance(target, Ref):
                space = _namespace(target) if target.dotted.startswith("torch.ops.") else ""
                if (
                    space
                    and space not in EXISTING_NAMESPACES
                    and (space in own or names.mentions(space))
                ):
                    continue
                if sighting.action == "dispatch" and space in own:
                    continue
                if (
                    sighting.action == "module"
                    and target.dotted not in imported
                    and "." not in target.dotted
                    and _is_made_here(sighting.replacement)
                ):
                    continue
                if (
                    sighting.action in ("replace", "wrap")
                    and (sighting.function, target.dotted) in rewritten
                    and not any(
                        isinstance(v, (Func, Klass)) for v, _ in options(sighting.replacement)
                    )
                ):
                    continue
            kept.append(sighting)
        return kept

    def uses(self, name: str) -> bool:
        """Whether the project itself means a name, and so may be the one that adds it.

        It does where it reads it of ``self``, reads a private one of anything, calls
        something by this name, or reads it more than once by itself.
        """
        if name not in self._uses:
            self._uses[name] = self._looks_for(name)
        return self._uses[name]

    def _looks_for(self, name: str) -> bool:
        count = 0
        word = name.encode()
        for state in self._chosen.values():
            text = state.source.encode()
            if not any(_stands_alone(text, at) for at in _occurrences(text, word)):
                continue
            count += sum(
                isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
                for node in ast.walk(state.tree)
            )
            if count > 1:
                return True
        return any(
            _is_meant(text, at, word)
            for text in map(self.project.text, self.project.files)
            for at in _occurrences(text, word)
        )


def _occurrences(text: bytes, word: bytes) -> Iterator[int]:
    """Where a whole word stands."""
    at = text.find(word)
    while at >= 0:
        if not _WORD.match(text, at + len(word)) and not (at and _WORD.match(text, at - 1)):
            yield at
        at = text.find(word, at + 1)


def _stands_alone(text: bytes, at: int) -> bool:
    """Whether a word is no attribute and no text of its own."""
    return text[at - 1 : at] not in (b".", b"'", b'"')


def _is_meant(text: bytes, at: int, word: bytes) -> bool:
    """Whether a word is read of an object, or is what something is called with."""
    before = text[max(at - 40, 0) : at]
    if _CALLED_WITH.search(before) is not None:
        return text[at + len(word) : at + len(word) + 1] in (b"'", b'"')
    if not (_OF_ANYTHING if word.startswith(b"_") else _OF_ITSELF).search(before):
        return False
    # `A._name = B._name` puts it there.
    start, end = text.rfind(b"\n", 0, at) + 1, text.find(b"\n", at)
    line = text[start : end if end >= 0 else len(text)]
    return re.search(rb"\." + re.escape(word) + rb"\s*=[^=]", line) is None


def _is_made_here(value: Value) -> bool:
    """Whether a module is made by hand, or loaded from a file."""
    return any(last_name(v) in ("module_from_spec", "ModuleType") for v, _ in options(value))


def _links(file: SourceFile, look: FileLook, name: str, homes: set[str]) -> bool:
    """Whether a file can mean a function of one of `homes` when it calls `name`."""
    if file.module in homes:
        return True
    lasts = {home.rpartition(".")[2] for home in homes}
    for origins in look.imports.values():
        for module, _, imported in origins:
            if imported in (name, "*") or imported in lasts:
                return True
            if not imported and module.rpartition(".")[2] in lasts:
                return True
    return False


def _namespace(target: Ref) -> str:
    parts = target.dotted.split(".")
    return parts[2] if len(parts) > 2 else ""


def target_key(target: Ref | Item | FilePath) -> str:
    """One text per place that is written to."""
    if isinstance(target, FilePath):
        return target.relative
    if isinstance(target, Item):
        return f"{target.owner.dotted}[]"
    return target.dotted


def _merged(sightings: list[Sighting]) -> list[Sighting]:
    """One sighting per write and target.

    A helper's write is met twice: in the helper by itself, where the target may be a
    parameter (then nothing was noted), and for each call. Where the helper alone says
    what is written to, its calls add nothing but, perhaps, what is written.
    """
    alone = {(s.place, target_key(s.target), s.key): s for s in sightings if s.through is None}
    better: dict[int, Value] = {}
    kept: dict[tuple[Place, Place | None, str, str | None], Sighting] = {}
    for sighting in sightings:
        key = target_key(sighting.target)
        if sighting.through is not None:
            twin = alone.get((sighting.through, key, sighting.key))
            if twin is not None:
                if _vague(twin.replacement) and not _vague(sighting.replacement):
                    better[id(twin)] = sighting.replacement
                continue
        mark = (sighting.place, None, key, sighting.key)
        earlier = kept.get(mark)
        if earlier is None or (_vague(earlier.replacement) and not _vague(sighting.replacement)):
            kept[mark] = sighting
    return [replace(s, replacement=better[id(s)]) if id(s) in better else s for s in kept.values()]


def _vague(value: Value) -> bool:
    return isinstance(value, (Unknown, Param, Result))


def _look_at(data: bytes) -> FileLook | tuple[str, int]:
    """A look at one file, or why there is none."""
    tree = parse_text(data)
    if not isinstance(tree, ast.Module):
        return tree
    try:
        return look_at_file(tree, data)
    except RecursionError:
        return "it nests too deeply to be followed", 0


def _look_at_many(paths: list[str]) -> list[FileLook | tuple[str, int]]:
    gc.disable()  # in a process that does nothing else
    return [_look_at(Path(path).read_bytes()) for path in paths]


def _may_fork() -> bool:
    """Whether a copy of this process is harmless: not among threads, not everywhere."""
    return "fork" in get_all_start_methods() and threading.active_count() == 1


@contextmanager
def collector_paused() -> Iterator[None]:
    """Millions of syntax nodes are made and none is garbage: do not look for any.

    They are not frozen afterwards: whoever freezes the collector hides what lives in
    the process from everybody's searches, the patch engine's among them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
