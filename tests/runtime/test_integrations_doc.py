"""The integration guide's code compiles, and names what patchkit really has."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

DOC = Path(__file__).parents[2] / "docs/integrations.md"
BLOCKS = dict(re.findall(r"```python file=(\S+)\n(.*?)```", DOC.read_text(), re.DOTALL))

pytestmark = pytest.mark.stack


def test_every_stack_has_code():
    assert set(BLOCKS) == {
        "exact_grpo.py",
        "patchkit_verl.py",
        "patchkit_nemo_rl.py",
        "patchkit_pipelinerl.py",
        "patchkit_unirl.py",
    }


@pytest.mark.parametrize("name", BLOCKS)
def test_it_compiles_and_its_patchkit_names_exist(name: str):
    pytest.importorskip("torch")
    tree = ast.parse(BLOCKS[name], filename=name)
    compile(tree, name, "exec")
    used = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("patchkit"):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"
                used += 1
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "patchkit"
        ):
            assert hasattr(importlib.import_module("patchkit"), node.attr), node.attr
            used += 1
    assert used > 0


@pytest.mark.parametrize("name", BLOCKS)
def test_adapters_and_profiles_that_it_installs_exist(name: str):
    from patchkit.engine import find_adapter

    for call in ast.walk(ast.parse(BLOCKS[name])):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "patchkit.install":
            given = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
            adapter = find_adapter(given["adapter"])
            assert adapter.profile(given["profile"]) == given["profile"]
            assert adapter.patches(given["side"])


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((\.\.?/[^)#]+)\)", DOC.read_text()):
        assert (DOC.parent / target).exists(), target
