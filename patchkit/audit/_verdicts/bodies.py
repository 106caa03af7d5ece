"""What the target does now: whether upstream took the patch up, or changed what it copied."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from difflib import unified_diff

from patchkit.audit._absorption import absorbed
from patchkit.audit._findings import Verdict, VerdictKind
from patchkit.audit._verdicts.case import Case
from patchkit.audit._versions import Target
from patchkit.symbols import SymbolFacts
from patchkit.symbols.drift import Finding as Fate
from patchkit.symbols.drift import Kind

_MAX_DIFF = 80


def taken_up(case: Case, facts: SymbolFacts, before: SymbolFacts | None) -> Iterator[Verdict]:
    """The verdict where upstream has what the patch brings."""
    new, base, target = case.replacement, case.base, case.target
    if case.sighting.action == "value" and new.kind == "value":
        if (
            facts.value is not None
            and facts.value == _source(new.value)
            and (before is None or before.value != facts.value)
        ):
            yield Verdict(
                version=case.label,
                kind=VerdictKind.ABSORBED,
                text=f"its value is {facts.value} there already",
            )
        return
    if new.function is None or case.sighting.action not in ("replace", "wrap"):
        return
    there = target.definition(facts)
    if there is None or not isinstance(there, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    was = base.definition(before) if base is not None and before is not None else None
    found = absorbed(was, new.function.node, there, calls=new.original_calls)
    if found is not None:
        yield Verdict(
            version=case.label,
            kind=VerdictKind.ABSORBED,
            text=found[1],
            confidence=found[0],
            diff=_diff(was, there, base, target),
        )


def changed(case: Case, facts: SymbolFacts, fate: Fate | None) -> Iterator[Verdict]:
    """The verdict where a copy of the original may be stale."""
    base = case.base
    if base is None or fate is None or fate.kind in (Kind.UNCHANGED, Kind.REMOVED):
        return
    if case.sighting.action in ("register", "wrap", "delete", "class-swap"):
        return  # nothing was copied from it
    if case.replacement.keeps_original:
        return
    texts = [c.text for c in fate.changes if c.kind is not Kind.UNCHANGED]
    if not texts or fate.old.body_digest == facts.body_digest:
        return
    before = base.definition(fate.old)
    there = case.target.definition(facts)
    yield Verdict(
        version=case.label,
        kind=VerdictKind.BODY,
        text=f"since {base.label}: {'; '.join(texts)}",
        diff=_diff(before, there, base, case.target),
    )


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
