"""The judge: which rules a patch comes under, and which of their verdicts is the gravest."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import unified_diff

from patchkit.audit._absorption import absorbed
from patchkit.audit._findings import A_NEW_NAME, NOTHING_AT_HAND, Verdict, VerdictKind
from patchkit.audit._guards import Ways
from patchkit.audit._replacements import Replacement
from patchkit.audit._selectors import off_path
from patchkit.audit._sightings import Sighting
from patchkit.audit._signatures import Problem, misbound_call, misfits
from patchkit.audit._values import Ref
from patchkit.audit._verdicts.case import Case, Subject
from patchkit.audit._verdicts.conditions import Conditions
from patchkit.audit._verdicts.modules import module
from patchkit.audit._verdicts.operators import Operators
from patchkit.audit._verdicts.texts import rewriting
from patchkit.audit._verdicts.whereabouts import Whereabouts, moved
from patchkit.audit._versions import Target, Versions
from patchkit.symbols import SymbolFacts
from patchkit.symbols.drift import Finding as Fate
from patchkit.symbols.drift import Kind

_CALLABLE = ("function", "method", "staticmethod", "classmethod")
_MAX_DIFF = 80
_GRAVITY = (
    VerdictKind.GUARD, VerdictKind.ANCHOR, VerdictKind.GONE, VerdictKind.MOVED,
    VerdictKind.RENAMED, VerdictKind.SIGNATURE, VerdictKind.ABSORBED, VerdictKind.OFF_PATH,
    VerdictKind.BODY,
)  # fmt: skip


class Judge:
    """Judges patches."""

    def __init__(
        self,
        versions: Versions,
        ways: Ways,
        settings: Mapping[str, str],
        sightings: Sequence[Sighting],
        uses: Callable[[str], bool] = lambda name: False,
        mentions: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self._versions = versions
        self._settings = settings
        self._conditions = Conditions(versions, ways, sightings)
        self._whereabouts = Whereabouts(versions, uses, mentions)
        self._operators = Operators(versions)

    def verdicts(self, subject: Subject, package: str) -> tuple[Verdict, ...]:
        """One verdict per version asked about."""
        targets = self._versions.of(package)
        if not targets:
            return (_nothing_at_hand(package),)
        found = [
            self._verdict(Case(subject, t, self._versions.base_of(t.package, t))) for t in targets
        ]
        if not any(v.kind is VerdictKind.GUARD for v in found):
            return tuple(found)
        # A guard that holds at another version asked about does what it is there for.
        elsewhere = any(v.kind is not VerdictKind.GUARD for v in found)
        return tuple(
            replace(v, level="note") if v.kind is VerdictKind.GUARD and elsewhere else v
            for v in found
        )

    def _verdict(self, case: Case) -> Verdict:
        guard = self._conditions.never_true(case)
        reasons = [] if guard is None else [guard]
        reasons += self._reasons(case)
        if not reasons:
            return self._fine(case.subject, case.target, case.base)
        order = {kind: index for index, kind in enumerate(_GRAVITY)}
        silent = guard is not None and guard.silent
        if silent and len(reasons) > 1:
            # Told more by what became of the target than by the import that fails.
            reasons = [*reasons[1:], reasons[0]]
            first, *rest = reasons
        else:
            first, *rest = sorted(reasons, key=lambda v: order.get(v.kind, len(order)))
        return replace(
            first,
            also=(*first.also, *(f"{v.kind.sentence}: {v.text}" for v in rest)),
            alias_sites=case.alias_sites(),
            silent=silent or first.silent,
        )

    def _fine(self, subject: Subject, target: Target, base: Target | None) -> Verdict:
        sighting = subject.sighting
        notes: list[str] = []
        text = ""
        if target.source is None and not target.view.known(subject.symbol):
            return Verdict(
                version=target.label, kind=VerdictKind.UNKNOWN,
                text="the stored manifest does not hold it: a wheel or a folder does",
            )  # fmt: skip
        if ":" in subject.symbol:
            facts = target.facts(subject.symbol)
            if facts is not None and facts.inherited_from:
                notes.append(f"inherited from {facts.inherited_from}: only this class is patched")
            if facts is not None and facts.reexport_of and sighting.action != "register":
                notes.append(f"the name is imported from {facts.reexport_of}, which keeps its own")
            if facts is None and sighting.action in ("replace", "value", "wrap", "class-swap"):
                module, _, name = subject.symbol.partition(":")
                origin = target.imported(module, name)
                if origin:
                    notes.append(f"the name is imported from {origin}, which keeps its own")
                elif target.has(Ref(module, tuple(name.split(".")))) is False:
                    text = A_NEW_NAME
                else:
                    notes.append("what is there is not defined in the source")
            if facts is not None:
                before = base.facts(subject.symbol) if base is not None else None
                notes += [p.text for p in self._problems(subject, facts, before)]
            if facts is not None and base is not None and subject.replacement.keeps_original:
                fate = Case(subject, target, base).fate()
                if fate is not None and fate.kind in (Kind.BODY_ONLY, Kind.SIGNATURE_COMPATIBLE):
                    notes.append("the original's body changed; the replacement calls it")
        return Verdict(
            version=target.label,
            kind=VerdictKind.FINE,
            text=text,
            also=tuple(notes),
            alias_sites=Case(subject, target, base).alias_sites(),
        )

    # ---- targets ---------------------------------------------------------------------

    def _reasons(self, case: Case) -> Iterator[Verdict]:
        """What is found wanting, whether or not the patch is applied."""
        action = case.sighting.action
        if action == "rewrite":
            yield from rewriting(case, self._whereabouts)
        elif action == "dispatch":
            yield from self._operators.undeclared(case)
        elif action == "module" or ":" not in case.symbol:
            yield from module(case)
        else:
            yield from self._symbol(case)

    def _symbol(self, case: Case) -> Iterator[Verdict]:
        facts, fate = case.facts(), case.fate()
        if facts is None:
            yield from self._whereabouts.missing(case, fate)
            return
        if fate is not None and fate.new_symbol is not None:
            # The old path still leads there, by inheritance or by a re-export: what is
            # written to it is not seen by those who use the new place.
            yield moved(case, fate)
        before = case.before()
        yield from self._signature(case.subject, case.target, facts, before)
        yield from self._absorbed(case.subject, case.target, case.base, facts, before)
        why = off_path(case.target, facts.defined_at, self._settings)
        if why:
            yield Verdict(version=case.label, kind=VerdictKind.OFF_PATH, text=why)
        yield from self._body(case.subject, case.target, case.base, facts, fate)

    # ---- signatures ------------------------------------------------------------------

    def _signature(
        self,
        subject: Subject,
        target: Target,
        facts: SymbolFacts,
        before: SymbolFacts | None,
    ) -> Iterator[Verdict]:
        problems = [p for p in self._problems(subject, facts, before) if not p.by_position]
        if not problems:
            return
        first = problems[0]
        yield Verdict(
            version=target.label,
            kind=VerdictKind.SIGNATURE,
            text="; ".join(p.text for p in problems),
            parameter=first.parameter or None,
        )

    def _problems(
        self, subject: Subject, facts: SymbolFacts, before: SymbolFacts | None
    ) -> Iterator[Problem]:
        action, new = subject.sighting.action, subject.replacement
        if action == "wrap":
            # (wrapped, instance, args, kwargs) takes whatever comes; what it passes on
            # explicitly is looked at by nobody.
            return
        if action == "class-swap" or action != "replace":
            return
        if new.kind == "function" and new.parameters is not None:
            yield from self._function_problems(new, facts, before)
        elif new.kind == facts.kind == "class" and new.parameters is not None and facts.parameters:
            comparable = before if before is not None and before.kind == "class" else None
            yield from misfits(facts, new.parameters, receiver=False, before=comparable)

    def _function_problems(
        self, new: Replacement, facts: SymbolFacts, before: SymbolFacts | None
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
                    yield Problem(
                        "", f"the target is a {facts.kind} there, the replacement is none"
                    )
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

    # ---- bodies ----------------------------------------------------------------------

    def _absorbed(
        self,
        subject: Subject,
        target: Target,
        base: Target | None,
        facts: SymbolFacts,
        before: SymbolFacts | None,
    ) -> Iterator[Verdict]:
        new = subject.replacement
        if subject.sighting.action == "value" and new.kind == "value":
            if (
                facts.value is not None
                and facts.value == _source(new.value)
                and (before is None or before.value != facts.value)
            ):
                yield Verdict(
                    version=target.label,
                    kind=VerdictKind.ABSORBED,
                    text=f"its value is {facts.value} there already",
                )
            return
        if new.function is None or subject.sighting.action not in ("replace", "wrap"):
            return
        there = target.definition(facts)
        if there is None or not isinstance(there, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return
        was = base.definition(before) if base is not None and before is not None else None
        found = absorbed(was, new.function.node, there, calls=new.original_calls)
        if found is not None:
            yield Verdict(
                version=target.label,
                kind=VerdictKind.ABSORBED,
                text=found[1],
                confidence=found[0],
                diff=_diff(was, there, base, target),
            )

    def _body(
        self,
        subject: Subject,
        target: Target,
        base: Target | None,
        facts: SymbolFacts,
        fate: Fate | None,
    ) -> Iterator[Verdict]:
        if base is None or fate is None or fate.kind in (Kind.UNCHANGED, Kind.REMOVED):
            return
        if subject.sighting.action in ("register", "wrap", "delete", "class-swap"):
            return  # nothing was copied from it
        if subject.replacement.keeps_original:
            return
        texts = [c.text for c in fate.changes if c.kind is not Kind.UNCHANGED]
        if not texts or fate.old.body_digest == facts.body_digest:
            return
        before = base.definition(fate.old)
        there = target.definition(facts)
        yield Verdict(
            version=target.label,
            kind=VerdictKind.BODY,
            text=f"since {base.label}: {'; '.join(texts)}",
            diff=_diff(before, there, base, target),
        )


def _misbound(facts: SymbolFacts, call: ast.Call) -> list[Problem]:
    """Why a call of the original does not bind, however the original was kept."""
    found = list(misbound_call(facts, call, receiver=facts.kind == "method"))
    if found and facts.kind == "classmethod":
        # `Class.name.__func__` takes the class, too.
        return found if list(misbound_call(facts, call, receiver=True)) else []
    return found


def _nothing_at_hand(package: str) -> Verdict:
    if package in sys.stdlib_module_names:
        text = "it is of the standard library, which has no versions of its own"
    else:
        text = f"{package} is not installed: name a version of it with --against"
    return Verdict(version=f"{package} {NOTHING_AT_HAND}", kind=VerdictKind.UNKNOWN, text=text)


def _source(value: object) -> str:
    from patchkit.symbols._rendering import render

    try:
        return render(ast.parse(repr(value), mode="eval").body)
    except SyntaxError:
        return repr(value)


def _diff(
    before: ast.AST | None, after: ast.AST | None, base: Target | None, target: Target
) -> tuple[str, ...]:
    """The original's difference without docstrings, comments and layout."""
    if before is None or after is None or base is None:
        return ()
    lines = list(
        unified_diff(_lines(before), _lines(after), base.label, target.label, lineterm="", n=2)
    )
    if len(lines) > _MAX_DIFF:
        lines = [*lines[:_MAX_DIFF], f"… {len(lines) - _MAX_DIFF} more lines"]
    return tuple(lines)


def _lines(node: ast.AST) -> list[str]:
    from patchkit.symbols._normalform import is_docstring

    body = getattr(node, "body", None)
    if isinstance(body, list) and body and is_docstring(body[0]):
        node = type(node)(**{**dict(ast.iter_fields(node)), "body": body[1:] or [ast.Pass()]})
        ast.copy_location(node, body[0])
        ast.fix_missing_locations(node)
    return ast.unparse(node).splitlines()
