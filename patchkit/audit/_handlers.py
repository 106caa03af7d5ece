"""What a model of a call looks like: its values in, its value out."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING

from patchkit.audit._values import Value

if TYPE_CHECKING:
    from patchkit.audit._expressions import Frame

Args = tuple[Value, ...]
Kwargs = dict[str, Value]
Handler = Callable[[Args, Kwargs, "Frame", ast.AST], Value]
