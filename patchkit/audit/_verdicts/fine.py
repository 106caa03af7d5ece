"""What is said of a patch to which no rule objects."""

from __future__ import annotations

from collections.abc import Iterator

from patchkit.audit._findings import A_NEW_NAME, Verdict, VerdictKind
from patchkit.audit._values import Ref
from patchkit.audit._verdicts.case import Case
from patchkit.audit._verdicts.fitting import problems
from patchkit.symbols import SymbolFacts
from patchkit.symbols.drift import Kind


def fine(case: Case) -> Verdict:
    """The verdict *fine*, and what is worth knowing all the same."""
    target = case.target
    if target.source is None and not target.view.known(case.symbol):
        return Verdict(
            version=case.label, kind=VerdictKind.UNKNOWN,
            text="the stored manifest does not hold it: a wheel or a folder does",
        )  # fmt: skip
    facts = case.facts() if ":" in case.symbol else None
    new = False
    notes: tuple[str, ...] = ()
    if facts is not None:
        notes = tuple(_notes(case, facts))
    elif ":" in case.symbol and case.sighting.action in ("replace", "value", "wrap", "class-swap"):
        module, _, name = case.symbol.partition(":")
        origin = target.imported(module, name)
        if origin:
            notes = (f"the name is imported from {origin}, which keeps its own",)
        elif target.has(Ref(module, tuple(name.split(".")))) is False:
            new = True
        else:
            notes = ("what is there is not defined in the source",)
    return Verdict(
        version=case.label,
        kind=VerdictKind.FINE,
        text=A_NEW_NAME if new else "",
        also=notes,
        alias_sites=case.alias_sites(),
    )


def _notes(case: Case, facts: SymbolFacts) -> Iterator[str]:
    if facts.inherited_from:
        yield f"inherited from {facts.inherited_from}: only this class is patched"
    if facts.reexport_of and case.sighting.action != "register":
        yield f"the name is imported from {facts.reexport_of}, which keeps its own"
    # What concerns few calls only is no finding; all else would have been one.
    for problem in problems(case, facts, case.before()):
        yield problem.text
    if case.replacement.keeps_original:
        fate = case.fate()
        if fate is not None and fate.kind in (Kind.BODY_ONLY, Kind.SIGNATURE_COMPATIBLE):
            yield "the original's body changed; the replacement calls it"
