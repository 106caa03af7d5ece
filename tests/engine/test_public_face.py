"""The public face: small, lazy, and the same words everywhere."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import patchkit
import patchkit.engine

HEAVY = (
    "torch",
    "transformers",
    "vllm",
    "ray",
    "pydantic",
    "typer",
    "rich",
    "structlog",
    "wrapt",
    "packaging",
    "importlib.metadata",
)


def test_the_names_are_there_and_nothing_else_is_offered() -> None:
    for name in patchkit.__all__:
        assert getattr(patchkit, name) is not None
    assert dir(patchkit) == sorted(patchkit.__all__)
    assert patchkit.install is patchkit.engine.install
    for name in patchkit.engine.__all__:
        assert hasattr(patchkit.engine, name)


def test_importing_is_cheap_and_imports_nothing_heavy() -> None:
    code = textwrap.dedent(
        f"""
        import sys
        before = set(sys.modules)
        import patchkit, patchkit.errors
        assert "patchkit.engine" not in sys.modules
        patchkit.Patch, patchkit.Adapter, patchkit.install
        print([name for name in {HEAVY} if name in sys.modules and name not in before])
        """
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
