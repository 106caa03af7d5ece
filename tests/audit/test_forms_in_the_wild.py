"""Forms as real projects write them: tables, helpers, names of one's own, what is listed."""

from __future__ import annotations

from pathlib import Path

import pytest
from audit_trees import write_tree

from patchkit.audit import Report, audit

NEW = "def new(*args, **kwargs): ...\n"
Row = tuple[str, list[tuple[str, str, str | None]]]

FOUND: dict[str, Row] = {
    # ---- tables
    "table asked with a key known at run time only": (
        "from lib.core import Engine\nfrom lib.sub.mod import K\n"
        "TABLE = {'a': (Engine, 'run'), 'b': (K, 'm')}\n"
        "def go(kind):\n    cls, name = TABLE[kind]\n    setattr(cls, name, new)",
        [("replace", "lib.core:Engine.run", None), ("replace", "lib.sub.mod:K.m", None)],
    ),
    "list that grows": (
        "from lib.core import Engine\nfrom lib.sub.mod import K\nrows = []\n"
        "rows.append((Engine, 'run'))\nrows.extend([(K, 'm')])\n"
        "for cls, name in rows:\n    setattr(cls, name, new)",
        [("replace", "lib.core:Engine.run", None), ("replace", "lib.sub.mod:K.m", None)],
    ),
    "dict that grows": (
        "import lib.core as c\ntable = {'helper': new}\ntable['other'] = new\n"
        "table.update(Engine=new)\nfor k, v in table.items():\n    setattr(c, k, v)",
        [("replace", "lib.core:Engine", None), ("replace", "lib.core:helper", None),
         ("replace", "lib.core:other", None)],
    ),
    "dict that a function hands back grown": (
        "from lib.core import Engine\nfrom lib.sub.mod import K\ndef more(table):\n"
        "    table = dict(table)\n    table['b'] = K\n    return table\n"
        "for cls in more({'a': Engine}).values():\n    cls.stop = new",
        [("replace", "lib.core:Engine.stop", None), ("replace", "lib.sub.mod:K.stop", None)],
    ),
    # ---- helpers
    "dotted path, walked by hand": (
        "import importlib\ndef put(path, fn):\n    module, _, rest = path.partition(':')\n"
        "    place = importlib.import_module(module)\n    parts = rest.split('.')\n"
        "    for part in parts[:-1]:\n        place = getattr(place, part)\n"
        "    setattr(place, parts[-1], fn)\nput('lib.core:Engine.run', new)",
        [("replace", "lib.core:Engine.run", None)],
    ),
    "helper that looks the class up in its argument": (
        "import lib.core as c\ndef put(module):\n    cls = module.Engine\n"
        "    cls.stop = new\nput(c)",
        [("replace", "lib.core:Engine.stop", None)],
    ),
    "helper that looks the class up by name": (
        "import lib.core as c\ndef put(module, name):\n    cls = getattr(module, name)\n"
        "    cls.stop = new\nput(c, 'Engine')",
        [("replace", "lib.core:Engine.stop", None)],
    ),
    "helper inside a function": (
        "import lib.core as c\ndef go():\n    def put(name):\n        setattr(c, name, new)\n"
        "    put('helper')\n    put('other')",
        [("replace", "lib.core:helper", None), ("replace", "lib.core:other", None)],
    ),
    "decorator that names the module": (
        "import wrapt\nclass Hooks:\n    def when_loaded(self, name):\n"
        "        return wrapt.when_imported(name)\n"
        "@wrapt.when_imported('lib.sub.mod')\ndef _(module):\n    module.K.m = new",
        [("replace", "lib.sub.mod:K.m", None)],
    ),
    # ---- modules
    "sys.modules.get": (
        "import sys\nm = sys.modules.get('lib.core')\nif m is not None:\n    m.helper = new",
        [("replace", "lib.core:helper", None)],
    ),
    "builtins' import": (
        "__builtins__['__import__'] = new",
        [("replace", "builtins:__import__", None)],
    ),
    "function of os.environ": (
        "import os\nos.environ.get = new", [("replace", "os.environ:get", None)],
    ),
    "property in a configuration module": (
        "import lib.config as c\nc.Settings.level = property(new)",
        [("replace", "lib.config:Settings.level", None)],
    ),
    "code of a function": (
        "import lib.core as c\nc.helper.__code__ = new.__code__",
        [("replace", "lib.core:helper", None)],
    ),
    "class under the name that it used to have": (
        "import lib.core as c\nc.OldEngine = c.Engine", [("replace", "lib.core:OldEngine", None)],
    ),
    "nothing in its place": (
        "import lib.core as c\nc.helper = None", [("value", "lib.core:helper", None)],
    ),
    "public value on a foreign class": (
        "from lib.core import Engine\nEngine.supports_it = True",
        [("value", "lib.core:Engine.supports_it", None)],
    ),
    "registry, by the text of its key": (
        "from lib.core import REGISTRY\nKEY = 'a' + 'b'\nREGISTRY[KEY] = new",
        [("register", "lib.core:REGISTRY", "ab")],
    ),
}  # fmt: skip

