"""What the users of a symbol use instead of it now.

A function that became an attribute, or was replaced by something of another shape,
shares no code with its successor. But whoever called it calls something else now, in
a function that is otherwise much the same.
"""

from __future__ import annotations

import ast
from collections import Counter

from patchkit.symbols._match import Match, last_name, word_likeness
from patchkit.symbols._module import parse_source
from patchkit.symbols._normalform import function_body, tokens
from patchkit.symbols._symbol import Symbol
from patchkit.symbols._views import SourceView, View
from patchkit.symbols.errors import SourceUnreadableError

_MOST_USERS = 40


def replaced_at_uses(symbol: str, old: View, new: View) -> Match | None:
    """What stands in the place of a module-level symbol where it was used."""
    if not (isinstance(old, SourceView) and isinstance(new, SourceView)):
        return None
    name = Symbol.parse(symbol)
    if name.owner:
        return None
    votes: Counter[str] = Counter()
    users = 0
    for module in _users(name, old):
        for before, after in _functions_in_both(module, name.name, old, new):
            users += 1
            votes.update(_came_in(before, after, module, new))
    for known in [s for s in votes if old.facts(s) is not None]:
        del votes[known]  # what was there before is no successor
    if not votes:
        return None
    ranked = sorted(
        votes, key=lambda s: (-votes[s] - word_likeness(last_name(s).lower(), name.name.lower()), s)
    )
    chosen = ranked[0]
    share = votes[chosen] / users
    likeness = word_likeness(last_name(chosen).lower(), name.name.lower())
    if share < 0.5 or likeness < 0.3 or (users < 2 and likeness < 0.8):
        return None
    return Match(
        symbol=chosen,
        confidence=round(min(0.9, 0.35 + 0.35 * share + 0.2 * likeness), 2),
        evidence=f"used in its place by {votes[chosen]} of {users} functions that used it",
    )


def _users(symbol: Symbol, view: SourceView) -> list[str]:
    """Modules that import the symbol, its own included."""
    found = []
    for module in view.holders(symbol.name):
        raw = view.source.raw(module)
        if raw is None:
            continue
        taken = raw.references.get(symbol.name, "")
        if module == symbol.module or taken.endswith(f":{symbol.name}"):
            found.append(module)
        if len(found) >= _MOST_USERS:
            break
    return found


def _functions_in_both(
    module: str, name: str, old: SourceView, new: SourceView
) -> list[tuple[list[str], list[str]]]:
    """Token lists of the functions that used the name, before and now."""
    before = _functions(module, old)
    after = _functions(module, new)
    token = f"n{name}"
    return [
        (before[qualname], after[qualname])
        for qualname in before
        if qualname in after and token in before[qualname] and token not in after[qualname]
    ]


def _functions(module: str, view: SourceView) -> dict[str, list[str]]:
    if module in view.functions:
        return view.functions[module]
    file = view.source.modules().get(module)
    if file is None:
        return {}
    try:
        tree = parse_source(view.source.text(file), file)
    except SourceUnreadableError:
        return {}
    found: dict[str, list[str]] = {}
    stack: list[tuple[ast.AST, str]] = [(tree, "")]
    while stack:
        node, prefix = stack.pop()
        for child in getattr(node, "body", ()):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found[prefix + child.name] = tokens(function_body(child.body))
            elif isinstance(child, ast.ClassDef):
                stack.append((child, f"{prefix}{child.name}."))
    view.functions[module] = found
    return found


def _came_in(before: list[str], after: list[str], module: str, new: SourceView) -> set[str]:
    """Symbols of the package that a function uses now and did not use before."""
    raw = new.source.raw(module)
    if raw is None:
        return set()
    known = set(before)
    found = set()
    for index, token in enumerate(after):
        if token in known or token[:1] not in ("n", ".") or not token[1:].isidentifier():
            continue
        name = token[1:]
        if token[0] == "n":
            target = raw.references.get(name) or f"{module}:{name}"
        else:  # `envs.NAME`: the token of the name before the dot comes next
            head = after[index + 1] if index + 1 < len(after) else ""
            imported = raw.references.get(head[1:], "") if head[:1] == "n" else ""
            if not imported:
                continue
            target = f"{imported.replace(':', '.')}:{name}"
        if ":" not in target:
            continue
        facts = new.resolver.find(Symbol(*target.split(":", 1)))
        if facts is not None:
            found.add(str(facts.symbol))
    return found
