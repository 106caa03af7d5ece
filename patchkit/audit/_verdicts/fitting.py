"""Whether a replacement can be called as its target is called, and calls it rightly."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from patchkit.audit._findings import Verdict, VerdictKind
from patchkit.audit._replacements import Replacement
from patchkit.audit._signatures import Problem, misbound_call, misfits
from patchkit.audit._verdicts.case import Case
from patchkit.symbols import SymbolFacts

_CALLABLE = ("function", "method", "staticmethod", "classmethod")


def signature(case: Case, facts: SymbolFacts, before: SymbolFacts | None) -> Iterator[Verdict]:
    """The verdict where a call does not bind."""
    found = [p for p in problems(case, facts, before) if not p.by_position]
    if not found:
        return
    yield Verdict(
        version=case.label,
        kind=VerdictKind.SIGNATURE,
        text="; ".join(p.text for p in found),
        parameter=found[0].parameter or None,
    )


def problems(case: Case, facts: SymbolFacts, before: SymbolFacts | None) -> Iterator[Problem]:
    """All that does not fit, what concerns few calls only included."""
    new = case.replacement
    if case.sighting.action != "replace":
        # A wrapper's (wrapped, instance, args, kwargs) takes whatever comes; what it
        # passes on explicitly is looked at by nobody.
        return
    if new.kind == "function" and new.parameters is not None:
        yield from _of_function(new, facts, before)
    elif new.kind == facts.kind == "class" and new.parameters is not None and facts.parameters:
        comparable = before if before is not None and before.kind == "class" else None
        yield from misfits(facts, new.parameters, receiver=False, before=comparable)


def _of_function(
    new: Replacement, facts: SymbolFacts, before: SymbolFacts | None
) -> Iterator[Problem]:
    assert new.parameters is not None
    if facts.kind == "class":
        if facts.parameters:
            yield from misfits(facts, new.parameters, receiver=False)
        return
    if facts.kind in ("property", "cached_property"):
        if new.descriptor not in ("property", "cached_property"):
            yield Problem("", f"the target is a {facts.kind} there, the replacement is not")
        return
    if facts.kind not in _CALLABLE:
        return
    if new.descriptor in ("property", "cached_property"):
        yield Problem("", f"the target is a {facts.kind} there, the replacement a property")
        return
    in_class = facts.kind != "function"
    descriptor = new.descriptor or ("method" if in_class else "function")
    if in_class and facts.kind in ("staticmethod", "classmethod"):
        if descriptor != facts.kind:
            # Called through the class it gets no receiver, and may fit all the same.
            plain = facts
            if facts.kind == "classmethod":
                plain = replace(facts, parameters=facts.parameters[1:])
            if any(True for _ in misfits(plain, new.parameters, receiver=False)):
                yield Problem("", f"the target is a {facts.kind} there, the replacement is none")
            return
    elif in_class and descriptor in ("staticmethod", "classmethod"):
        yield Problem("", f"the replacement is a {descriptor}, the target is a method there")
        return
    receiver = facts.kind in ("method", "classmethod")
    if facts.kind == "staticmethod" and descriptor != "staticmethod":
        receiver = False
    comparable = before if before is not None and before.kind == facts.kind else None
    yield from misfits(facts, new.parameters, receiver=receiver, before=comparable)
    for call in new.original_calls:
        yield from _misbound(facts, call)
    if facts.is_async and not new.is_async and not new.keeps_original:
        yield Problem("", "the target is async there, the replacement is not")
    if new.is_async and not facts.is_async and not facts.is_generator:
        yield Problem("", "the replacement is async, the target is not there")


def _misbound(facts: SymbolFacts, call: ast.Call) -> list[Problem]:
    """Why a call of the original does not bind, however the original was kept."""
    found = list(misbound_call(facts, call, receiver=facts.kind == "method"))
    if found and facts.kind == "classmethod":
        # `Class.name.__func__` takes the class, too.
        return found if list(misbound_call(facts, call, receiver=True)) else []
    return found
