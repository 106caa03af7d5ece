"""What the engine refuses, and with which words.

Each error carries its data; the message is formatted from it. Where several
things can be wrong at once they arrive together in a ``ViolationsError``.
"""

from __future__ import annotations

from collections.abc import Iterable

from patchkit.errors import ConfigurationError, PatchkitError, Violation, ViolationsError


class AdapterNotFoundError(ConfigurationError):
    """No installed distribution offers an adapter of this name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.known = tuple(sorted(known))
        super().__init__(name, self.known)

    def __str__(self) -> str:
        listing = ", ".join(self.known) or "none at all"
        return (
            f"no adapter is called {self.name!r}; installed are: {listing}. Install the "
            "distribution that declares it in the entry-point group 'patchkit.adapters', "
            "or pass the Adapter object itself"
        )


class DeclarationError(ConfigurationError):
    """A Patch or an Adapter that contradicts itself."""

    def __init__(self, subject: str, problems: Iterable[str]) -> None:
        self.subject = subject
        self.problems = tuple(problems)
        super().__init__(subject, self.problems)

    def __str__(self) -> str:
        return f"{self.subject} is declared wrongly: " + "; ".join(self.problems)


class ReferenceNotFoundError(ConfigurationError):
    """A ``module:qualname`` reference in a declaration that leads nowhere."""

    def __init__(self, reference: str, problem: str) -> None:
        self.reference = reference
        self.problem = problem
        super().__init__(reference, problem)

    def __str__(self) -> str:
        return (
            f"the declaration points to {self.reference!r}, but {self.problem}; "
            "correct the reference, or install what it needs"
        )


class SideError(ConfigurationError):
    """The side (rollout or trainer) was left out and is not clear."""

    def __init__(self, adapter: str, possible: Iterable[str]) -> None:
        self.adapter = adapter
        self.possible = tuple(possible)
        super().__init__(adapter, self.possible)

    def __str__(self) -> str:
        if self.possible:
            found = "both could be installed here" if len(self.possible) > 1 else "one could"
        else:
            found = "neither has its packages installed here"
        return (
            f'which side of adapter {self.adapter!r}? {found}; say side="rollout" or side="trainer"'
        )


class PreflightError(ViolationsError):
    """The plan cannot be carried out; nothing was changed."""


class DuringImportError(ViolationsError):
    """A patch waited for this import and cannot be applied; the installation was undone.

    Not an ``ImportError`` on purpose: ``try: import x except ImportError`` is
    common, and would turn a failed patch into a silent one.
    """


class VerificationError(ViolationsError):
    """What is installed is no longer what the journal says."""


class UndoRefusedError(ViolationsError):
    """A slot no longer holds what was written there; nothing was undone."""


class NotReachedError(ViolationsError):
    """Patches are installed, but the canary run never came by them."""


class SlotChangedError(PatchkitError):
    """Between check and write, someone else wrote the slot; everything was rolled back."""

    def __init__(self, slot: str, expected: str, found: str) -> None:
        self.slot = slot
        self.expected = expected
        self.found = found
        super().__init__(slot, expected, found)

    def __str__(self) -> str:
        return (
            f"{self.slot} changed between the check and the write: expected {self.expected}, "
            f"found {self.found}. Every slot written so far was restored; find out who writes "
            "it at the same time, and install after that"
        )


class RollbackError(PatchkitError):
    """Slots that could not be restored, even at the second try: end this process."""

    def __init__(self, slots: Iterable[tuple[str, str]]) -> None:
        self.slots = tuple(slots)
        super().__init__(self.slots)

    def __str__(self) -> str:
        listing = "; ".join(f"{slot}: {why}" for slot, why in self.slots)
        return (
            f"{len(self.slots)} slot(s) could not be restored ({listing}). This process now "
            "runs a mixture of old and new code: end it, and do not use its results"
        )


class AlreadyInstalledError(PatchkitError):
    """The adapter is installed here with another definition, or its handle is broken."""

    def __init__(self, adapter: str, side: str, difference: str) -> None:
        self.adapter = adapter
        self.side = side
        self.difference = difference
        super().__init__(adapter, side, difference)

    def __str__(self) -> str:
        return (
            f"adapter {self.adapter!r} is already installed on the {self.side} side, "
            f"{self.difference}; call uninstall() on that installation first"
        )


class CanaryBusyError(PatchkitError):
    """A second canary run on one installation while the first is still counting."""

    def __init__(self, adapter: str) -> None:
        self.adapter = adapter
        super().__init__(adapter)

    def __str__(self) -> str:
        return (
            f"a canary of {self.adapter!r} is already counting in this process; "
            "leave that `with` block first"
        )


class NoInstallationError(PatchkitError):
    """Something asks for an installation that this process does not have."""

    def __init__(self, wanted: str, installed: Iterable[str]) -> None:
        self.wanted = wanted
        self.installed = tuple(installed)
        super().__init__(wanted, self.installed)

    def __str__(self) -> str:
        here = ", ".join(self.installed) or "nothing"
        return (
            f"this process has no {self.wanted} (installed here: {here}). Installations are "
            "per process: a spawned or remote worker has to call patchkit.install(...) itself"
        )


class AmbiguousInstallationError(PatchkitError):
    """Several trainer installations, and no word which one is meant."""

    def __init__(self, adapters: Iterable[str]) -> None:
        self.adapters = tuple(adapters)
        super().__init__(self.adapters)

    def __str__(self) -> str:
        listing = ", ".join(self.adapters)
        return (
            f"several adapters are installed on the trainer side ({listing}); "
            f'say which: exact_context(adapter="{self.adapters[0]}")'
        )


class SwitchUnsetError(PatchkitError):
    """A patched function ran in a thread that never said which variant it wants."""

    def __init__(self, switch: str, thread: str) -> None:
        self.switch = switch
        self.thread = thread
        super().__init__(switch, thread)

    def __str__(self) -> str:
        return (
            f"thread {self.thread!r} called a function patched by {self.switch!r} while another "
            "thread is inside exact_context(), and never said which variant it wants. Either "
            "carry the state over (state = switch.capture() where the work is handed out, "
            "`with state:` in the thread), or say `with stock_context():` in the thread"
        )


class SwitchOrderError(PatchkitError):
    """A context of the switch was left somewhere else than it was entered."""

    def __init__(self, switch: str) -> None:
        self.switch = switch
        super().__init__(switch)

    def __str__(self) -> str:
        return (
            f"a context of {self.switch!r} was left in another task or thread than it was "
            "entered in, or out of order (a `with` around a `yield` that was closed elsewhere "
            "does that); enter and leave it within one function call"
        )


class SwitchBusyError(PatchkitError):
    """Undo while someone is inside exact_context()."""

    def __init__(self, switch: str, inside: int) -> None:
        self.switch = switch
        self.inside = inside
        super().__init__(switch, inside)

    def __str__(self) -> str:
        return (
            f"{self.inside} context(s) of {self.switch!r} are still entered; leave "
            "exact_context() in every thread before uninstall()"
        )


class ProcessBoundError(PatchkitError):
    """An installation was pickled or copied."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(what)

    def __str__(self) -> str:
        return (
            f"{self.what} belongs to the process that made it and cannot be pickled or copied; "
            "send the adapter's name and call patchkit.install(...) over there"
        )


def violation(
    subject: object, problem: str, *, expected: str = "", found: str = "", remedy: str = ""
) -> Violation:
    """A Violation about anything that has a name."""
    return Violation(
        subject=str(subject), problem=problem, expected=expected, found=found, remedy=remedy
    )
