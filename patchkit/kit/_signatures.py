"""A shared replacement under the signature of a model's own method.

Models of one family write the same body under signatures that differ in what has a
default. The engine takes a replacement only with exactly the target's parameters, so
such a model gets a function of its own that passes everything on.
"""

from __future__ import annotations

from dataclasses import dataclass

from patchkit.symbols import Parameter, Symbol, find_facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """A function that passes its arguments on.

    Attributes:
        name: Its name; empty where no wrapper is needed.
        shared: ``module:function`` that it calls.
        source: Its definition.
        versions: Of the target's package, at which its signature is the method's.
    """

    name: str = ""
    shared: str = ""
    source: str = ""
    versions: str = ""

    def __bool__(self) -> bool:
        return bool(self.name)


def fitting(target: str, replacement: str) -> Wrapper | None:
    """How a replacement comes to fit a target.

    Returns:
        An empty wrapper where it fits as it is; None where parameters have other names,
        kinds or places, which nobody can decide about but the author.
    """
    wanted, given = find_facts(target), find_facts(replacement)
    if wanted is None or given is None:
        return None
    if [_shape(p) for p in wanted.parameters] != [_shape(p) for p in given.parameters]:
        return None
    if [_optional(p) for p in wanted.parameters] == [_optional(p) for p in given.parameters]:
        return Wrapper()
    symbol = Symbol.parse(replacement)
    name = symbol.name
    parameters = "".join(f"    {_written(p)},\n" for p in _separated(wanted.parameters))
    arguments = "".join(f"        {_passed(p)},\n" for p in wanted.parameters)
    called = Symbol.parse(target).qualname
    return Wrapper(
        name=name,
        shared=replacement,
        source=f"def {name}(\n{parameters}) -> Any:\n"
        f'    """``{called}``: the shared replacement, under this method\'s own signature."""\n'
        f"    return shared_{name}(\n{arguments}    )\n",
    )


def _shape(parameter: Parameter) -> tuple[str, str]:
    return parameter.name, parameter.kind


def _optional(parameter: Parameter) -> bool:
    return parameter.default is not None


def _separated(parameters: tuple[Parameter, ...]) -> list[Parameter | None]:
    """With None where the bare star has to stand."""
    found: list[Parameter | None] = []
    starred = False
    for parameter in parameters:
        starred = starred or parameter.kind == "var-positional"
        if parameter.kind == "keyword-only" and not starred:
            found.append(None)
            starred = True
        found.append(parameter)
    return found


_STARS = {"var-positional": "*", "var-keyword": "**"}


def _written(parameter: Parameter | None) -> str:
    if parameter is None:
        return "*"
    text = f"{_STARS.get(parameter.kind, '')}{parameter.name}"
    text += ": Any"
    if parameter.default is not None:
        text += f" = {parameter.default}"
    return text


def _passed(parameter: Parameter) -> str:
    if parameter.kind == "keyword-only":
        return f"{parameter.name}={parameter.name}"
    return f"{_STARS.get(parameter.kind, '')}{parameter.name}"
