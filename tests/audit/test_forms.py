"""One row per form of patching and per near-miss: source, expected findings."""

from __future__ import annotations

from pathlib import Path

import pytest
from audit_trees import write_tree

from patchkit.audit import audit

NEW = "def new(*args, **kwargs): ...\n"

# name: (source of proj/patches.py, [(action, target, key)])
FORMS: dict[str, tuple[str, list[tuple[str, str, str | None]]]] = {
    # ---- attribute assignment through imports and aliases
    "import module as": (
        "import lib.core as c\nc.Engine.run = new",
        [("replace", "lib.core:Engine.run", None)],
    ),
    "import module": (
        "import lib.core\nlib.core.helper = new",
        [("replace", "lib.core:helper", None)],
    ),
    "from module import class": (
        "from lib.core import Engine\nEngine.run = new",
        [("replace", "lib.core:Engine.run", None)],
    ),
    "from package import module": (
        "from lib.sub import mod\nmod.K.m = new",
        [("replace", "lib.sub.mod:K.m", None)],
    ),
    "from import as": (
        "from lib.core import Engine as E\nE.Inner.go = new",
        [("replace", "lib.core:Engine.Inner.go", None)],
    ),
    "local alias": (
        "import lib.core\nE = lib.core.Engine\nmine = E\nmine.stop = new",
        [("replace", "lib.core:Engine.stop", None)],
    ),
    "alias through getattr": (
        "import lib.core\nE = getattr(lib.core, 'Engine')\nE.stop = new",
        [("replace", "lib.core:Engine.stop", None)],
    ),
    "sys.modules read": (
        "import sys\nsys.modules['lib.sub.mod'].f = new",
        [("replace", "lib.sub.mod:f", None)],
    ),
    "import_module": (
        "import importlib\nimportlib.import_module('lib.sub.mod').f = new",
        [("replace", "lib.sub.mod:f", None)],
    ),
    "dunder import with fromlist": (
        "m = __import__('lib.sub.mod', fromlist=['f'])\nm.f = new",
        [("replace", "lib.sub.mod:f", None)],
    ),
    "import_module with f-string": (
        "import importlib\nP = 'lib.sub'\nm = importlib.import_module(f'{P}.mod')\nm.f = new",
        [("replace", "lib.sub.mod:f", None)],
    ),
    "chained targets": (
        "import lib.core as c, lib.sub.mod as m\nc.helper = m.f = new",
        [("replace", "lib.core:helper", None), ("replace", "lib.sub.mod:f", None)],
    ),
    "tuple targets": (
        "import lib.core as c\nc.helper, c.other = new, new",
        [("replace", "lib.core:helper", None), ("replace", "lib.core:other", None)],
    ),
    "annotated": (
        "import lib.core as c\nc.helper: object = new",
        [("replace", "lib.core:helper", None)],
    ),
    "over two lines": (
        "import lib.core as c\nc.Engine \\\n    .run = new",
        [("replace", "lib.core:Engine.run", None)],
    ),
    "constant": ("import lib\nlib.LIMIT = 20", [("value", "lib:LIMIT", None)]),
    "constant of a class": (
        "from lib.core import Engine\nEngine.size = 2",
        [("value", "lib.core:Engine.size", None)],
    ),
    "augmented": (
        "from lib.core import Engine\nEngine.size += 2",
        [("value", "lib.core:Engine.size", None)],
    ),
    "re-export as it is named": (
        "import lib\nlib.helper = new",
        [("replace", "lib:helper", None)],
    ),
    # ---- inside of functions, branches, loops
    "in a function": (
        "def apply():\n    import lib.core as c\n    c.helper = new",
        [("replace", "lib.core:helper", None)],
    ),
    "in a method": (
        "class P:\n    def apply(self):\n        from lib.core import Engine\n"
        "        Engine.run = new",
        [("replace", "lib.core:Engine.run", None)],
    ),
    "in a nested function": (
        "def a():\n    def b():\n        import lib.core as c\n        c.helper = new\n    b()",
        [("replace", "lib.core:helper", None)],
    ),
    "in a try": (
        "try:\n    from lib.core import Engine\n    Engine.run = new\n"
        "except ImportError:\n    pass",
        [("replace", "lib.core:Engine.run", None)],
    ),
    "imported in one branch or another": (
        "try:\n    from lib.core import Engine as E\nexcept ImportError:\n"
        "    from lib.sub.mod import K as E\nE.run = new",
        [("replace", "lib.core:Engine.run", None), ("replace", "lib.sub.mod:K.run", None)],
    ),
    "with a context manager": (
        "from contextlib import contextmanager\nimport lib.core as c\n@contextmanager\n"
        "def patched():\n    old = c.helper\n    c.helper = new\n    try:\n        yield\n"
        "    finally:\n        c.helper = old",
        [("replace", "lib.core:helper", None)],
    ),
    "loop over names": (
        "import lib.core as c\nfor n in ('helper', 'other'):\n    setattr(c, n, new)",
        [("replace", "lib.core:helper", None), ("replace", "lib.core:other", None)],
    ),
    "loop over a table": (
        "import importlib\nTABLE = [('lib.core', 'helper', new), ('lib.sub.mod', 'f', new)]\n"
        "def apply():\n    for m, n, fn in TABLE:\n"
        "        setattr(importlib.import_module(m), n, fn)",
        [("replace", "lib.core:helper", None), ("replace", "lib.sub.mod:f", None)],
    ),
    "loop over a dict": (
        "import lib.core as c\nfor n, fn in {'helper': new, 'other': new}.items():\n"
        "    setattr(c, n, fn)",
        [("replace", "lib.core:helper", None), ("replace", "lib.core:other", None)],
    ),
    "loop over classes": (
        "from lib.core import Engine\nfrom lib.sub.mod import K\nfor cls in (Engine, K):\n"
        "    cls.stop = new",
        [("replace", "lib.core:Engine.stop", None), ("replace", "lib.sub.mod:K.stop", None)],
    ),
    "comprehension": (
        "import lib.core as c\n[setattr(c, n, new) for n in ('helper', 'other')]",
        [("replace", "lib.core:helper", None), ("replace", "lib.core:other", None)],
    ),
    "zip": (
        "import lib.core as c\nfor n, f in zip(['helper', 'other'], [new, new]):\n"
        "    setattr(c, n, f)",
        [("replace", "lib.core:helper", None), ("replace", "lib.core:other", None)],
    ),
    # ---- setattr and its like
    "setattr": (
        "import lib.core as c\nsetattr(c.Engine, 'run', new)",
        [("replace", "lib.core:Engine.run", None)],
    ),
    "setattr with an f-string": (
        "import lib.core as c\nK = 'run'\nsetattr(c.Engine, f'{K}', new)",
        [("replace", "lib.core:Engine.run", None)],
    ),
    "type.__setattr__": (
        "from lib.core import Engine\ntype.__setattr__(Engine, 'run', new)",
        [("replace", "lib.core:Engine.run", None)],
    ),
    "__dict__ entry": (
        "import lib.core as c\nc.__dict__['helper'] = new",
        [("replace", "lib.core:helper", None)],
    ),
    "vars().update": (
        "import lib.core as c\nvars(c).update({'helper': new, 'other': new})",
        [("replace", "lib.core:helper", None), ("replace", "lib.core:other", None)],
    ),
    "__dict__.update with keywords": (
        "import lib.core as c\nc.__dict__.update(helper=new)",
        [("replace", "lib.core:helper", None)],
    ),
    "del": ("from lib.core import Engine\ndel Engine.stop", [("delete", "lib.core:Engine.stop", None)]),
    "delattr": (
        "from lib.core import Engine\ndelattr(Engine, 'stop')",
        [("delete", "lib.core:Engine.stop", None)],
    ),
    # ---- helpers of the project
    "helper with three parameters": (
        "import lib.core as c\ndef patch_attr(target, name, value):\n"
        "    old = getattr(target, name)\n    setattr(target, name, value)\n    return old\n"
        "patch_attr(c.Engine, 'run', new)\npatch_attr(c, 'helper', new)",
        [("replace", "lib.core:Engine.run", None), ("replace", "lib.core:helper", None)],
    ),
    "helper that calls a helper": (
        "import lib.core as c\ndef low(t, n, v):\n    setattr(t, n, v)\n"
        "def high(cls, fn):\n    low(cls, 'run', fn)\nhigh(c.Engine, new)",
        [("replace", "lib.core:Engine.run", None)],
    ),
    "helper with a dotted name": (
        "import importlib\ndef patch_path(path, value):\n"
        "    module, name = path.rsplit('.', 1)\n"
        "    setattr(importlib.import_module(module), name, value)\n"
        "patch_path('lib.core.helper', new)",
        [("replace", "lib.core:helper", None)],
    ),
    "helper that writes to a mapping": (
        "from lib.core import REGISTRY\ndef put(m, k, v):\n    m[k] = v\nput(REGISTRY, 'x', new)",
        [("register", "lib.core:REGISTRY", "x")],
    ),
    "decorator that patches": (
        "from lib.core import Engine\ndef replaces(cls, name):\n    def deco(fn):\n"
        "        setattr(cls, name, fn)\n        return fn\n    return deco\n"
        "@replaces(Engine, 'run')\ndef run(self, x, y=0): return x",
        [("replace", "lib.core:Engine.run", None)],
    ),
    "class of patches": (
        "from lib.core import Engine\nclass Patcher:\n    def __init__(self, cls):\n"
        "        self.cls = cls\n    def put(self, target, name, value):\n"
        "        setattr(target, name, value)\nPatcher(Engine).put(Engine, 'run', new)",
        [("replace", "lib.core:Engine.run", None)],
    ),
    "target out of a function": (
        "def engine():\n    from lib.core import Engine\n    return Engine\nengine().run = new",
        [("replace", "lib.core:Engine.run", None)],
    ),
    "patch manager": (
        "class PM:\n    def register_patch(self, name, fn): self.p = (name, fn)\n"
        "pm = PM()\npm.register_patch('lib.core.helper', new)",
        [("replace", "lib.core:helper", None)],
    ),
    # ---- wrappers
    "wrapper that keeps the original": (
        "import lib.core as c\noriginal = c.helper\ndef mine(a, b=1):\n"
        "    return original(a, b) + 1\nc.helper = mine",
        [("wrap", "lib.core:helper", None)],
    ),
    "wrapper factory": (
        "import functools\nimport lib.core as c\ndef logged(fn):\n    @functools.wraps(fn)\n"
        "    def inner(*a, **k):\n        return fn(*a, **k)\n    return inner\n"
        "c.helper = logged(c.helper)",
        [("wrap", "lib.core:helper", None)],
    ),
    "staticmethod": (
        "from lib.core import Engine\nEngine.make = staticmethod(new)",
        [("replace", "lib.core:Engine.make", None)],
    ),
    "lambda": (
        "import lib.core as c\nc.helper = lambda a, b=1: a",
        [("replace", "lib.core:helper", None)],
    ),
    "functools.partial": (
        "import functools\nimport lib.core as c\nc.helper = functools.partial(new, 1)",
        [("replace", "lib.core:helper", None)],
    ),
    "class instead of a class": (
        "import lib.core as c\nclass Mine(c.Engine): pass\nc.Engine = Mine",
        [("replace", "lib.core:Engine", None)],
    ),
    "wrapt.wrap_function_wrapper": (
        "import wrapt\nwrapt.wrap_function_wrapper('lib.core', 'Engine.run', new)",
        [("wrap", "lib.core:Engine.run", None)],
    ),
    "wrapt under another name": (
        "from wrapt import wrap_function_wrapper as _w\nimport lib.core as c\n"
        "_w(c, 'helper', new)",
        [("wrap", "lib.core:helper", None)],
    ),
    "wrapt keywords": (
        "import wrapt\nwrapt.wrap_function_wrapper(module='lib.core', name='helper', wrapper=new)",
        [("wrap", "lib.core:helper", None)],
    ),
    "wrapt decorator": (
        "import wrapt\n@wrapt.patch_function_wrapper('lib.core', 'helper')\n"
        "def w(wrapped, instance, args, kwargs): return wrapped(*args, **kwargs)",
        [("wrap", "lib.core:helper", None)],
    ),
    "wrapt FunctionWrapper": (
        "import wrapt\nimport lib.core as c\nc.helper = wrapt.FunctionWrapper(c.helper, new)",
        [("replace", "lib.core:helper", None)],
    ),
    "wrapt.when_imported": (
        "import wrapt\n@wrapt.when_imported('lib.core')\ndef hook(module):\n"
        "    module.helper = new",
        [("replace", "lib.core:helper", None)],
    ),
    "ddtrace style": (
        "from ddtrace.contrib.trace_utils import wrap as _w\n_w('lib.core', 'Engine.run', new)",
        [("wrap", "lib.core:Engine.run", None)],
    ),
    "gorilla.Patch": (
        "import gorilla\nimport lib.core as c\np = gorilla.Patch(c, 'helper', new)\n"
        "gorilla.apply(p)",
        [("replace", "lib.core:helper", None)],
    ),
    "gorilla decorator": (
        "import gorilla\nimport lib.core as c\n@gorilla.patch(c.Engine)\ndef run(self, x, y=0): ...",
        [("replace", "lib.core:Engine.run", None)],
    ),
    "gorilla class": (
        "import gorilla\nimport lib.core as c\n@gorilla.patches(c.Engine)\nclass Mine:\n"
        "    def run(self, x, y=0): ...\n    def stop(self): ...",
        [("replace", "lib.core:Engine.run", None), ("replace", "lib.core:Engine.stop", None)],
    ),
    "mpat": (
        "from mpat import patch\n@patch('lib.core.Engine.run', note='x')\n"
        "def run(original, self, x, y=0): return original(self, x, y)",
        [("wrap", "lib.core:Engine.run", None)],
    ),
    "forbiddenfruit": (
        "from forbiddenfruit import curse\nfrom lib.core import Engine\ncurse(Engine, 'run', new)",
        [("replace", "lib.core:Engine.run", None)],
    ),
    # ---- mock
    "mock.patch started": (
        "from unittest.mock import patch\npatch('lib.core.Engine.run', new).start()",
        [("replace", "lib.core:Engine.run", None)],
    ),
    "mock.patch as a decorator": (
        "from unittest import mock\n@mock.patch('lib.core.helper')\ndef go(m): ...",
        [("replace", "lib.core:helper", None)],
    ),
    "mock.patch in with": (
        "from unittest.mock import patch\ndef go():\n    p = patch('lib.core.helper', return_value=1)\n"
        "    with p:\n        pass",
        [("replace", "lib.core:helper", None)],
    ),
    "mock.patch with a constant": (
        "from unittest.mock import patch\ndef go():\n    with patch('lib.LIMIT', 3): pass",
        [("value", "lib:LIMIT", None)],
    ),
    "mock.patch.object": (
        "from unittest.mock import patch\nfrom lib.core import Engine\n"
        "patch.object(Engine, 'run', new).start()",
        [("replace", "lib.core:Engine.run", None)],
    ),
    "mock.patch.dict": (
        "from unittest.mock import patch\nimport lib.core as c\n"
        "patch.dict(c.REGISTRY, {'x': new}).start()",
        [("register", "lib.core:REGISTRY", "x")],
    ),
    "mock.patch.multiple": (
        "from unittest.mock import patch\npatch.multiple('lib.core', helper=new, other=new).start()",
        [("replace", "lib.core:helper", None), ("replace", "lib.core:other", None)],
    ),
    "path of mock.patch in a variable": (
        "from unittest.mock import patch\npath = 'lib.core.helper'\np = patch(path, new)\np.start()",
        [("replace", "lib.core:helper", None)],
    ),
    # ---- registries, modules, classes
    "registry entry": (
        "from lib.core import REGISTRY\nREGISTRY['x'] = new",
        [("register", "lib.core:REGISTRY", "x")],
    ),
    "registry update": (
        "import lib.core as c\nc.REGISTRY.update({'x': new})",
        [("register", "lib.core:REGISTRY", "x")],
    ),
    "registry method": (
        "from lib.registry import MODELS\nMODELS.register('x', new)",
        [("register", "lib.registry:MODELS", "x")],
    ),
    "registry class": (
        "from lib.registry import Manager\nManager.register_module('x', module=new)",
        [("register", "lib.registry:Manager", "x")],
    ),
    "registry decorator": (
        "from lib.registry import Manager\n@Manager.register('x')\nclass Mine: ...",
        [("register", "lib.registry:Manager", "x")],
    ),
    "list of others": (
        "import lib.core as c\nc.NAMES.append('x')",
        [("register", "lib.core:NAMES", None)],
    ),
    "registry entry removed": (
        "import lib.core as c\ndel c.REGISTRY['a']",
        [("delete", "lib.core:REGISTRY", "a")],
    ),
    "sys.modules entry": (
        "import sys, types\nsys.modules['lib.sub.mod'] = types.ModuleType('x')",
        [("module", "lib.sub.mod", None)],
    ),
    "sys.modules from another file": (
        "import sys, pathlib\nfrom importlib.util import spec_from_file_location, module_from_spec\n"
        "s = spec_from_file_location('lib.core', pathlib.Path(__file__).with_name('mine.py'))\n"
        "m = module_from_spec(s)\ns.loader.exec_module(m)\nsys.modules['lib.core'] = m",
        [("module", "lib.core", None)],
    ),
    "sys.modules in a loop": (
        "import sys\nfrom proj import stand_in\nfor k in ('lib.core', 'lib.users'):\n"
        "    sys.modules[k] = stand_in",
        [("module", "lib.core", None), ("module", "lib.users", None)],
    ),
    "class swap by annotation": (
        "from lib.core import Engine\nclass Mine(Engine): ...\ndef go(e: Engine):\n"
        "    e.__class__ = Mine",
        [("class-swap", "lib.core:Engine", None)],
    ),
    "class swap by base": (
        "from lib.core import Engine\nclass Mine(Engine): ...\ndef go(things):\n"
        "    for e in things:\n        e.__class__ = Mine",
        [("class-swap", "lib.core:Engine", None)],
    ),
    "class of a known object": (
        "from lib.core import Engine\ne = Engine()\ntype(e).run = new",
        [("replace", "lib.core:Engine.run", None)],
    ),
    # ---- operators
    "torch library": (
        "import torch\nL = torch.library.Library('aten', 'IMPL')\nL.impl('mm', new, 'CUDA')",
        [("dispatch", "torch.ops.aten:mm", "CUDA")],
    ),
    "torch library, operator": (
        "import torch\nfrom torch.library import Library\n_lib = Library('aten', 'IMPL')\n"
        "_lib.impl('aten::addmm', new, 'CPU')",
        [("dispatch", "torch.ops.aten:addmm", "CPU")],
    ),
    "torch.library.impl": (
        "import torch\n@torch.library.impl('aten::softmax', 'CPU')\ndef f(x, d): ...",
        [("dispatch", "torch.ops.aten:softmax", "CPU")],
    ),
    "py_impl": (
        "import torch\n@torch.ops.aten.mm.default.py_impl(torch._C.DispatchKey.CPU)\n"
        "def f(a, b): ...",
        [("dispatch", "torch.ops.aten:mm", "CPU")],
    ),
    "own operator": (
        "import torch\nL = torch.library.Library('mine', 'DEF')\nL.define('f(Tensor x) -> Tensor')\n"
        "L.impl('f', new, 'CPU')",
        [],
    ),
    # ---- source rewriting
    "pathlib": (
        "import lib\nfrom pathlib import Path\np = Path(lib.__file__).parent / 'core.py'\n"
        "t = p.read_text()\np.write_text(t.replace('return a * b', 'return b * a'))",
        [("rewrite", "lib/core.py", None)],
    ),
    "os.path and open": (
        "import os, lib\ndef go():\n    path = os.path.join(os.path.dirname(lib.__file__), 'sub', 'mod.py')\n"
        "    with open(path) as f:\n        text = f.read()\n    text = text.replace('def f(a)', 'def f(a, b=0)')\n"
        "    with open(path, 'w') as f:\n        f.write(text)",
        [("rewrite", "lib/sub/mod.py", None)],
    ),
    "find_spec and helpers": (
        "import os\nfrom contextlib import contextmanager\nfrom importlib.util import find_spec\n"
        "def where(name):\n    spec = find_spec('lib')\n"
        "    base = next(iter(spec.submodule_search_locations))\n"
        "    return os.path.join(base, *name.split('/'))\n"
        "@contextmanager\ndef opened(path):\n    with open(path) as f:\n        text = f.read()\n"
        "    def back(new_text):\n        with open(path, 'w') as f:\n            f.write(new_text)\n"
        "    yield text, back\n"
        "def go():\n    file = where('core.py')\n    with opened(file) as (text, back):\n"
        "        if 'return a * b' not in text:\n            return\n"
        "        text = text.replace('return a * b', 'return 0', 1)\n        back(text)",
        [("rewrite", "lib/core.py", None)],
    ),
    "source of a function": (
        "import inspect, lib.core as c\nsrc = inspect.getsource(c.helper)\n"
        "src = src.replace('a * b', 'b * a')\nexec(src, c.__dict__)",
        [("rewrite", "lib.core:helper", None)],
    ),
    "re.sub": (
        "import re, lib\nfrom pathlib import Path\np = Path(lib.__file__).with_name('x')\n"
        "q = Path(lib.__file__).parent.joinpath('core.py')\n"
        "q.write_text(re.sub(r'return a \\* b', 'return 0', q.read_text()))",
        [("rewrite", "lib/core.py", None)],
    ),
    # ---- near-misses
    "own class": ("class Mine: ...\nMine.run = new", []),
    "own subclass": ("from lib.core import Engine\nclass Mine(Engine): ...\nMine.run = new", []),
    "own function": ("def f(): ...\nf.marker = True", []),
    "instance": ("from lib.core import Engine\ne = Engine()\ne.run = new", []),
    "instance of a parameter": ("def go(engine):\n    engine.run = new", []),
    "instance of an annotated parameter": (
        "from lib.core import Engine\ndef go(e: Engine):\n    e.run = new", []
    ),
    "self": ("class Mine:\n    def __init__(self):\n        self.run = new", []),
    "self in a foreign subclass": (
        "from lib.core import Engine\nclass Mine(Engine):\n    def __init__(self):\n"
        "        self.size = 2\n        self.__class__.total = 1", []
    ),
    "local copy of a container": (
        "from lib.core import REGISTRY\nmine = dict(REGISTRY)\nmine['x'] = new", []
    ),
    "copied container": (
        "import copy\nfrom lib.core import REGISTRY\nm = copy.deepcopy(REGISTRY)\nm['x'] = new",
        [],
    ),
    "method copy()": (
        "from lib.core import REGISTRY\nm = REGISTRY.copy()\nm['x'] = new", []
    ),
    "local name": ("from lib.core import helper\nhelper = new", []),
    "local name in a function": (
        "from lib.core import helper\ndef go():\n    helper = new\n    return helper", []
    ),
    "shadowed module": ("import lib\nclass lib:\n    pass\nlib.LIMIT = 1", []),
    "shadowed by a parameter": ("import lib\ndef go(lib):\n    lib.LIMIT = 1", []),
    "only for type checkers": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import lib\n    lib.LIMIT = 1",
        [],
    ),
    "own module": ("import proj.settings as s\ns.LEVEL = 3", []),
    "own module through sys.modules": (
        "import sys\nsys.modules['proj.old'] = sys.modules[__name__]\nsys.modules[__name__].x = 1",
        [],
    ),
    "environment": ("import os\nos.environ['X'] = '1'\nos.environ.update(Y='2')", []),
    "sys settings": ("import sys\nsys.path.insert(0, 'x')\nsys.stdout = None\nsys.argv = []", []),
    "description": ("from lib.core import helper\nhelper.__doc__ = 'x'", []),
    "object in a foreign module": ("from lib.sub.mod import state\nstate.flag = True", []),
    "configuration module": ("import torch\ntorch._inductor.config.max_autotune = True", []),
    "torch.backends": ("import torch\ntorch.backends.cudnn.benchmark = True", []),
    "item of a tensor": ("import torch\nx = torch.zeros(3)\nx[0] = 1", []),
    "attribute of a call's result": ("import lib\nlib.core.helper(1).x = 2", []),
    "deleted local": ("import lib\nx = lib.LIMIT\ndel x", []),
    "comparison": ("import lib\nassert lib.LIMIT == 10\nprint(lib.LIMIT == 1)", []),
    "keyword argument": ("import lib\nlib.core.helper(a=1, b=2)", []),
    "subclass body": ("from lib.core import Engine\nclass Mine(Engine):\n    size = 3", []),
    "marker on a foreign class": ("from lib.core import Engine\nEngine._patched = True", []),
    "original kept beside its place": (
        "import lib.core as c\ndef put(t, n, f):\n    setattr(t, '_old_' + n, getattr(t, n))\n"
        "put(c.Engine, 'run', new)", []
    ),
    "atexit": ("import atexit\natexit.register(new)", []),
    "abstract base class": ("from collections.abc import Sequence\nSequence.register(int)", []),
    "pytree registration": (
        "import torch\ntorch.utils._pytree.register_pytree_node(dict, None, None)", []
    ),
    "mock of an own name": (
        "from unittest.mock import patch\npatch('proj.settings.LEVEL', 1).start()", []
    ),
    "file of the project": (
        "from pathlib import Path\np = Path(__file__).parent / 'x.py'\n"
        "p.write_text(p.read_text().replace('a', 'b'))", []
    ),
    "reading only": (
        "import lib\nfrom pathlib import Path\nt = Path(lib.__file__).read_text()\n"
        "print(t.replace('a', 'b'))", []
    ),
    "class of the own module": (
        "import sys, types\nclass Mine(types.ModuleType): ...\n"
        "sys.modules[__name__].__class__ = Mine", []
    ),
    "module loaded by hand": (
        "import sys\nfrom importlib.util import find_spec, module_from_spec\n"
        "def lazy(name):\n    spec = find_spec(name)\n    m = module_from_spec(spec)\n"
        "    sys.modules[name] = m\n    spec.loader.exec_module(m)\nlazy('lib.core')", []
    ),
    "not implemented": ("x = NotImplemented\nx.flag = 1", []),
    "class of any object": (
        "from typing import Any\ndef go(x: Any):\n    setattr(type(x), '__setattr__', new)", []
    ),
    "sys.modules entry removed": ("import sys\nsys.modules.pop('lib.core')\ndel sys.modules['lib']", []),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_form(name: str, lib: Path, tmp_path: Path) -> None:
    source, expected = FORMS[name]
    write_tree(tmp_path, {
        "proj/__init__.py": "",
        "proj/settings.py": "LEVEL = 1\n",
        "proj/stand_in.py": "",
        "proj/patches.py": NEW + source + "\n",
    })  # fmt: skip
    report = audit(tmp_path, against=[str(lib / "lib")], workers=1)
    found = sorted((f.action, f.target, f.key) for f in report.findings)
    assert found == sorted(expected), name
