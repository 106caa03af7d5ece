"""The handle of a committed plan."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from patchkit.engine import _inert as inert
from patchkit.engine import _journal as journal
from patchkit.engine import _process as process
from patchkit.engine import _residue as residue
from patchkit.engine._around import (
    clear_caches,
    installed_names,
    leftovers,
    missed_import,
    new_functions,
    past_the_hook,
    way_out,
    whose,
)
from patchkit.engine._canary import Canary
from patchkit.engine._declare import Adapter, Patch
from patchkit.engine._journal import Entry
from patchkit.engine._pending import watch
from patchkit.engine._plan import Plan, PlannedPatch, bring_in, prepare
from patchkit.engine._report import RuntimeManifest, runtime_manifest
from patchkit.engine._review import Review
from patchkit.engine._slots import same
from patchkit.engine._switch import Switch
from patchkit.engine.errors import (
    DuringImportError,
    NoInstallationError,
    ProcessBoundError,
    UndoRefusedError,
    VerificationError,
    violation,
)
from patchkit.errors import ConfigurationError, Violation

State = Literal["pending", "active", "broken", "undone"]


class Installation:
    """What is installed, as long as it is.

    Made by :func:`patchkit.engine.install`; also a context manager that undoes
    itself. Belongs to its process: it can be neither pickled nor copied.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._patches: list[PlannedPatch] = list(plan.patches)
        self._journal: list[Entry] = []
        self._state: State = "undone"
        self._broken = ""
        self._claims = 0
        self._canary: Canary | None = None
        self.hits: dict[str, int] = {}

    # -- what it is ---------------------------------------------------------

    @property
    def adapter(self) -> Adapter:
        return self._plan.adapter

    @property
    def side(self) -> str:
        return self._plan.side

    @property
    def switch(self) -> Switch | None:
        """The switch of a trainer side."""
        return self._plan.switch

    @property
    def state(self) -> State:
        """*pending* while a module is awaited, *active*, *broken* (see verify), or *undone*."""
        return self._state

    @property
    def unreviewed(self) -> dict[str, str]:
        """symbol -> digest of what was installed without a review."""
        return dict(self._plan.unreviewed)

    @property
    def manifest(self) -> RuntimeManifest:
        """What is installed, for comparison with other processes and as evidence."""
        return runtime_manifest(self._plan, self._patches, self._state, self.hits)

    def __repr__(self) -> str:
        return f"<Installation {self.adapter.name} {self.side}: {self._state}>"

    # -- doing and undoing --------------------------------------------------

    def _commit(self) -> bool:
        """Write the plan; the caller holds the lock.

        Returns:
            False, with nothing done, when a module that was not loaded when the
            plan was made is loaded now: the plan has to be made again.
        """
        watch.add({p.module for p in self._patches}, self._executed)
        try:
            if any(p.pending and inert.loaded(p.module) is not None for p in self._patches):
                watch.remove(self._executed)
                return False
            self._journal = journal.commit(self._plan.entries)
            self._take_ownership(self._patches)
        except BaseException as error:
            journal.restore(self._journal, cause=error)
            self._give_up_ownership()
            watch.remove(self._executed)
            raise
        self._settle_state()
        return True

    def _executed(self, module: str) -> None:
        """A module of ours has just run: the first time, or once more."""
        waiting = [p.patch for p in self._patches if p.pending and p.module == module]
        if not waiting:
            if self._state in ("active", "pending"):
                self._broken, self._state = module, "broken"
            return
        # Not under the lock: replacements are imported here, by the thread that imports.
        bring_in(waiting)
        with process.lock:
            if self._state == "undone":
                return
            try:
                arrived = self._prepare_arrived(module, waiting)
                self._journal += journal.commit([e for p in arrived for e in p.entries])
                by_patch = {id(p.patch): p for p in arrived}
                self._patches = [by_patch.get(id(p.patch), p) for p in self._patches]
                self._take_ownership(arrived)
            except BaseException:
                self._undo([e for e in self._journal if same(e.slot.read(), e.after)])
                raise
            self._settle_state()
            if self._canary is not None:
                for planned in arrived:
                    self._canary.include(planned)

    def _prepare_arrived(self, module: str, waiting: list[Patch]) -> list[PlannedPatch]:
        review = Review(self.adapter, self._plan.accept)
        arrived = prepare(waiting, review, self.switch, arrived=True)
        if review.violations:
            raise DuringImportError(
                f"adapter {self.adapter.name!r} ({self.side}) was waiting for {module}, "
                "does not fit it, and was undone",
                review.violations,
            )
        self._plan.unreviewed.update(review.unreviewed)
        return arrived

    def canary(self, *, evidence: Path | None = None, watch_calls: bool = True) -> Canary:
        """A `with` block at whose end every required patch must have been reached.

        A hit is a call, or a trace by a compiler.

        Args:
            evidence: A folder of compiled artefacts: what was stored there by
                :meth:`store_evidence` under this very patch set counts too.
            watch_calls: Also note what runs under the same names, to say what
                ran instead; costs a profiler callback per call.
        """
        if self._state not in ("active", "pending"):
            raise NoInstallationError(f"active installation of {self.adapter.name!r}", [repr(self)])
        from patchkit.engine._compiled import load_evidence

        known = load_evidence(evidence, self.manifest.digest) if evidence is not None else {}
        return Canary(self, known, watch_calls)

    def store_evidence(self, folder: Path) -> Path:
        """Keep the hits so far beside compiled artefacts, for runs that start warm."""
        from patchkit.engine._compiled import store_evidence

        return store_evidence(folder, self.manifest.digest, self.hits)

    def _take_ownership(self, patches: list[PlannedPatch]) -> None:
        for planned in patches:
            for new in new_functions(planned):
                process.own(new, self.adapter.name, self.side, planned.patch.symbol)
        clear_caches(patches)

    def _give_up_ownership(self) -> None:
        for planned in self._patches:
            for new in new_functions(planned):
                process.disown(new)

    def _settle_state(self) -> None:
        if self._broken:
            self._state = "broken"
        else:
            self._state = "pending" if any(p.pending for p in self._patches) else "active"

    def verify(self) -> None:
        """Compare every slot with the journal, by identity.

        Cheap enough for every training step.

        Raises:
            VerificationError: With each slot that holds something else, and whose it is.
        """
        with process.lock:
            if self._state == "undone":
                raise NoInstallationError(
                    f"active installation of {self.adapter.name!r} ({self.side})",
                    installed_names(),
                )
            wrong = [self._told(entry, "is no longer installed") for entry in self._differing()]
            wrong += [missed_import(p) for p in self._patches if past_the_hook(p)]
            if self._broken:
                wrong.append(
                    violation(
                        self._broken,
                        "was executed again",
                        expected="one execution",
                        found="a reload; what it patched is gone",
                        remedy="uninstall() and install() again",
                    )
                )
            if wrong:
                self._state = "broken"
                raise VerificationError(
                    f"adapter {self.adapter.name!r} ({self.side}) is not what was installed", wrong
                )
            if self._state == "broken":
                self._settle_state()

    def _differing(self) -> list[Entry]:
        return [e for e in self._journal if not same(e.slot.read(), e.after)]

    def _told(self, entry: Entry, problem: str) -> Violation:
        found = entry.slot.read()
        return violation(
            entry.slot.name,
            problem,
            expected=inert.describe(entry.after),
            found=whose(found, entry),
            remedy=way_out(found, entry),
        )

    def uninstall(self, *, leave: tuple[str, ...] = ()) -> None:
        """Put every slot back to what it held, checked before the first is touched.

        Args:
            leave: Names of slots (as the refusal prints them) that somebody else
                has taken and that are to stay as they are.

        Raises:
            UndoRefusedError: A slot holds what someone else put there.
        """
        if isinstance(leave, str):  # `in` would take every part of it for a slot's name
            raise ConfigurationError(f"leave is the string {leave!r}; write a tuple")
        with process.lock:
            if self._state == "undone":
                return
            taken = {id(e) for e in self._differing()}
            refused = [
                self._told(e, "somebody is on top of the patch")
                for e in self._journal
                if id(e) in taken
                and e.slot.name not in leave
                and not same(e.slot.read(), e.before)  # put back already: nothing to do
            ]
            if refused:
                raise UndoRefusedError(
                    f"adapter {self.adapter.name!r} ({self.side}) cannot be undone", refused
                )
            entries = [e for e in self._journal if id(e) not in taken]
            if self.switch is not None:
                with self.switch.closed():
                    self._undo(entries)
            else:
                self._undo(entries)

    def _undo(self, entries: list[Entry]) -> None:
        if self._canary is not None:
            self._canary.stop()
        journal.restore(entries)
        watch.remove(self._executed)
        self._state = "undone"
        self._claims = 0
        process.installations.pop((self.adapter.name, self.side), None)
        self._give_up_ownership()
        for planned in self._patches:
            for old, new in leftovers(planned):
                residue.make_inert(new, old)
        clear_caches(self._patches)  # last: it calls foreign code, which may raise

    # -- context manager ----------------------------------------------------

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give back the claim of one install() call; the last one undoes."""
        with process.lock:
            self._claims -= 1
            if self._claims <= 0:
                self.uninstall()

    # -- bound to the process -----------------------------------------------

    def __reduce__(self) -> Any:
        raise ProcessBoundError(repr(self))

    def __copy__(self) -> Any:
        raise ProcessBoundError(repr(self))

    def __deepcopy__(self, memo: Any) -> Any:
        raise ProcessBoundError(repr(self))
