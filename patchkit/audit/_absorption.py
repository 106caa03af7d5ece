"""Whether upstream has taken up what a replacement changes.

The change is what the replacement has and the old original has not, and the other way
round, statement by statement. It is absorbed when the new original has the first and
has not the second.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable

from patchkit.symbols._normalform import digest_of, tokens

_NESTING = ("body", "orelse", "finalbody", "handlers", "cases")
_ENOUGH = 0.7


def absorbed(
    old: ast.AST | None, replacement: ast.AST, new: ast.AST, *, calls: Iterable[ast.Call] = ()
) -> tuple[float, str] | None:
    """How sure it is that `new` contains the replacement's change, and why.

    Args:
        old: The original that the replacement was written against, if known.
        replacement: The replacement's definition.
        new: The original at the version asked about.
        calls: Calls of the original inside the replacement.

    Returns:
        None where it does not, or where nothing can be said.
    """
    theirs = _statements(new)
    mine = _statements(replacement, without=calls)
    if not mine:
        return None
    if not calls and mine == theirs:
        return 1.0, "the body there is the replacement's, statement by statement"
    if old is None:
        return None
    before = _statements(old)
    if theirs == before:
        return None
    added = mine - before
    if calls:
        removed: Counter[str] = Counter()
    else:
        removed = before - mine
    brought = theirs - before
    if not added and not removed:
        return None
    found = sum((added & brought).values())
    dropped = sum((removed - theirs).values())
    total = sum(added.values()) + sum(removed.values())
    score = (found + dropped) / total
    if added and not found:
        return None
    if calls and sum(added.values()) < 1:
        return None
    if score < _ENOUGH:
        return None
    text = (
        f"{found} of {sum(added.values())} statements that the replacement adds are in the "
        f"original there"
    )
    if removed:
        text += f", and {dropped} of {sum(removed.values())} that it drops are gone from it"
    # What a wrapper adds around a call may be there by chance; a whole body is not.
    return round(min(score, 0.9 if calls else 0.98), 2), text


def _statements(node: ast.AST, without: Iterable[ast.Call] = ()) -> Counter[str]:
    """The simple statements of a definition and the heads of the others, by digest."""
    skipped = {id(call) for call in without}
    found: Counter[str] = Counter()
    inside = ast.Module(body=getattr(node, "body", []), type_ignores=[])
    if isinstance(node, ast.Lambda):
        return Counter([digest_of(tokens([node.body]))])
    for statement in ast.walk(inside):
        if not isinstance(statement, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            continue
        if isinstance(statement, (ast.Pass, ast.Global, ast.Nonlocal)):
            continue
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        if skipped and any(id(inner) in skipped for inner in ast.walk(statement)):
            continue
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            continue
        found[digest_of(tokens(_head(statement)))] += 1
    return found


def _head(statement: ast.AST) -> list[ast.AST]:
    """A statement without the statements inside of it."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return [ast.Name(statement.name, ast.Load()), statement.args]
    if not any(hasattr(statement, field) for field in _NESTING):
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            return [ast.Assign([statement.target], statement.value)]
        return [statement]
    parts: list[ast.AST] = [ast.Name(type(statement).__name__, ast.Load())]
    for name, value in ast.iter_fields(statement):
        if name in _NESTING:
            continue
        if isinstance(value, ast.AST):
            parts.append(value)
        elif isinstance(value, list):
            parts += [v for v in value if isinstance(v, ast.AST)]
    return parts
