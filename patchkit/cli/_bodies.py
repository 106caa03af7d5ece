"""What changed in the code of a symbol, as a readable diff without the noise."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from difflib import unified_diff

from patchkit.symbols.drift import Drift, Kind, SourceView, View, definition, installed_source


def body_diffs(drift: Drift, old: View, new: View) -> Iterator[str]:
    """One unified diff per changed symbol; docstrings, comments and layout left out."""
    before, after = _with_source(old), _with_source(new)
    for finding in drift.findings:
        if finding.kind in (Kind.UNCHANGED, Kind.REMOVED) or finding.new is None:
            continue
        if before is None or after is None:
            missing = " and ".join(v.label for v in (old, new) if _with_source(v) is None)
            yield f"# {finding.symbol}: no source of {missing}; name a wheel or a folder"
            continue
        left = _lines(before, finding.old)
        right = _lines(after, finding.new)
        lines = unified_diff(
            left,
            right,
            f"{old.label}  {finding.old.defined_at}",
            f"{new.label}  {finding.new.defined_at}",
            lineterm="",
        )
        yield "\n".join(lines) or f"# {finding.symbol}: no difference in its own code"


def _with_source(view: View) -> SourceView | None:
    if isinstance(view, SourceView):
        return view
    source = installed_source(view.package, view.version)
    return SourceView(source) if source is not None else None


def _lines(view: SourceView, facts) -> list[str]:  # type: ignore[no-untyped-def]
    node = definition(view, facts)
    if node is None:
        return []
    return ast.unparse(_WithoutDocstrings().visit(node)).splitlines()


class _WithoutDocstrings(ast.NodeTransformer):
    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        body = getattr(node, "body", None)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and body:
            first = body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = body[1:] or [ast.Pass()]
        return node
