"""Is every submodule of a live model one that its adapter has an answer for?

Patches act on classes. A norm of another class, an instance with a ``forward`` of
its own, a layer that a library put in later: none of them is reached, and nothing
would say so. An adapter therefore declares what becomes of every class of submodule
(:class:`patchkit.engine.Submodule`), and a model that holds anything else is refused:
the rollout's when a worker attests, the trainer's at its first exact forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from patchkit.engine import Submodule, installations
from patchkit.errors import Violation, ViolationsError

if TYPE_CHECKING:
    from patchkit.engine import Adapter, Installation

__all__ = ["UncoveredModelError", "declared", "require_covered", "require_once", "uncovered"]

# FSDP2 makes a subclass of each module that it shards.
_SHARDED = "torch.distributed.fsdp"


class UncoveredModelError(ViolationsError):
    """A model has submodules for which its adapter has no answer."""


def declared(adapter: Adapter, side: str, profile: str) -> tuple[Submodule, ...]:
    """What the adapter says about one side under one profile."""
    return tuple(
        module
        for module in adapter.modules
        if module.side == side and (not module.profiles or profile in module.profiles)
    )


def class_name(module: Any) -> str:
    """``package.module:Class`` of a module, whether FSDP2 has sharded it or not."""
    kind = next(k for k in type(module).__mro__ if not k.__module__.startswith(_SHARDED))
    return f"{kind.__module__}:{kind.__qualname__}"


def uncovered(model: Any, modules: Iterable[Submodule]) -> list[Violation]:
    """Every submodule that no declaration answers for, the model itself included."""
    places: dict[str, set[str]] = {}
    for module in modules:
        places.setdefault(module.name, set()).update(module.inside or ("",))
    return list(_uncovered(model, places))


def _uncovered(model: Any, places: dict[str, set[str]]) -> Iterator[Violation]:
    reported: set[tuple[str, str]] = set()
    for name, module, parent in _walk(model):
        found = class_name(module)
        known = places.get(found)
        if "forward" in vars(module):
            yield Violation(
                subject=name,
                problem="the instance has a forward of its own, which hides the patched method",
                expected=f"the forward of {found}",
                found=f"a {type(vars(module)['forward']).__name__} in the instance",
                remedy="undo what replaced it (kernelize, a per-instance patch) before the "
                "exact path is used",
            )
        if known is None or not known & {"", parent}:
            if (found, parent) in reported:
                continue  # once, not once per layer
            reported.add((found, parent))
            where = f"inside {parent}" if parent else "as the model"
            yield Violation(
                subject=name,
                problem="no declaration says what becomes of it on the exact path",
                expected="a submodule that the adapter lists"
                + (f" (this class inside {', '.join(sorted(known))})" if known else ""),
                found=f"{found} {where}",
                remedy="use a model without it, or an adapter that covers it and lists it in "
                "Adapter.modules",
            )


def _walk(model: Any) -> Iterator[tuple[str, Any, str]]:
    """Name, module and class of its direct parent, every place where a module stands."""
    seen: set[tuple[int, int]] = set()
    pending = [("", model, "")]
    while pending:
        name, module, parent = pending.pop()
        yield name or type(module).__name__, module, parent
        # The last comes off first: what is reported is the first of its kind in the model.
        for attribute, child in reversed(module._modules.items()):
            if child is not None and (id(module), id(child)) not in seen:
                seen.add((id(module), id(child)))
                pending.append((f"{name}.{attribute}".strip("."), child, class_name(module)))


def require_covered(model: Any, installation: Installation) -> int:
    """Compare a model with what the installed adapter declares.

    Returns:
        How many declarations it was compared with; 0 where the adapter makes none.

    Raises:
        UncoveredModelError: With every submodule that none of them answers for.
    """
    profile = installation.manifest.as_dict()["profile"]
    modules = declared(installation.adapter, installation.side, profile)
    if modules and (violations := uncovered(model, modules)):
        raise UncoveredModelError(
            f"adapter {installation.adapter.name} does not cover this {installation.side} model",
            violations,
        )
    return len(modules)


_covered: weakref.WeakSet[Any] = weakref.WeakSet()


def require_once(model: Any) -> None:
    """Compare a trainer's model at its first exact forward; free afterwards.

    With several trainer installations, those that know the model's class are asked.

    Raises:
        UncoveredModelError: See :func:`require_covered`.
    """
    if model in _covered:
        return
    trainers = [i for i in installations() if i.side == "trainer" and i.adapter.modules]
    name = class_name(model)
    knowing = [i for i in trainers if any(m.name == name for m in i.adapter.modules)]
    for installation in knowing or trainers:
        require_covered(model, installation)
    _covered.add(model)