NOT_FOUND: dict[str, str] = {
    "marker with the project's name": "import lib.core as c\nc._proj_applied = True",
    "original kept under the project's name": (
        "from lib.core import Engine\nEngine._proj_run = Engine.run"
    ),
    "compiled original kept": (
        "import torch\nfrom lib.core import Engine\nEngine._old_run = torch.compile(Engine.run)"
    ),
    "copy of a list": (
        "from lib.core import NAMES\nmine = list(NAMES)\nmine.append(new)\nmine[0] = new"
    ),
    "original kept, and put back": (
        "from lib.core import Engine\n"
        "def on():\n    Engine._original_run = Engine.run\n"
        "def off():\n    Engine.run = Engine._original_run\n    del Engine._original_run"
    ),
    "class method put back": (
        "from lib.core import Engine\nload = Engine.load\n"
        "def off():\n    Engine.load = classmethod(load.__func__)"
    ),
    "text for tracebacks": "import linecache\nlinecache.cache['x.py'] = (1, None, [], 'x.py')",
    "own namespace of operators": (
        "import torch\nL = torch.library.Library('proj', 'FRAGMENT')\n"
        "L.define('f(Tensor x) -> Tensor')\n"
        "M = torch.library.Library('proj', 'IMPL')\nM.impl('f', new, 'CUDA')"
    ),
    "module made by hand under an own name": (
        "import sys, types\nm = types.ModuleType('proj_generated')\n"
        "sys.modules['proj_generated'] = m"
    ),
    "own table": "TABLE = {}\nTABLE['x'] = new\nTABLE.update(y=new)",
    "table grown from a foreign one": (
        "from lib.core import REGISTRY\nmine = {**REGISTRY}\nmine['x'] = new"
    ),
    "alias that is only read": "import lib.core as c\nrows = [(c.Engine, 'run')]\nprint(rows)",
}

ONCE = {
    "put back from what the object keeps": (
        "from lib.core import Engine\nclass Log:\n    def __init__(self):\n"
        "        self._orig = None\n    def on(self):\n        self._orig = Engine.run\n"
        "        Engine.run = new\n    def off(self):\n        Engine.run = self._orig\n"
        "        self._orig = None"
    ),
    "put back from what the object keeps, imported inside": (
        "class Log:\n    def __init__(self):\n        self._orig = None\n    def on(self):\n"
        "        from lib.core import Engine\n        self._orig = Engine.run\n"
        "        Engine.run = new\n    def off(self):\n        from lib.core import Engine\n"
        "        Engine.run = self._orig"
    ),
    "put back from a table": (
        "import lib.core as c\nkept = {}\ndef on():\n    kept['run'] = c.Engine.run\n"
        "    c.Engine.run = new\ndef off():\n    c.Engine.run = kept.pop('run')"
    ),
    "put back in a context": (
        "import contextlib\nimport lib.core as c\n@contextlib.contextmanager\ndef on():\n"
        "    kept = c.Engine.run\n    c.Engine.run = new\n    try:\n        yield\n"
        "    finally:\n        c.Engine.run = kept"
    ),
}

