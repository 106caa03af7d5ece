"""Files, names, helpers across files, entry points, and what cannot be seen."""

from __future__ import annotations

from pathlib import Path

import pytest
from audit_trees import write_tree

from patchkit.audit import Report, audit


def run(tmp_path: Path, lib: Path, files: dict[str, str], **options: object) -> Report:
    return audit(
        write_tree(tmp_path, files), against=[str(lib / "lib")], workers=1, **options,  # type: ignore[arg-type]
    )  # fmt: skip


def targets(report: Report) -> list[str]:
    return sorted(f.target for f in report.findings)


def test_foreign_names_imported_through_the_project(tmp_path: Path, lib: Path) -> None:
    report = run(tmp_path, lib, {
        "proj/__init__.py": "",
        "proj/compat.py": "from lib.core import Engine as E\nimport lib.sub.mod as mod\n",
        "proj/deep/__init__.py": "from ..compat import *\n",
        "proj/patches.py": (
            "from .deep import E\nfrom . import compat\nE.run = print\ncompat.mod.f = print\n"
        ),
    })  # fmt: skip
    assert targets(report) == ["lib.core:Engine.run", "lib.sub.mod:f"]


def test_helper_of_another_file(tmp_path: Path, lib: Path) -> None:
    """The file that patches has no assignment, no setattr: only a call."""
    report = run(tmp_path, lib, {
        "proj/__init__.py": "",
        "proj/tool.py": "def put(where, name, what):\n    setattr(where, name, what)\n",
        "proj/use.py": (
            "import lib.core\nfrom proj.tool import put\nput(lib.core, 'helper', print)\n"
        ),
    })  # fmt: skip
    (finding,) = report.findings
    assert (str(finding.place), str(finding.through)) == ("proj/use.py:3", "proj/tool.py:2")


def test_src_layout_and_scripts(tmp_path: Path, lib: Path) -> None:
    report = run(tmp_path, lib, {
        "src/proj/__init__.py": "",
        "src/proj/names.py": "from lib.core import Engine\n",
        "src/proj/a.py": "from proj.names import Engine\nEngine.run = print\n",
        "scripts/beside.py": "from lib import core\n",
        "scripts/go.py": "import beside\nbeside.core.helper = print\n",
    })  # fmt: skip
    assert targets(report) == ["lib.core:Engine.run", "lib.core:helper"]


def test_one_file(tmp_path: Path, lib: Path) -> None:
    write_tree(tmp_path, {"p.py": "import lib\nlib.LIMIT = 1\n"})
    report = audit(tmp_path / "p.py", against=[str(lib / "lib")], workers=1)
    assert targets(report) == ["lib:LIMIT"]


def test_checkout_of_a_foreign_package_is_foreign(tmp_path: Path, lib: Path) -> None:
    report = run(
        tmp_path, lib,
        {
            "third_party/lib/__init__.py": "LIMIT = 1\n",
            "proj/__init__.py": "",
            "proj/p.py": "import lib\nlib.LIMIT = 2\n",
        },
        packages=["lib"],
    )  # fmt: skip
    assert targets(report) == ["lib:LIMIT"]


def test_folders_that_are_not_the_project(tmp_path: Path, lib: Path) -> None:
    patch = "import lib\nlib.LIMIT = 2\n"
    report = run(tmp_path, lib, {
        ".venv/p.py": patch,
        "env/pyvenv.cfg": "",
        "env/lib/p.py": patch,
        "build/lib/p.py": patch,
        "node_modules/p.py": patch,
        "stubs/p.pyi": patch,
        "ok/p.py": patch,
    })  # fmt: skip
    assert [f.place.file for f in report.findings] == ["ok/p.py"]


def test_two_processes_find_the_same(tmp_path: Path, lib: Path) -> None:
    files = {f"proj/m{i}.py": f"import lib\nx_{i} = 1\n" for i in range(400)}
    files["proj/__init__.py"] = ""
    files["proj/tool.py"] = "def put(where, name, what):\n    setattr(where, name, what)\n"
    for i in range(0, 400, 40):
        files[f"proj/m{i}.py"] = (
            f"import lib.core\nfrom proj.tool import put\nput(lib.core, 'n{i}', print)\n"
        )
    for i in range(1, 400, 2):
        files[f"proj/m{i}.py"] = f"import lib\nclass A: pass\na = A()\na.x = {i}\n"
    project = write_tree(tmp_path, files)
    one, two = (audit(project, against=[str(lib / "lib")], workers=workers) for workers in (1, 2))
    assert targets(one) == targets(two) == sorted(f"lib.core:n{i}" for i in range(0, 400, 40))


