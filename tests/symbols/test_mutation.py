"""No false "unchanged": one token of a function is edited, and that is always seen."""

from __future__ import annotations

import ast
import io
import random
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import pytest

from patchkit.symbols import read_module
from patchkit.symbols.drift import Kind, compare, gravest

SWAPS = {
    "+": "-", "-": "+", "*": "+", "/": "*", "//": "/", "%": "//", "**": "*", "@": "*",
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&": "|", "|": "&",
    "^": "&", "<<": ">>", ">>": "<<", "+=": "-=", "-=": "+=", "*=": "+=", "/=": "*=", "~": "-",
    "and": "or", "or": "and", "is": "==", "in": "not in", "not": "", "True": "False",
    "False": "True", "None": "0", "break": "continue", "continue": "break", "await": "",
    "return": "yield", "yield": "await", "async": "", "pass": "return", "lambda": "lambda _x, ",
    "if": "while", "while": "if", "raise": "return", "=": "+=",
}  # fmt: skip


def functions(file: Path) -> Iterator[str]:
    """The text of each function of a file, by itself."""
    text = file.read_text("utf-8", "replace")
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            source = dedent("".join(lines[first - 1 : node.end_lineno]))
            if len(source) < 8000:
                try:
                    ast.parse(source)
                except SyntaxError:  # a string at the margin keeps dedent from working
                    continue
                yield source


def noise(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where docstrings are, and annotations of the signature: (start, end) each."""
    function = ast.parse(source).body[0]
    nodes: list[ast.AST] = [function.returns] if function.returns else []
    arguments = function.args
    for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs,
                arguments.vararg, arguments.kwarg):  # fmt: skip
        if arg is not None and arg.annotation is not None:
            nodes.append(arg.annotation)
    for node in ast.walk(function):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for statement in node.body if isinstance(node, ast.ClassDef) else node.body[:1]:
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    nodes.append(statement)
    return [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in nodes]


def edits(source: str) -> list[tuple[tuple[int, int], tuple[int, int], str]]:
    """Every edit of one token that may matter: where, and what stands there then."""
    found = []
    apart = noise(source)
    lines = source.splitlines(keepends=True)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        # Positions of syntax trees are in bytes.
        column = len(lines[token.start[0] - 1][: token.start[1]].encode()) if token.string else 0
        place = (token.start[0], column)
        if any(start <= place < end for start, end in apart):
            continue
        text = token.string
        if text in SWAPS:
            new = SWAPS[text]
        elif token.type == tokenize.NAME:
            new = text + "_x"
        elif token.type == tokenize.NUMBER:
            new = f"1{text}" if text[0] not in "0" or text == "0" else f"{text}1"
        elif token.type == tokenize.STRING and len(text) > 2:
            new = text[:-1] + "x" + text[-1] if not text.endswith('"""') else text[:-3] + 'x"""'
        else:
            continue
        found.append((token.start, token.end, new))
    return found


def edited(source: str, start: tuple[int, int], end: tuple[int, int], new: str) -> str:
    lines = source.splitlines(keepends=True)
    head = lines[start[0] - 1][: start[1]]
    tail = lines[end[0] - 1][end[1] :]
    lines[start[0] - 1 : end[0]] = [head + new + tail]
    return "".join(lines)


def one(source: str):
    """The only function of a text; None where the text is no program any more."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an edit may well compare with a literal
            compile(source, "m.py", "exec", dont_inherit=True)
    except SyntaxError:
        return None
    found = read_module(source, "m", "m.py").symbols
    return next(iter(found.values())) if len(found) == 1 else None


def survivors(files: list[Path], count: int, seed: int) -> tuple[int, list[str]]:
    """How many edits were tried, and those that were called unchanged."""
    choose = random.Random(seed)
    tried = 0
    missed = []
    while tried < count:
        sources = list(functions(choose.choice(files)))
        for source in choose.sample(sources, min(len(sources), 12)):
            before = one(source)
            possible = edits(source)
            if before is None or not possible:
                continue
            for start, end, new in choose.sample(possible, min(len(possible), 6)):
                text = edited(source, start, end, new)
                after = one(text)
                if after is None:
                    continue
                if before.symbol != after.symbol:
                    tried += 1
                    continue  # the function's own name: another symbol altogether
                tried += 1
                changes = compare(before, after)
                if before.digest == after.digest or gravest(changes) is Kind.UNCHANGED:
                    if ast.dump(ast.parse(source)) == ast.dump(ast.parse(text)):
                        continue  # `x += 1_0` for `10`: the edit changed nothing
                    missed.append(f"{new!r} at {start}: {changes}\n{source}")
    return tried, missed


def test_every_edit_of_one_token_is_seen_in_the_standard_library() -> None:
    folder = Path(sysconfig.get_path("stdlib"))
    names = ("asyncio", "json", "email", "logging", "importlib", "unittest", "concurrent/futures")
    files = sorted(f for name in names for f in (folder / name).glob("*.py"))
    tried, missed = survivors(files, 1500, seed=1)
    assert tried >= 1500
    assert not missed, "\n\n".join(missed[:3])


@pytest.mark.stack
def test_every_edit_of_one_token_is_seen_in_vllm() -> None:
    spec = find_spec("vllm")
    if spec is None:
        pytest.skip("vLLM is not installed")
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(f for f in folder.rglob("*.py") if f.stat().st_size > 500)
    tried, missed = survivors(files, 4000, seed=2)
    assert tried >= 4000
    assert not missed, "\n\n".join(missed[:3])


def test_annotations_are_noise_but_not_lost() -> None:
    before, after = one("def f(a: int) -> str: pass"), one("def f(a: float) -> bytes: pass")
    assert before.digest == after.digest
    assert [c.text for c in compare(before, after)] == [
        "annotation of a: int → float",
        "return annotation str → bytes",
    ]
