"""Whether a replacement accepts every call that its target accepts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from patchkit.symbols import Parameter, SymbolFacts

_POSITIONAL = ("positional-only", "positional-or-keyword")


@dataclass(frozen=True, slots=True)
class Problem:
    """One way in which a replacement does not fit.

    Attributes:
        parameter: The parameter concerned, empty where it is not about one.
        text: What is wrong, in words.
        by_position: Whether only calls are concerned that pass something optional by its
            position.
    """

    parameter: str
    text: str
    by_position: bool = False


def parameters_of(args: ast.arguments) -> tuple[Parameter, ...]:
    """The parameters of a function of the project."""
    found: list[Parameter] = []
    positional = [*args.posonlyargs, *args.args]
    first_default = len(positional) - len(args.defaults)
    for index, arg in enumerate(positional):
        kind = "positional-only" if index < len(args.posonlyargs) else "positional-or-keyword"
        default = args.defaults[index - first_default] if index >= first_default else None
        found.append(_parameter(arg, kind, default))
    if args.vararg:
        found.append(_parameter(args.vararg, "var-positional", None))
    for arg, value in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found.append(_parameter(arg, "keyword-only", value))
    if args.kwarg:
        found.append(_parameter(args.kwarg, "var-keyword", None))
    return tuple(found)


def _parameter(arg: ast.arg, kind: str, default: ast.expr | None) -> Parameter:
    return Parameter(
        name=arg.arg, kind=kind, default=ast.unparse(default) if default is not None else None
    )


def misfits(
    target: SymbolFacts,
    replacement: tuple[Parameter, ...],
    *,
    receiver: bool,
    before: SymbolFacts | None = None,
) -> Iterator[Problem]:
    """Calls that the target binds and the replacement does not.

    Args:
        target: The target at the version asked about.
        replacement: The parameters of what replaces it.
        receiver: Whether the first parameter of both is `self` or `cls`.
        before: The target at the version that the replacement was written for: a
            parameter that has another name there, too, was known to have it.
    """
    wanted = list(target.parameters)
    given = list(replacement)
    if receiver:
        wanted = _without_receiver(wanted)
        given = _without_receiver(given)
    any_positional = any(p.kind == "var-positional" for p in given)
    any_keyword = any(p.kind == "var-keyword" for p in given)
    places = [p for p in given if p.kind in _POSITIONAL]
    by_name = {p.name: p for p in given if p.kind not in ("var-positional", "var-keyword")}
    renamed_before = _renamed(before, replacement, receiver) if before is not None else set()
    taken: set[str] = set()
    in_order = _in_order(wanted, places)
    place = 0
    for parameter in wanted:
        if parameter.kind == "var-positional":
            if not any_positional:
                yield Problem(parameter.name, f"it takes no *{parameter.name}")
            continue
        if parameter.kind == "var-keyword":
            if not any_keyword:
                yield Problem(parameter.name, f"it takes no **{parameter.name}")
            continue
        if parameter.kind == "keyword-only":
            mine = by_name.get(parameter.name)
            if mine is None and not any_keyword:
                yield Problem(
                    parameter.name, f"the target has a keyword {parameter.name} that it does not"
                )
            elif mine is not None:
                taken.add(mine.name)
                if mine.required and not parameter.required:
                    yield Problem(parameter.name, f"{parameter.name} has no default in it")
            continue
        mine = places[place] if place < len(places) else None
        place += 1
        if mine is None:
            yield from _not_placed(parameter, by_name, any_positional, any_keyword, taken)
            continue
        taken.add(mine.name)
        if mine.required and not parameter.required:
            yield Problem(
                parameter.name, f"the target's {parameter.name} has a default, its own has none"
            )
        if mine.name != parameter.name and parameter.kind != "positional-only":
            elsewhere = by_name.get(parameter.name)
            if elsewhere is not None:
                yield Problem(
                    parameter.name,
                    f"{parameter.name} stands at another place: the target has it at "
                    f"{wanted.index(parameter)}, it at {places.index(elsewhere)}"
                    if elsewhere in places
                    else f"it takes {parameter.name} by keyword only",
                    by_position=in_order
                    and elsewhere in places
                    and not parameter.required
                    and not elsewhere.required,
                )
            elif any_keyword:
                continue
            elif before is None and not parameter.required:
                # What has a default is passed by its name as a rule.
                yield Problem(
                    parameter.name,
                    f"the target's optional parameter {parameter.name} has another name in it",
                )
            elif before is not None and mine.name not in renamed_before:
                yield Problem(
                    parameter.name,
                    f"the target's parameter {mine.name} is called {parameter.name} now",
                )
    for parameter in given:
        if parameter.name in taken or not parameter.required:
            continue
        if parameter.kind in _POSITIONAL and any(p.kind == "var-positional" for p in wanted):
            continue
        yield Problem(
            parameter.name, f"it requires {parameter.name}, which the target does not have"
        )


def _in_order(wanted: list[Parameter], places: list[Parameter]) -> bool:
    """Whether what both have stands in the same order: one has more in between, no more."""
    mine = {p.name for p in places}
    theirs = [p.name for p in wanted if p.kind in _POSITIONAL and p.name in mine]
    return theirs == [p.name for p in places if p.name in set(theirs)]


def _not_placed(
    parameter: Parameter,
    by_name: dict[str, Parameter],
    any_positional: bool,
    any_keyword: bool,
    taken: set[str],
) -> Iterator[Problem]:
    mine = by_name.get(parameter.name)
    if mine is not None:
        taken.add(mine.name)
        if not any_positional and mine.kind == "keyword-only":
            yield Problem(parameter.name, f"it takes {parameter.name} by keyword only")
        return
    if any_positional and any_keyword:
        return
    if any_positional and parameter.kind == "positional-only":
        return
    if any_keyword:
        if parameter.required:
            yield Problem(
                parameter.name,
                f"the target takes {parameter.name} by position, it by keyword only",
            )
        return
    if any_positional:
        if not parameter.required:
            return
        return
    yield Problem(
        parameter.name, f"the target has a parameter {parameter.name} that it does not have"
    )


def _renamed(before: SymbolFacts, replacement: tuple[Parameter, ...], receiver: bool) -> set[str]:
    """Names in the replacement that stood for others from the beginning."""
    wanted, given = list(before.parameters), list(replacement)
    if receiver:
        wanted, given = _without_receiver(wanted), _without_receiver(given)
    positional = [p for p in wanted if p.kind in _POSITIONAL]
    mine = [p for p in given if p.kind in _POSITIONAL]
    return {b.name for a, b in zip(positional, mine, strict=False) if a.name != b.name}


def _without_receiver(parameters: list[Parameter]) -> list[Parameter]:
    if parameters and parameters[0].kind in _POSITIONAL:
        return parameters[1:]
    return parameters


def misbound_call(target: SymbolFacts, call: ast.Call, *, receiver: bool) -> Iterator[Problem]:
    """Why a call of the original inside the replacement does not bind any more.

    Args:
        target: The original at the version asked about.
        call: The call.
        receiver: Whether the call passes `self` or `cls` explicitly.
    """
    starred = any(isinstance(a, ast.Starred) for a in call.args)
    double = any(k.arg is None for k in call.keywords)
    wanted = list(target.parameters)
    if not receiver and target.kind in ("method", "classmethod"):
        wanted = _without_receiver(wanted)
    positional = [p for p in wanted if p.kind in _POSITIONAL]
    names = {p.name: p for p in wanted}
    count = len([a for a in call.args if not isinstance(a, ast.Starred)])
    if not any(p.kind == "var-positional" for p in wanted) and count > len(positional):
        yield Problem(
            "", f"it passes {count} arguments by position, the original takes {len(positional)}"
        )
    if not any(p.kind == "var-keyword" for p in wanted):
        for keyword in call.keywords:
            if keyword.arg is None:
                continue
            found = names.get(keyword.arg)
            if found is None or found.kind in ("positional-only", "var-positional", "var-keyword"):
                yield Problem(
                    keyword.arg, f"it passes {keyword.arg} to the original, which has none"
                )
    if starred or double:
        return
    given = {k.arg for k in call.keywords}
    for index, parameter in enumerate(positional):
        if parameter.required and index >= count and parameter.name not in given:
            yield Problem(
                parameter.name, f"it does not pass {parameter.name}, which the original requires"
            )
    for parameter in wanted:
        if parameter.kind == "keyword-only" and parameter.required and parameter.name not in given:
            yield Problem(
                parameter.name, f"it does not pass {parameter.name}, which the original requires"
            )
