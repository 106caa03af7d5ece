"""Conditions: evaluated at a version, across calls, and as version ranges."""

from __future__ import annotations

from pathlib import Path

import pytest
from audit_trees import write_tree

from patchkit.audit import audit

HEAD = """
import lib
import lib.core as c
from packaging import version
from packaging.version import Version, parse
from packaging.specifiers import SpecifierSet
import importlib.metadata
from importlib.metadata import version as dist_version
def g(a, b=1): return a
V = Version(lib.__version__)
NEW = V >= Version("2.0")
def at_least(text):
    return version.parse(lib.__version__) >= version.parse(text)
"""

# condition: (applies at 1.5, applies at 2.1, as a range)
CONDITIONS: dict[str, tuple[bool, bool, str]] = {
    "Version(lib.__version__) >= Version('2.0')": (False, True, ">=2.0"),
    "parse(lib.__version__) < parse('2.0')": (True, False, "<2.0"),
    "V < Version('2.0')": (True, False, "<2.0"),
    "Version('2.0') <= V": (False, True, ">=2.0"),
    "NEW": (False, True, ">=2.0"),
    "not NEW": (True, False, "<2.0"),
    "at_least('2.0')": (False, True, ">=2.0"),
    "not at_least('2.0')": (True, False, "<2.0"),
    "Version('1.0') <= V < Version('2.0')": (True, False, ">=1.0,<2.0"),
    "V >= Version('1.0') and V < Version('2.0')": (True, False, ">=1.0,<2.0"),
    "V < Version('1.0') or V >= Version('2.0')": (False, True, ""),
    "lib.__version__ == '1.5'": (True, False, "==1.5"),
    "lib.__version__ != '1.5'": (False, True, "!=1.5"),
    "lib.__version__.startswith('2.')": (False, True, "==2.*"),
    "lib.__version__ in ('1.5', '1.6')": (True, False, ""),
    "lib.__version__ >= '2.0'": (False, True, ">=2.0"),
    "lib.__version__.split('+')[0] == '1.5'": (True, False, "==1.5"),
    "V.major >= 2": (False, True, ""),
    "V.release[:2] >= (2, 0)": (False, True, ">=2.0"),
    "tuple(map(int, lib.__version__.split('.')[:2])) >= (2, 0)": (False, True, ">=2.0"),
    "tuple(int(x) for x in lib.__version__.split('.')) >= (2, 0)": (False, True, ">=2.0"),
    "V in SpecifierSet('>=2.0,<3')": (False, True, ">=2.0,<3"),
    "SpecifierSet('<2.0').contains(lib.__version__)": (True, False, "<2.0"),
    "Version(importlib.metadata.version('lib')) >= Version('2.0')": (False, True, ">=2.0"),
    "Version(dist_version('lib')) < Version('2.0')": (True, False, "<2.0"),
    "hasattr(c, 'only_new')": (False, True, ""),
    "hasattr(lib.core.K, 'm')": (True, False, ""),
    "not hasattr(c, 'only_new')": (True, False, ""),
    "some_flag()": (True, True, ""),
    "V >= Version('2.0') and some_flag()": (False, True, ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("versions")
    core = "def f(a, b=1): return a\n"
    for version, more in (
        ("1.5", "class K:\n    def m(self): ...\n"),
        ("2.1", "def only_new(): ...\nclass K: ...\n"),
    ):
        write_tree(root / version, {
            "lib/__init__.py": f"__version__ = '{version}'\n",
            "lib/core.py": core + more,
            "lib/old_place.py" if version == "1.5" else "lib/new_place.py": core,
        })  # fmt: skip
    return [str(root / "1.5"), str(root / "2.1")]


def applies(project: Path, versions: list[str]) -> dict[str, tuple[bool, ...]]:
    report = audit(project, against=versions, workers=1)
    return {
        f.target: tuple(v.kind.value != "guard-never-true" for v in f.verdicts)
        for f in report.findings
    }


@pytest.mark.parametrize("condition", CONDITIONS)
def test_condition(condition: str, versions: list[str], tmp_path: Path) -> None:
    before, after, spec = CONDITIONS[condition]
    project = write_tree(tmp_path, {"p.py": f"{HEAD}\nif {condition}:\n    c.f = g\n"})
    report = audit(project, against=versions, workers=1)
    assert len(report.findings) == 1
    finding = report.findings[0]
    got = tuple(v.kind.value != "guard-never-true" for v in finding.verdicts)
    assert got == (before, after)
    assert finding.versions == spec


@pytest.mark.parametrize(
    ("name", "body"),
    {
        "early return": "def go():\n    if V < Version('2.0'):\n        return\n    c.f = g\ngo()",
        "guarded call": "def go():\n    c.f = g\nif V >= Version('2.0'):\n    go()",
        "guarded call of a call": (
            "def inner():\n    c.f = g\ndef go():\n    inner()\nif NEW:\n    go()"
        ),
        "assert": "assert V >= Version('2.0')\nc.f = g",
        "raise": "if V < Version('2.0'):\n    raise RuntimeError\nc.f = g",
        "else": "if V < Version('2.0'):\n    pass\nelse:\n    c.f = g",
        "function that looks the version up": (
            "def within(low, high):\n    try:\n        v = dist_version('lib')\n"
            "    except Exception as e:\n        raise RuntimeError from e\n"
            "    return parse(low) <= parse(v) <= parse(high)\n"
            "if within('2.0', '3.0'):\n    c.f = g"
        ),
        "conditional target": "t = c if NEW else object()\nt.f = g",
    }.items(),
)
def test_flow(name: str, body: str, versions: list[str], tmp_path: Path) -> None:
    project = write_tree(tmp_path, {"p.py": f"{HEAD}\n{body}\n"})
    assert applies(project, versions) == {"lib.core:f": (False, True)}, name


def test_guard_in_another_module(versions: list[str], tmp_path: Path) -> None:
    project = write_tree(tmp_path, {
        "proj/__init__.py": "",
        "proj/flags.py": HEAD,
        "proj/patches.py": (
            "import lib.core as c\ndef go():\n    c.f = lambda a, b=1: a\n"
        ),
        "proj/main.py": (
            "from proj.flags import NEW\nfrom proj import patches\nif NEW:\n    patches.go()\n"
        ),
    })  # fmt: skip
    assert applies(project, versions) == {"lib.core:f": (False, True)}


def test_fallback_import(versions: list[str], tmp_path: Path) -> None:
    project = write_tree(tmp_path, {
        "p.py": (
            "try:\n    from lib import new_place as place\nexcept ImportError:\n"
            "    from lib import old_place as place\ndef g(a, b=1): return b\nplace.f = g\n"
        )
    })  # fmt: skip
    report = audit(project, against=versions, workers=1)
    got = {f.target: [(v.kind.value, v.level or v.kind.level) for v in f.verdicts]
           for f in report.findings}  # fmt: skip
    assert got == {
        "lib.new_place:f": [("guard-never-true", "note"), ("fine", "note")],
        "lib.old_place:f": [("fine", "note"), ("guard-never-true", "note")],
    }
    assert report.new == ()


def test_replacement_of_the_same_branch(versions: list[str], tmp_path: Path) -> None:
    """Defined under one test of a flag, written under another test of it."""
    project = write_tree(tmp_path, {
        "p.py": (
            "import lib.core as c\nimport os\nold = bool(os.environ)\n"
            "if old:\n    def new(a): return 1\nelse:\n    def new(a, b=1): return 2\n"
            "if old:\n    pass\nelse:\n    c.f = new\n"
        )
    })  # fmt: skip
    report = audit(project, against=versions, workers=1)
    assert report.findings[0].signature == "(a, b=1)"