# What cannot be followed and has to be told: source, kind of blind spot.
TOLD: dict[str, tuple[str, str]] = {
    "every module that is loaded": (
        "import sys\ndef go():\n    for m in list(sys.modules.values()):\n"
        "        if hasattr(m, 'helper'):\n            m.helper = new", "dynamic module",
    ),
    "function taken out of every module that is loaded": (
        "import sys\nfor m in list(sys.modules.values()):\n"
        "    if getattr(m, 'fast', None):\n        m.fast = None", "dynamic module",
    ),
    "every module that is loaded, by name": (
        "import sys\ndef go():\n    for name, m in sys.modules.items():\n"
        "        setattr(m, 'helper', new)", "dynamic module",
    ),
    "class out of a module known at run time only": (
        "import importlib\ndef go(name):\n    m = importlib.import_module(name)\n"
        "    m.Engine.run = new", "dynamic module",
    ),
    "special method of a class that comes in": (
        "import lib.core as c\ndef go(name):\n    c.helper = new\n    kind = c.find(name)\n"
        "    kind.__getattribute__ = new", "class of an object",
    ),
    "class under a name known at run time only": (
        "import lib.core as c\ndef go(name):\n    kind = getattr(c, name)\n    kind.run = new",
        "dynamic name",
    ),
    "class out of a foreign registry": (
        "from lib.core import REGISTRY\ndef go(name):\n    cls = REGISTRY[name]\n"
        "    cls.forward = new", "class of an object",
    ),
    "class of an object that comes in annotated": (
        "from lib.core import Engine\ndef go(e: Engine):\n    type(e).unheard_of = new",
        "class of an object",
    ),
}  # fmt: skip


def run(source: str, lib: Path, tmp_path: Path) -> Report:
    write_tree(tmp_path, {"proj/__init__.py": "", "proj/patches.py": NEW + source + "\n"})
    return audit(tmp_path, against=[str(lib / "lib")], workers=1)


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str, lib: Path, tmp_path: Path) -> None:
    source, expected = FOUND[name]
    report = run(source, lib, tmp_path)
    assert sorted((f.action, f.target, f.key) for f in report.findings) == sorted(expected)


@pytest.mark.parametrize("name", NOT_FOUND)
def test_is_no_patch(name: str, lib: Path, tmp_path: Path) -> None:
    report = run(NOT_FOUND[name], lib, tmp_path)
    assert [(f.action, f.target, f.key) for f in report.findings] == []


@pytest.mark.parametrize("name", ONCE)
def test_putting_back_is_no_patch(name: str, lib: Path, tmp_path: Path) -> None:
    report = run(ONCE[name], lib, tmp_path)
    assert [(f.target, f.replacement) for f in report.findings] == [
        ("lib.core:Engine.run", "proj.patches:new")
    ]


@pytest.mark.parametrize("name", TOLD)
def test_is_told(name: str, lib: Path, tmp_path: Path) -> None:
    source, kind = TOLD[name]
    report = run(source, lib, tmp_path)
    assert [b.kind for b in report.blind_spots] == [kind], report.findings


def test_choices_are_made_once(lib: Path, tmp_path: Path) -> None:
    """The class and the function of one entry, not each class with each function."""
    report = run(
        "from lib.core import Engine\nfrom lib.sub.mod import K\n"
        "def first(self, x, y=0): ...\ndef second(self, a): ...\n"
        "CLASSES = {'a': Engine, 'b': K}\nFUNCTIONS = {'a': first, 'b': second}\n"
        "def go(kind):\n    CLASSES[kind].run = FUNCTIONS[kind]",
        lib, tmp_path,
    )  # fmt: skip
    assert sorted((f.target, f.replacement) for f in report.findings) == [
        ("lib.core:Engine.run", "proj.patches:first"),
        ("lib.sub.mod:K.run", "proj.patches:second"),
    ]
