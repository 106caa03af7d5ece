"""The normal form of whole sources, for those who compare files and not symbols."""

from __future__ import annotations

import ast

from patchkit.symbols._normalform import digest

__all__ = ["normal_digest"]


def normal_digest(source: str) -> str:
    """A digest that comments, docstrings and layout have no say in, on every Python."""
    tree = ast.parse(source)
    if tree.body and isinstance(tree.body[0], ast.Expr):
        value = tree.body[0].value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            del tree.body[0]
    return digest(tree.body)