# ---- entry points --------------------------------------------------------------------

ENTRY = {
    "pyproject.toml": '[project]\nname = "p"\n[project.entry-points."vllm.general_plugins"]\n'
    'p = "proj.plugin:register"\n',
    "setup.cfg": "[options.entry_points]\nvllm.general_plugins =\n    p = proj.plugin:register\n",
    "setup.py": "from setuptools import setup\nsetup(entry_points={'vllm.general_plugins': "
    "['p = proj.plugin:register']})\n",
}


@pytest.mark.parametrize("file", ENTRY)
def test_plugin_entry_points(file: str, tmp_path: Path, lib: Path) -> None:
    report = run(tmp_path, lib, {
        file: ENTRY[file],
        "proj/__init__.py": "",
        "proj/plugin.py": "def register():\n    from proj import patches\n    patches.apply()\n",
        "proj/patches.py": (
            "import lib.core as c\nc.helper = print\ndef apply():\n    c.other = print\n"
            "def unused():\n    c.Engine.run = print\n"
        ),
        "proj/elsewhere.py": "import lib\nlib.LIMIT = 1\n",
    })  # fmt: skip
    (door,) = report.doors
    assert (door.group, door.target) == ("vllm.general_plugins", "proj.plugin:register")
    assert door.place.file == file
    reached = {f.target: bool(f.workers) for f in report.findings}
    assert reached == {
        "lib.core:helper": True, "lib.core:other": True, "lib.core:Engine.run": False,
        "lib:LIMIT": False,
    }  # fmt: skip


def test_worker_hooks_of_ray_and_vllm(tmp_path: Path, lib: Path) -> None:
    report = run(tmp_path, lib, {
        "proj/__init__.py": "",
        "proj/hook.py": "def setup():\n    import lib.core as c\n    c.helper = print\n",
        "proj/extension.py": "import lib.core as c\nc.other = print\nclass Ext: ...\n",
        "proj/main.py": (
            "import ray\nfrom proj.hook import setup\ndef go():\n"
            "    ray.init(runtime_env={'worker_process_setup_hook': setup})\n"
            "    LLM(worker_extension_cls='proj.extension.Ext')\n"
        ),
    })  # fmt: skip
    workers = {f.target: f.workers for f in report.findings}
    assert workers["lib.core:helper"] == ("worker_process_setup_hook: proj.hook:setup",)
    assert workers["lib.core:other"] == ("worker_extension_cls: proj.extension:Ext",)


# ---- not seen ------------------------------------------------------------------------

UNSEEN = {
    "name at run time": ("def go(n):\n    setattr(c, n, print)", "dynamic name"),
    "module at run time": (
        "import importlib\ndef go(m):\n    importlib.import_module(m).helper = print",
        "dynamic module",
    ),
    "module of an object": (
        "import sys\ndef go(o):\n    sys.modules[o.__module__].helper = print",
        "dynamic module",
    ),
    "class of an object": ("def go(o):\n    o.__class__.run = print", "class of an object"),
    "type of an object": ("def go(o):\n    type(o).run = print", "class of an object"),
    "exec": ("def go(code):\n    exec(code)", "exec"),
    "exec in a module": ("def go(code):\n    exec(code, c.__dict__)", "exec"),
    "import hook": ("import sys\nsys.meta_path.insert(0, object())", "import hook"),
    "mock of a computed name": (
        "from unittest.mock import patch\ndef go(n):\n    patch(n, print).start()",
        "dynamic name",
    ),
    "wrapt of a computed name": (
        "import wrapt\ndef go(m, n):\n    wrapt.wrap_function_wrapper('lib.core', n, print)",
        "dynamic name",
    ),
}


def test_a_call_that_goes_on_for_too_long_is_said(tmp_path: Path, lib: Path) -> None:
    steps = "".join(f"    x{i} = {i}\n" for i in range(700))
    report = run(tmp_path, lib, {
        "p.py": f"import lib.core\ndef put(t):\n{steps}    t.helper = print\nput(lib.core)\n"
    })  # fmt: skip
    assert targets(report) == []
    (spot,) = report.blind_spots
    assert (spot.kind, spot.text) == ("long call", "put(lib.core)")


@pytest.mark.parametrize("name", UNSEEN)
def test_what_is_not_seen_is_said(name: str, tmp_path: Path, lib: Path) -> None:
    source, kind = UNSEEN[name]
    report = run(tmp_path, lib, {"p.py": f"import lib.core as c\n{source}\n"})
    assert targets(report) == []
    (spot,) = report.blind_spots
    assert (spot.kind, spot.place.file) == (kind, "p.py")
    assert spot.reason
    assert spot.text in source
