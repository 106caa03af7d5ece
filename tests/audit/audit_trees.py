"""Small trees of Python files: projects, and packages that they patch."""

from __future__ import annotations

import textwrap
from pathlib import Path

LIB_1 = {
    "lib/__init__.py": """
        from lib.core import Engine, helper
        __version__ = "1.0"
        LIMIT = 10
    """,
    "lib/core.py": """
        REGISTRY = {"a": 1}
        NAMES = []
        class Engine:
            size = 1
            def run(self, x, y=0):
                return x + y
            def stop(self): return None
            @staticmethod
            def make(kind): return kind
            @classmethod
            def load(cls, path): return cls()
            @property
            def name(self): return "engine"
            async def arun(self, x): return x
            class Inner:
                def go(self): return 1
        class Sub(Engine):
            pass
        def helper(a, b=1):
            return a * b
        def other(a):
            return a
    """,
    "lib/users.py": """
        from lib.core import helper as h, Engine
        def use(): return h(1)
    """,
    "lib/sub/__init__.py": "",
    "lib/sub/mod.py": """
        from lib.registry import Manager
        def f(a): return a
        class K:
            def m(self, a): return a
            def n(self): return 0
        FLAG = True
        state = object()
    """,
    "lib/registry.py": """
        class Manager:
            table = {}
            @classmethod
            def register(cls, name, value): cls.table[name] = value
            @classmethod
            def register_module(cls, name=None, module=None): cls.table[name] = module
        MODELS = Manager()
    """,
}


def write_tree(root: Path, files: dict[str, str]) -> Path:
    """Write files below a folder."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), "utf-8")
    return root
