"""What is known about a symbol, and its form in JSON.

A *record* is the JSON object that a manifest holds for one symbol: the fields of
:class:`SymbolFacts` under the same names, without those that are empty. Reading a
whole package makes records only; facts are made from them when they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Record = dict[str, Any]

POSITIONAL_ONLY = "positional-only"
POSITIONAL_OR_KEYWORD = "positional-or-keyword"
VAR_POSITIONAL = "var-positional"
KEYWORD_ONLY = "keyword-only"
VAR_KEYWORD = "var-keyword"
PARAMETER_KINDS = (
    POSITIONAL_ONLY,
    POSITIONAL_OR_KEYWORD,
    VAR_POSITIONAL,
    KEYWORD_ONLY,
    VAR_KEYWORD,
)

SYMBOL_KINDS = (
    "function",
    "method",
    "staticmethod",
    "classmethod",
    "property",
    "cached_property",
    "class",
    "attribute",
)
CALLABLE_KINDS = frozenset({"function", "method", "staticmethod", "classmethod"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a function.

    Attributes:
        name: Its name.
        kind: One of PARAMETER_KINDS.
        default: The default as source text, None where there is none.
        annotation: The annotation as source text, None where there is none.
    """

    name: str
    kind: str = POSITIONAL_OR_KEYWORD
    default: str | None = None
    annotation: str | None = None

    @property
    def required(self) -> bool:
        """Whether a call must supply it."""
        return self.default is None and self.kind not in (VAR_POSITIONAL, VAR_KEYWORD)

    @property
    def positional(self) -> bool:
        """Whether a call may supply it by position (``*args`` apart)."""
        return self.kind in (POSITIONAL_ONLY, POSITIONAL_OR_KEYWORD)

    def __str__(self) -> str:
        stars = {VAR_POSITIONAL: "*", VAR_KEYWORD: "**"}.get(self.kind, "")
        text = stars + self.name
        if self.annotation is not None:
            text += f": {self.annotation}"
        if self.default is not None:
            text += f" = {self.default}" if self.annotation is not None else f"={self.default}"
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class SymbolFacts:
    """What static reading says about one symbol.

    Attributes:
        symbol: The name that was asked for, ``package.module:Qual.name``.
        kind: One of SYMBOL_KINDS.
        parameters: The parameters; of a class, those of its own constructor.
        returns: The return annotation; of an attribute, its annotation.
        is_async: Whether it is an ``async def``.
        is_generator: Whether it yields.
        decorators: The decorators as source text, outermost first.
        body_digest: Digest of the normalised body: no docstring, comments or layout.
        digest: Digest of the body, the signature (names, kinds, order, defaults), the
            kind and the decorators. Reviewed digests are these.
        file: Where it is defined, relative to the directory that holds the package.
        line: The line of its ``def``, ``class`` or assignment.
        value: The value of an attribute as source text, cut when long.
        bases: The bases of a class, as symbols where the file says what they are.
        inherited_from: The symbol that defines it, when the class named does not.
        reexport_of: The symbol that defines it, when the module named only imports it.
        aliases: Other places in the package that hold it: ``from m import name``.
        depends_on: Digests of the symbols that a patch says its target depends on.
        selectors: What decides whether it runs at all: environment variables and their
            defaults, registries and the name it is registered under.
        alternatives: How many further definitions of the name there are, in other
            branches of an ``if`` or ``try``; they count in both digests.
        lines: First lines of all definitions, decorators not counted.
        overloads: How many ``@overload`` declarations stand before it.
        sketch: A fingerprint of the code for finding it again after a move or rename.
    """

    symbol: str
    kind: str
    parameters: tuple[Parameter, ...] = ()
    returns: str | None = None
    is_async: bool = False
    is_generator: bool = False
    decorators: tuple[str, ...] = ()
    body_digest: str = ""
    digest: str = ""
    file: str = ""
    line: int = 0
    value: str | None = None
    bases: tuple[str, ...] = ()
    inherited_from: str | None = None
    reexport_of: str | None = None
    aliases: tuple[str, ...] = ()
    depends_on: Mapping[str, str] = field(default_factory=dict)
    selectors: Mapping[str, str] = field(default_factory=dict)
    alternatives: int = 0
    lines: tuple[int, ...] = ()
    overloads: int = 0
    sketch: str = ""

    @property
    def defined_at(self) -> str:
        """The symbol under which it is defined."""
        return self.inherited_from or self.reexport_of or self.symbol

    @property
    def signature(self) -> str:
        """The signature as source text."""
        text = render_parameters(self.parameters)
        return f"({text})" + (f" -> {self.returns}" if self.returns else "")

    def as_record(self) -> Record:
        """The JSON object for a manifest."""
        record: Record = {"kind": self.kind}
        if self.parameters:
            record["parameters"] = [
                [p.name, p.kind, p.default, p.annotation] for p in self.parameters
            ]
        for name in _PLAIN:
            value = getattr(self, name)
            if value:
                record[name] = list(value) if isinstance(value, tuple) else value
        for name in ("depends_on", "selectors"):
            if getattr(self, name):
                record[name] = dict(getattr(self, name))
        return record


_PLAIN = (
    "returns", "is_async", "is_generator", "decorators", "body_digest", "digest", "file",
    "line", "value", "bases", "inherited_from", "reexport_of", "aliases", "alternatives",
    "lines", "overloads", "sketch",
)  # fmt: skip
_TUPLES = ("decorators", "bases", "aliases", "lines")


def facts_of(symbol: str, record: Record) -> SymbolFacts:
    """The facts that a record holds; raises TypeError where the record is malformed."""
    values = dict(record)
    values["parameters"] = tuple(
        Parameter(name=n, kind=k, default=d, annotation=a)
        for n, k, d, a in record.get("parameters", ())
    )
    for name in _TUPLES:
        if name in values:
            values[name] = tuple(values[name])
    return SymbolFacts(symbol=symbol, **values)


def render_parameters(parameters: tuple[Parameter, ...]) -> str:
    """Parameters as they stand between the parentheses of a ``def``."""
    pieces: list[str] = []
    last_positional_only = sum(p.kind == POSITIONAL_ONLY for p in parameters) - 1
    star = False
    for index, parameter in enumerate(parameters):
        if parameter.kind == VAR_POSITIONAL:
            star = True
        elif parameter.kind == KEYWORD_ONLY and not star:
            pieces.append("*")
            star = True
        pieces.append(str(parameter))
        if index == last_positional_only:
            pieces.append("/")
    return ", ".join(pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """What static reading says about one module.

    Attributes:
        module: Its dotted name.
        file: Its file, relative to the directory that contains the package.
        symbols: Qualified name -> facts, of everything defined here.
        references: Qualified name -> symbol or module that it refers to: imports and
            plain assignments of one name to another.
        stars: Modules from which everything is imported.
        exports: What ``__all__`` says, None where there is none.
        lazy: References that exist at run time only if the module resolves names lazily.
        dynamic: Whether the module defines ``__getattr__`` or replaces itself.
    """

    module: str
    file: str
    symbols: Mapping[str, SymbolFacts]
    references: Mapping[str, str] = field(default_factory=dict)
    stars: tuple[str, ...] = ()
    exports: tuple[str, ...] | None = None
    lazy: Mapping[str, str] = field(default_factory=dict)
    dynamic: bool = False
