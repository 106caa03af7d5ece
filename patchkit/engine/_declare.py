"""Declarations: what an adapter wants changed. Data only, nothing is imported or resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from patchkit.engine._inert import ATOM_TYPES, content_of
from patchkit.engine.errors import DeclarationError
from patchkit.errors import ConfigurationError
from patchkit.symbols import Symbol

Action = Literal["replace", "wrap", "value", "register", "dispatch"]
Side = Literal["rollout", "trainer"]
SIDES: tuple[Side, ...] = get_args(Side)
Treatment = Literal["exact", "stock", "unused"]

# Written in Patch.accepts_unreachable, these stand for holders without a name.
NATIVE = "native"  # references from C++ or running frames, counted but not visible
FROZEN = "gc.freeze"  # the collector was frozen: instances and closures cannot be searched


@dataclass(frozen=True, slots=True)
class Value:
    """A literal for ``action="value"`` where the value itself is a string.

    A bare string in ``Patch.replacement`` is always a reference.
    """

    value: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """One change to one symbol.

    Attributes:
        symbol: ``package.module:Qual.name``. An inherited member is patched in
            the class that defines it, unless ``on_subclass`` is set.
        action: ``replace`` a function, method, property or class; ``wrap`` a
            function; set a ``value``; ``register`` an entry of a registry;
            ``dispatch``: override an operator in the torch dispatcher.
        replacement: A reference ``"module:qualname"``, resolved when the patch
            is planned, so that declaring imports nothing; or the object. For
            ``wrap`` it is a factory: ``factory(original)`` returns the function
            to install, with the original's signature, so that an active wrap
            costs its own call and no trampoline.
        versions: PEP 440 specifiers of the target's package. Outside of them
            the patch does not apply.
        reason: Why the change is needed.
        consequence: What goes wrong numerically when it is left out.
        until: When it can be deleted.
        depends_on: Symbols the replacement relies on; they are reviewed too.
        accepts_unreachable: Names of references (as ``patchkit check`` prints
            them; a trailing ``*`` is a prefix match) that may go on to hold
            the old object.
        required: Whether the canary must reach it.
        key: For ``register`` the entry; for ``dispatch`` the dispatch key
            (``"CPU"``, ``"CUDA"`` …).
        door: For ``register``: a reference to ``door(registry, key, value)``
            that enters the value where ``registry[key] = value`` is not the
            registry's own way.
        on_subclass: Write an inherited member into the class that was named.
        rebind_instances: Rebind live instances that bound the old function.
        caches: ``functools`` caches whose answers depend on the target; they
            are cleared at install and at undo.
        stacks_on: Other patched symbols of the same method resolution order
            (or decorator chain) that this one knowingly runs on top of.
        profiles: Names of the adapter's profiles that it belongs to; empty: all.
        always: On the trainer side: acts outside ``exact_context()`` as well.
        evidence: Reference to ``evidence() -> bool``, for a patch whose absence a
            small sample need not show: whether the operator itself differs from the
            one that it replaces.
    """

    symbol: str
    action: Action
    replacement: Any
    reason: str
    consequence: str
    until: str
    versions: str = ""
    depends_on: tuple[str, ...] = ()
    accepts_unreachable: tuple[str, ...] = ()
    required: bool = True
    key: str | None = None
    door: str = ""
    on_subclass: bool = False
    rebind_instances: bool = False
    caches: tuple[str, ...] = ()
    stacks_on: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ()
    always: bool = False
    evidence: str = ""

    def __post_init__(self) -> None:
        texts = ("symbol", "reason", "consequence", "until", "evidence", "door")
        if problems := [
            f"{f} is no string" for f in texts if not isinstance(getattr(self, f), str)
        ]:
            raise DeclarationError(f"the patch of {self.symbol}", problems)
        Symbol.parse(self.symbol)
        if self.action not in get_args(Action):
            problems.append(f"action {self.action!r} is none of {', '.join(get_args(Action))}")
        for field in ("reason", "consequence", "until"):
            if not getattr(self, field).strip():
                problems.append(f"{field} is empty: say it for whoever reads this in a year")
        if self.action in ("register", "dispatch") and not self.key:
            problems.append(f'action "{self.action}" needs a key')
        if self.action not in ("register", "dispatch") and self.key:
            problems.append(f'action "{self.action}" takes no key')
        for field in ("depends_on", "accepts_unreachable", "caches", "stacks_on", "profiles"):
            if not isinstance(getattr(self, field), tuple):
                kind = type(getattr(self, field)).__name__
                problems.append(f"{field} is a {kind}; write a tuple")
        if isinstance(self.replacement, str):
            Symbol.parse(self.replacement)
        if self.evidence:
            Symbol.parse(self.evidence)
        if self.versions:
            problems += _unusable(self.versions)
        if problems:
            raise DeclarationError(f"the patch of {self.symbol}", problems)

    @property
    def identity(self) -> str:
        """The symbol, with the key for actions that have one."""
        return f"{self.symbol}[{self.key}]" if self.key else self.symbol

    @property
    def replacement_name(self) -> str:
        """The replacement in words that are equal in every process."""
        value = self.replacement
        if isinstance(value, str):
            return value
        if isinstance(value, Value):
            # A set's own repr has another order in every process.
            held = value.value
            return content_of(held) if isinstance(held, set | frozenset) else repr(held)
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if isinstance(module, str) and isinstance(name, str):
            return f"{module}:{name}"
        return repr(value) if type(value) in ATOM_TYPES else type(value).__name__


def _unusable(versions: Any) -> list[str]:
    """What is wrong with version specifiers."""
    from packaging.specifiers import SpecifierSet

    try:
        SpecifierSet(versions).contains("0")
    except (ValueError, TypeError) as error:
        return [f"versions: {str(error)[:200]}; write PEP 440 specifiers, such as >=1.2,<2"]
    return []


@dataclass(frozen=True, kw_only=True, slots=True)
class Submodule:
    """What becomes of one class of a model's submodules on the exact path.

    Attributes:
        name: ``package.module:Class``, the exact class and no subclass of it.
        side: Where the model lives.
        treatment: ``exact``: the adapter's patches compute it. ``stock``: its own code
            runs, and rounds nothing that the other side does not round alike.
            ``unused``: nothing on the exact path reads what it would compute.
        by: For ``exact`` the symbols of the patches, for ``stock`` symbols that the
            adapter relies on.
        inside: Classes of the direct parents in which this holds; empty: in any.
            General classes (``torch.nn.Linear``) are covered by what surrounds them.
        profiles: Names of the adapter's profiles for which this holds; empty: all.
        note: What a reader of the coverage table should know.
    """

    name: str
    side: Side
    treatment: Treatment
    by: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        problems = []
        for symbol in (self.name, *self.by, *self.inside):
            Symbol.parse(symbol)
        if self.side not in SIDES:
            problems.append(f"side {self.side!r} is none of {', '.join(SIDES)}")
        if self.treatment not in get_args(Treatment):
            known = ", ".join(get_args(Treatment))
            problems.append(f"treatment {self.treatment!r} is none of {known}")
        if self.treatment == "exact" and not self.by:
            problems.append("it is exact, but by names no patch that makes it so")
        if problems:
            raise DeclarationError(f"the submodule {self.name}", problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """What one model, or one model-independent change, patches on each side.

    Attributes:
        name: As in the entry-point group ``patchkit.adapters``.
        rollout: Patches of the inference engine's process, in order.
        trainer: Patches of the training process, in order; they act inside
            ``exact_context()`` only.
        relies_on: Symbols that are not patched but must be as reviewed, on the side
            whose patches are for their package (on both, if neither's are).
        reviewed: The reviewed digests, ``reviewed.json`` or its content. With
            None nothing counts as reviewed, and every output says so.
        profiles: The folder with the adapter's profiles.
        weight_map: Reference to the adapter's weight map.
        manifests: Folders with manifests of the adapter's own.
        after: Adapters that this one may be layered on, on the same symbol.
        default_profile: The profile that holds where none is named.
        covers: Reference to ``covers(config, *, rollout_tensor) -> list[Violation]``:
            what of a model's ``config.json``, at this tensor-parallel size, the claim
            does not cover.
        logprobs: Reference to ``logprobs(logits, tokens)``: the trainer's
            selected-token log-probabilities.
        tiny_model: Reference to ``tiny_model(folder, *, seed, **changes)``, which
            writes a small checkpoint for demo and conformance.
        operators: Reference to ``operators()``, which yields the operators of the
            forward path, small, for the conformance kit.
        modules: What becomes of every class of submodule, on both sides. With any
            declared for a side, a model with another one is refused.
        exercise: Reference to ``exercise(side)``, for an adapter that claims no equal
            log-probabilities: does what the side's patches are for and returns something
            whose ``repr`` shows it.
        doctor: Reference to a ``patchkit.parity.doctor.Layout``, for a model whose modules
            the doctor's default rules do not map to operators.
    """

    name: str
    rollout: tuple[Patch, ...] = ()
    trainer: tuple[Patch, ...] = ()
    relies_on: tuple[str, ...] = ()
    reviewed: Path | Mapping[str, Any] | None = None
    profiles: Path | None = None
    weight_map: str | None = None
    manifests: tuple[Path, ...] = ()
    after: tuple[str, ...] = ()
    default_profile: str = ""
    covers: str | None = None
    logprobs: str | None = None
    tiny_model: str | None = None
    operators: str | None = None
    modules: tuple[Submodule, ...] = ()
    exercise: str | None = None
    doctor: str | None = None

    def __post_init__(self) -> None:
        problems = []
        if not isinstance(self.name, str) or not self.name.isidentifier():
            problems.append(f"the name {self.name!r} is no identifier")
        for field, kind in (
            ("rollout", Patch),
            ("trainer", Patch),
            ("relies_on", str),
            ("manifests", Path),
            ("after", str),
            ("modules", Submodule),
        ):
            given = getattr(self, field)
            if not isinstance(given, tuple):
                problems.append(f"{field} is no tuple")
            elif not all(isinstance(one, kind) for one in given):
                problems.append(f"{field} holds something that is no {kind.__name__}")
        problems += self._unknown_treatments() if not problems else []
        if problems:
            raise DeclarationError(f"adapter {self.name!r}", problems)
        for symbol in self.relies_on:
            Symbol.parse(symbol)

    def _unknown_treatments(self) -> list[str]:
        """Submodules that claim a patch, or a review, which this adapter does not have."""
        known = {
            ("exact", side): {patch.symbol for patch in self.patches(side)} for side in SIDES
        } | {("stock", side): set(self.relies_on) for side in SIDES}
        return [
            f"{module.name} ({module.side}) is {module.treatment} by {symbol}, "
            + (
                "which it does not patch"
                if module.treatment == "exact"
                else "on which it does not rely"
            )
            for module in self.modules
            for symbol in module.by
            if symbol not in known.get((module.treatment, module.side), ())
        ]

    def patches(self, side: str) -> tuple[Patch, ...]:
        """The patches of one side, in order."""
        if side not in SIDES:
            raise DeclarationError(f"side {side!r}", ['it is neither "rollout" nor "trainer"'])
        return self.rollout if side == "rollout" else self.trainer

    def relied_on(self, side: str) -> tuple[str, ...]:
        """What of ``relies_on`` concerns one side.

        A trainer's machine need not have the inference engine installed, nor in the
        version that its rollout runs.
        """
        ours = {Symbol.parse(patch.symbol).package for patch in self.patches(side)}
        either = {Symbol.parse(p.symbol).package for s in SIDES for p in self.patches(s)}
        packages = {symbol: Symbol.parse(symbol).package for symbol in self.relies_on}
        return tuple(s for s, p in packages.items() if p in ours or p not in either)

    @property
    def profile_names(self) -> tuple[str, ...]:
        """Every profile that a patch belongs to, and the default one."""
        named = {name for patch in (*self.rollout, *self.trainer) for name in patch.profiles}
        return tuple(sorted(named | ({self.default_profile} - {""})))

    def profile(self, name: str | None) -> str:
        """The profile that ``name`` means; None and "" mean the default one.

        Raises:
            ConfigurationError: The adapter has no such profile.
        """
        chosen = name or self.default_profile
        if chosen and chosen not in self.profile_names:
            raise ConfigurationError(
                f"adapter {self.name!r} has no profile {chosen!r}; it has: "
                + (", ".join(self.profile_names) or "none")
            )
        return chosen
