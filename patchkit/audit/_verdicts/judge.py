"""The judge: which rules a patch comes under, and which of their verdicts is the gravest."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import unified_diff

from patchkit.audit._absorption import absorbed
from patchkit.audit._findings import A_NEW_NAME, NOTHING_AT_HAND, Verdict, VerdictKind
from patchkit.audit._guards import Ways
from patchkit.audit._known import BROUGHT_BY_OTHERS
from patchkit.audit._replacements import Replacement
from patchkit.audit._selectors import off_path
from patchkit.audit._sightings import Sighting
from patchkit.audit._signatures import Problem, misbound_call, misfits
from patchkit.audit._values import Edit, FilePath, Ref, last_name
from patchkit.audit._verdicts.case import Case, Subject
from patchkit.audit._verdicts.conditions import Conditions
from patchkit.audit._verdicts.modules import module
from patchkit.audit._verdicts.operators import Operators
from patchkit.audit._versions import Target, Versions
from patchkit.symbols import SymbolFacts
from patchkit.symbols.drift import Finding as Fate
from patchkit.symbols.drift import Kind

# Attributes that every class has, of `object` or as soon as one is set.
_OF_EVERY_CLASS = frozenset(dir(object)) | {"__post_init__"}
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
        self._uses = uses
        self._mentions = mentions
        self._versions = versions
        self._settings = settings
        self._conditions = Conditions(versions, ways, sightings)
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
                fate = self._fate(subject.symbol, target, base)
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
            yield from self._rewriting(case.subject, case.target, case.base)
        elif action == "dispatch":
            yield from self._operators.undeclared(case)
        elif action == "module" or ":" not in case.symbol:
            yield from module(case)
        else:
            yield from self._symbol(case.subject, case.target, case.base)

    def _symbol(self, subject: Subject, target: Target, base: Target | None) -> Iterator[Verdict]:
        symbol = subject.symbol
        facts = target.facts(symbol)
        fate = self._fate(symbol, target, base)
        if facts is None:
            yield from self._missing(subject, target, base, fate)
            return
        if fate is not None and fate.new_symbol is not None:
            # The old path still leads there, by inheritance or by a re-export: what is
            # written to it is not seen by those who use the new place.
            yield self._moved(target, fate)
        before = base.facts(symbol) if base is not None else None
        yield from self._signature(subject, target, facts, before)
        yield from self._absorbed(subject, target, base, facts, before)
        why = off_path(target, facts.defined_at, self._settings)
        if why:
            yield Verdict(version=target.label, kind=VerdictKind.OFF_PATH, text=why)
        yield from self._body(subject, target, base, facts, fate)

    def _missing(
        self, subject: Subject, target: Target, base: Target | None, fate: Fate | None
    ) -> Iterator[Verdict]:
        sighting = subject.sighting
        symbol = subject.symbol
        if not target.view.known(symbol):
            return
        if fate is not None:
            if fate.new_symbol is not None:
                yield self._moved(target, fate)
            else:
                yield Verdict(
                    version=target.label,
                    kind=VerdictKind.GONE,
                    text=f"{base.label if base else 'before'} has it; {fate.evidence}",
                )
            return
        module, _, name = symbol.partition(":")
        owner, _, last = name.rpartition(".")
        place = f"{module}:{owner}" if owner else module
        owner_there = target.facts(place) if owner else target.is_module(module)
        if not owner_there:
            yield self._owner_gone(target, base, place, last)
            return
        raw = target.source.source.raw(module) if target.source is not None else None
        if raw is not None and raw.dynamic and not owner:
            return  # the module makes names as they are asked for
        if not owner and target.imported(module, last):
            return  # it has the name from another package
        if owner and last in _OF_EVERY_CLASS and _is_class(owner_there):
            return  # from `object`, or made by a decorator of the class
        if not self._must_exist(subject, base):
            yield from self._unread(subject, target, place, last)
            return
        inherited, why = self._from_elsewhere(target, place, last)
        if inherited:
            return
        if why:
            yield Verdict(version=target.label, kind=VerdictKind.UNKNOWN, text=why)
            return
        sure = sighting.must_exist or subject.replacement.keeps_original
        if not sure and (_adds_a_name(subject, last) or self._mentions(last)):
            return
        if not sure and base is None:
            user = ""
            if self._uses(last):
                user = "project uses the name itself"
            elif subject.replacement.kind == "unknown" and target.files_with(last):
                user = "package looks for the name elsewhere"
            if user:
                yield Verdict(
                    version=target.label,
                    kind=VerdictKind.UNKNOWN,
                    text=f"{place} has no {last}; the {user}, and the patch may be adding it: "
                    "name the version that it is written for with --from",
                )
                return
        yield Verdict(
            version=target.label,
            kind=VerdictKind.GONE,
            text=f"{place} has no {last}",
            confidence=1.0 if sure else 0.8,
        )

    def _unread(self, subject: Subject, target: Target, place: str, last: str) -> Iterator[Verdict]:
        """A plain value under a new name that nothing there reads."""
        if subject.sighting.action != "value" or target.source is None:
            return
        if not target.files_with(last):
            yield Verdict(
                version=target.label,
                kind=VerdictKind.GONE,
                text=f"{place} has no {last}, and nothing in the package reads it",
                confidence=0.8,
            )

    def _from_elsewhere(self, target: Target, place: str, name: str) -> tuple[bool, str]:
        """Whether a class has a member from a base elsewhere; why that cannot be told."""
        facts = target.facts(place) if ":" in place else None
        if facts is None:
            return False, ""
        if facts.kind == "attribute":
            return False, f"{place} is an object: what it has is not in the source"
        for base in target.foreign_bases(facts.defined_at):
            package = base.partition(":")[0].partition(".")[0]
            if package in ("typing", "abc", "typing_extensions", "builtins", "object"):
                continue
            elsewhere = self._versions.installed(package) if package != target.package else None
            if elsewhere is not None:
                # `nn.Module` of an imported `nn` is written as torch:nn.Module
                home = elsewhere.split(Ref(package, tuple(base.replace(":", ".").split(".")[1:])))
                base = ":".join(home) if home is not None else base
            known = elsewhere.facts(base) if elsewhere is not None and ":" in base else None
            if known is None or elsewhere is None:
                return False, f"{name} may come from {base}, of which there is no source at hand"
            if elsewhere.facts(f"{base}.{name}") is not None:
                return True, ""
        return False, ""

    def _must_exist(self, subject: Subject, base: Target | None) -> bool:
        """Whether a name that is not there was meant to be there."""
        if subject.sighting.must_exist or subject.replacement.keeps_original:
            return True
        if subject.sighting.action in ("register", "delete", "class-swap"):
            return True
        if base is not None and base.view.known(subject.symbol):
            return False  # not there before either: the project adds it
        return subject.sighting.action == "replace"

    def _owner_gone(self, target: Target, base: Target | None, place: str, last: str) -> Verdict:
        if base is not None and ":" in place:
            fate = self._fate(place, target, base)
            if fate is not None and fate.new_symbol is not None:
                return Verdict(
                    version=target.label,
                    kind=VerdictKind.MOVED if fate.kind is Kind.MOVED else VerdictKind.RENAMED,
                    text=f"{place} is {fate.new_symbol} there ({fate.evidence})",
                    new_symbol=f"{fate.new_symbol}.{last}",
                    confidence=fate.confidence,
                )
        what = "class" if ":" in place else "module"
        package, _, rest = place.replace(":", ".").partition(".")
        part = rest.partition(".")[0]
        if part in BROUGHT_BY_OTHERS.get(package, ()):
            return Verdict(
                version=target.label,
                kind=VerdictKind.UNKNOWN,
                text=f"{package}.{part} is brought by an extension of {package}",
            )
        maker = target.made_when_asked(place)
        if maker:
            return Verdict(
                version=target.label,
                kind=VerdictKind.UNKNOWN,
                text=f"{maker} makes this name when it is asked for it",
            )
        return Verdict(
            version=target.label, kind=VerdictKind.GONE, text=f"there is no {what} {place}"
        )

    def _moved(self, target: Target, fate: Fate) -> Verdict:
        also = f"; {fate.also}" if fate.also else ""
        return Verdict(
            version=target.label,
            kind=VerdictKind.MOVED if fate.kind is Kind.MOVED else VerdictKind.RENAMED,
            text=f"it is {fate.new_symbol} there ({fate.evidence}{also})",
            new_symbol=fate.new_symbol,
            confidence=fate.confidence,
        )

    def _fate(self, symbol: str, target: Target, base: Target | None) -> Fate | None:
        if base is None or ":" not in symbol:
            return None
        return target.fate(symbol, base)

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

    # ---- texts ----------------------------------------------------------------------

    def _rewriting(
        self, subject: Subject, target: Target, base: Target | None
    ) -> Iterator[Verdict]:
        sighting = subject.sighting
        if target.source is None:
            yield Verdict(
                version=target.label, kind=VerdictKind.UNKNOWN,
                text="anchors are checked against source text, and a manifest has none",
            )  # fmt: skip
            return
        place = sighting.target
        if isinstance(place, FilePath):
            file = target.file(place)
            if file is None:
                yield self._file_gone(sighting, target, base)
                return
            text = target.text(file) or ""
        else:
            facts = target.facts(subject.symbol)
            if facts is None:
                yield from self._missing(
                    subject, target, base, self._fate(subject.symbol, target, base)
                )
                return
            file = facts.file
            node = target.definition(facts)
            whole = target.text(file) or ""
            text = ast.get_source_segment(whole, node) or "" if node is not None else whole
        for edit in sighting.edits:
            if _applies(edit, text):
                if edit.replacement is not None and not edit.regex:
                    text = text.replace(edit.anchor, edit.replacement)
                continue
            if edit.replacement and not edit.regex and edit.replacement.strip() in text:
                yield Verdict(
                    version=target.label,
                    kind=VerdictKind.ABSORBED,
                    text=f"{file} has the replacement's text already",
                    confidence=0.95,
                )
                continue
            others = [] if edit.regex else target.files_with(edit.anchor)
            hint = f"; it stands in {', '.join(others[:3])}" if others else ""
            yield Verdict(
                version=target.label,
                kind=VerdictKind.ANCHOR,
                text=f"{file} does not contain {_short(edit.anchor)}{hint}",
                new_symbol=others[0] if others else None,
            )
            return

    def _file_gone(self, sighting: Sighting, target: Target, base: Target | None) -> Verdict:
        assert isinstance(sighting.target, FilePath)
        found: list[str] = []
        for edit in sighting.edits:
            if not edit.regex:
                found += target.files_with(edit.anchor)
        if found:
            home = max(set(found), key=found.count)
            return Verdict(
                version=target.label,
                kind=VerdictKind.MOVED,
                text=f"there is no {sighting.target.relative}; the anchor stands in {home}",
                new_symbol=home,
                confidence=round(found.count(home) / len(sighting.edits), 2),
            )
        return Verdict(
            version=target.label, kind=VerdictKind.GONE,
            text=f"there is no {sighting.target.relative}",
        )  # fmt: skip


def _misbound(facts: SymbolFacts, call: ast.Call) -> list[Problem]:
    """Why a call of the original does not bind, however the original was kept."""
    found = list(misbound_call(facts, call, receiver=facts.kind == "method"))
    if found and facts.kind == "classmethod":
        # `Class.name.__func__` takes the class, too.
        return found if list(misbound_call(facts, call, receiver=True)) else []
    return found


def _adds_a_name(subject: Subject, name: str) -> bool:
    """Whether a name of a third package is made known where it was not."""
    value, target = subject.sighting.replacement, subject.sighting.target
    return (
        isinstance(value, Ref)
        and isinstance(target, Ref)
        and value.root != target.root
        and last_name(value) == name
    )


def _is_class(facts: object) -> bool:
    return isinstance(facts, SymbolFacts) and facts.kind == "class"


def _nothing_at_hand(package: str) -> Verdict:
    if package in sys.stdlib_module_names:
        text = "it is of the standard library, which has no versions of its own"
    else:
        text = f"{package} is not installed: name a version of it with --against"
    return Verdict(version=f"{package} {NOTHING_AT_HAND}", kind=VerdictKind.UNKNOWN, text=text)


def _applies(edit: Edit, text: str) -> bool:
    if not edit.regex:
        return edit.anchor in text
    try:
        return re.search(edit.anchor, text, re.MULTILINE) is not None
    except re.error:
        return False


def _short(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 80 else line[:79] + "…")


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
