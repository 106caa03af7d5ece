"""What will be put into the slots: replacements checked against targets, and dressed as them."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from patchkit.engine import _detour as detour
from patchkit.engine import _inert as inert
from patchkit.engine import _shape as shape
from patchkit.engine._build_entries import build_class, build_constant, build_entry
from patchkit.engine._declare import Patch
from patchkit.engine._fitting import FUNCTION_KINDS, Built, Pair, other_signature, same_shape
from patchkit.engine._switch import Switch
from patchkit.engine._targets import Target, resolve
from patchkit.engine.errors import violation
from patchkit.errors import PatchkitError, Violation
from patchkit.symbols import find_facts


def build(
    patch: Patch, target: Target, facts: Any, switch: Switch | None, find: list[Violation]
) -> Built | None:
    """Check the replacement against the target and make the new objects.

    Returns:
        The new objects, or None after adding violations to ``find``.
    """
    before = len(find)
    _same_as_source(target, facts, find)
    try:
        replacement = resolve(patch.replacement)
    except PatchkitError as error:
        find.append(
            violation(
                patch.symbol,
                "its replacement cannot be found",
                expected=str(patch.replacement),
                found=str(error),
                remedy="correct the reference in the adapter, or install what it needs",
            )
        )
        return None
    if patch.action == "value":
        built = build_constant(patch, target, replacement, switch, find)
    elif patch.action == "register":
        built = build_entry(patch, target, replacement, switch, find)
    elif target.kind == "class":
        built = build_class(patch, target, replacement, switch, find)
    elif target.kind in FUNCTION_KINDS:
        built = _function(patch, target, replacement, switch, find)
    else:
        built = None
        find.append(
            violation(
                patch.symbol,
                f'action "{patch.action}" does not fit',
                expected="a function, method, property or class",
                found=inert.describe(target.value),
                remedy='use action "value" for what is no function',
            )
        )
    return built if len(find) == before else None


_RUNS = {
    (False, False): "a plain function",
    (False, True): "a generator function",
    (True, False): "a coroutine function",
    (True, True): "an async generator function",
}


def build_static(patch: Patch, facts: Any, find: list[Violation]) -> tuple[str, ...]:
    """The checks that are possible before the target's module is imported.

    Returns:
        Notes about what could not be checked yet.
    """
    if patch.action not in ("replace", "wrap") or facts is None:
        return ()
    if patch.action == "wrap":
        return ("its factory runs when the module is imported",)
    wanted = shape.static_params(facts.parameters)
    if isinstance(patch.replacement, str):
        ours = find_facts(patch.replacement)
        if ours is None or facts.kind not in FUNCTION_KINDS or ours.decorators:
            return ("its replacement is checked when the module is imported",)
        given = shape.static_params(ours.parameters)
        kinds = (facts.is_async, facts.is_generator), (ours.is_async, ours.is_generator)
    else:
        function = inert.function_of(patch.replacement)
        if function is None or facts.kind not in FUNCTION_KINDS:
            return ()
        given = shape.params(function)
        kind = shape.run_kind(function)
        ours_runs = (kind.startswith(("async", "coroutine")), "generator" in kind)
        kinds = (facts.is_async, facts.is_generator), ours_runs
    bound = facts.kind not in ("function", "staticmethod")
    if not facts.decorators and (told := shape.difference(wanted, given, bound=bound)):
        find.append(other_signature(patch, wanted, given, told))
    if kinds[0] != kinds[1]:
        find.append(
            violation(
                patch.symbol,
                "its replacement runs in another way",
                expected=f"(async, generator) = {kinds[0]}",
                found=f"(async, generator) = {kinds[1]}",
                remedy="callers await, iterate or call it: the replacement must be of that kind",
            )
        )
    return ()


def _same_as_source(target: Target, facts: Any, find: list[Violation]) -> None:
    """The live object must be of the kind and signature that the source shows."""
    if facts is None or facts.kind not in FUNCTION_KINDS | {"class"}:
        return
    live = {"cached-function": "method" if facts.kind == "method" else "function"}.get(
        target.kind, target.kind
    )
    if live != facts.kind and not (target.kind == "value" and facts.decorators):
        find.append(
            violation(
                target.symbol,
                "its kind is not that of the source",
                expected=f"a {facts.kind}",
                found=inert.describe(target.value),
                remedy="somebody replaced it in this process; install before that happens",
            )
        )
        return
    if target.function is None or target.kind in ("property", "cached_property", "class"):
        return
    if facts.decorators or facts.alternatives:
        return  # decorators may change the signature, branches may choose another one
    told = shape.difference(
        shape.static_params(facts.parameters), shape.params(target.function), bound=False
    )
    if told:
        find.append(
            violation(
                target.symbol,
                "its signature is not that of the source",
                expected=shape.show(shape.static_params(facts.parameters)),
                found=f"{shape.show(shape.params(target.function))}: {told}",
                remedy="the file changed after it was imported, or somebody replaced the "
                "function; start a new process",
            )
        )


def _function(
    patch: Patch, target: Target, replacement: Any, switch: Switch | None, find: list[Violation]
) -> Built | None:
    old: Any = target.function
    if old is None:
        find.append(
            violation(
                patch.symbol,
                "there is no Python function inside",
                expected="a function written in Python",
                found=inert.describe(target.value),
                remedy="patch the Python function that calls it",
            )
        )
        return None
    if patch.action == "wrap":
        replacement = _made_by_factory(patch, replacement, old, find)
        if replacement is None:
            return None
    pairs = _pairs(target.value, replacement)
    new = inert.function_of(replacement)
    if new is None or pairs is None:
        find.append(
            violation(
                patch.symbol,
                "its replacement is no plain function",
                expected=f"a function defined with `def`, for a {target.kind}",
                found=inert.describe(replacement),
                remedy="write a function with the target's parameters that calls it",
            )
        )
        return None
    if switch is not None and target.kind in ("cached_property", "cached-function"):
        find.append(
            violation(
                patch.symbol,
                "an answer that is cached cannot be switched",
                expected="a function, method or property on the trainer side",
                found=f"a {target.kind}: whichever variant ran first would answer for both",
                remedy="patch the function that uses the answer",
            )
        )
        return None
    for theirs, ours in pairs:
        same_shape(patch, target, theirs, ours, switch, find)
    made: dict[int, tuple[FunctionType, FunctionType]] = {}
    choose = switch.selector() if switch is not None else None

    def make(theirs: FunctionType) -> FunctionType:
        ours = next((o for t, o in pairs if t is theirs), None)
        if ours is None:
            return theirs
        exact = shape.dressed(ours, theirs)
        installed = exact
        if switch is not None and choose is not None:
            installed = detour.switched(theirs, exact, switch, choose)
        made[id(theirs)] = (installed, exact)
        return installed

    if any(v.subject == patch.symbol for v in find):
        return None
    value = shape.redescribed(target.value, make)
    renamed = [Pair(target.value, value)]
    renamed += [Pair(t, made[id(t)][0]) for t, _ in pairs if t is not target.value]
    chain = [layer for layer in inert.layers(target.value) if type(layer) is FunctionType]
    notes = []
    if patch.action == "replace" and len(chain) > 1:
        homes = ", ".join(inert.home(f) for f in chain[:-1])
        notes.append(f"replaces its decorators too (code of {homes})")
    return Built(value, tuple(renamed), made[id(old)][1], tuple(notes))


def _made_by_factory(
    patch: Patch, factory: Any, original: FunctionType, find: list[Violation]
) -> Any:
    if not callable(factory):
        find.append(
            violation(
                patch.symbol,
                "a wrap needs a factory",
                expected="factory(original) -> function",
                found=inert.describe(factory),
                remedy="write `def factory(original): def f(…): …; return f`",
            )
        )
        return None
    try:
        return factory(original)
    except Exception as error:
        find.append(
            violation(
                patch.symbol,
                "its factory failed",
                expected="factory(original) -> function",
                found=f"{type(error).__name__}: {error}",
                remedy="correct the adapter's factory",
            )
        )
        return None


def _pairs(old: Any, new: Any) -> list[Pair] | None:
    """Which function of the old descriptor is replaced by which of the new."""
    if issubclass(type(old), property) and issubclass(type(new), property):
        both = [Pair(getattr(old, f), getattr(new, f)) for f in ("fget", "fset", "fdel")]
        if any((o is None) is not (n is None) for o, n in both):
            return None
        pairs = [pair for pair in both if pair.old is not None]
    else:
        pairs = [Pair(inert.function_of(old), inert.function_of(new))]
    if any(type(o) is not FunctionType or type(n) is not FunctionType for o, n in pairs):
        return None
    return pairs
