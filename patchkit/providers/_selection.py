"""Which implementation an operator's name stands for in this process.

The contract fixes it for every process of a run, in a variable that all of them
attest; nothing else sets it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from importlib import import_module
from typing import Any

from patchkit.errors import ConfigurationError

VARIABLE = "PATCHKIT_PROVIDERS"


class ProviderSelectionError(ConfigurationError):
    """An operator or an implementation that does not exist was chosen."""


def select(operators: Collection[str]) -> dict[str, Any]:
    """The implementations chosen for this process, by operator.

    Raises:
        ProviderSelectionError: Nothing runs with another operator than was chosen.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return {}
    try:
        chosen = json.loads(text)
        pairs = [(str(operator), str(module)) for operator, module in chosen.items()]
    except (ValueError, AttributeError) as error:
        raise ProviderSelectionError(
            f"{VARIABLE}: expected a JSON object, operator to module, found {text[:200]!r}; "
            "it is set by a contract, from [providers.use] of a profile"
        ) from error
    return {operator: _implementation(operator, module, operators) for operator, module in pairs}


def _implementation(operator: str, module: str, operators: Collection[str]) -> Any:
    if operator not in operators:
        raise ProviderSelectionError(
            f"{VARIABLE}: there is no operator {operator!r}; correct [providers.use] of the "
            f"profile: {', '.join(sorted(operators))}"
        )
    # An implementation is a module below this package or elsewhere; it is imported here,
    # while this package is, so that no caller ever sees the reference under its name.
    try:
        found = getattr(import_module(module), operator, None)
    except (ImportError, ValueError, TypeError) as error:
        raise ProviderSelectionError(
            f"{VARIABLE}: {module!r} cannot be imported ({error}); correct [providers.use] of "
            "the profile, or install it here"
        ) from error
    if found is None:
        raise ProviderSelectionError(
            f"{VARIABLE}: {module} has no {operator!r}; correct [providers.use] of the profile"
        )
    return found
