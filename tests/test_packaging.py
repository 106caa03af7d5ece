"""What an installed patchkit looks like: light to import, and colliding with nobody."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

HEAVY = ("torch", "vllm", "transformers", "ray", "pydantic", "rich", "typer", "structlog")


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.parametrize(
    "imported",
    [
        "import patchkit",
        "import patchkit.errors",
        "from patchkit import install, exact_context, Adapter, Patch",
        "import patchkit_adapters.qwen3_moe",
        "import patchkit_adapters.qwen3, patchkit_adapters.glm4_moe",
        "import patchkit.bindings.vllm_cpu, patchkit.bindings.transformers",
        "import patchkit.bindings.settings, patchkit.bindings.tiny",
        "import patchkit_manifests",
        "import patchkit_vllm_plugin",
    ],
)
def test_importing_is_light(imported: str) -> None:
    code = f"import sys, json\n{imported}\nprint(json.dumps(sorted(sys.modules)))"
    loaded = set(json.loads(run(code)))
    assert not loaded & set(HEAVY)


def test_the_plugin_alone_does_not_even_import_patchkit() -> None:
    code = "import sys\nimport patchkit_vllm_plugin\npatchkit_vllm_plugin.register()\n"
    code += "print([m for m in sys.modules if m.split('.')[0] == 'patchkit'])"
    assert run(code).strip() == "[]"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Names of the files in both distributions' wheels, by distribution."""
    out = tmp_path_factory.mktemp("wheels")
    sources = tmp_path_factory.mktemp("sources")
    found = {}
    for name, folder in (("patchkit", ROOT), ("patchkit_vllm_plugin", ROOT / "plugin")):
        # A copy, so that building leaves nothing in the tree.
        copy = sources / name
        files = subprocess.run(
            ["git", "ls-files", "-z"], cwd=folder, check=True, capture_output=True, text=True
        ).stdout.split("\0")
        for file in filter(None, files):
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            (copy / file).write_bytes((folder / file).read_bytes())
        subprocess.run(
            [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
             "--no-index", "--wheel-dir", str(out), str(copy)],
            check=True,
            capture_output=True,
        )  # fmt: skip
        (wheel,) = out.glob(f"{name}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            found[name] = set(archive.namelist())
    return found


def test_the_wheel_makes_no_packages_but_its_own(wheels: dict[str, set[str]]) -> None:
    top = {name.split("/")[0] for name in wheels["patchkit"]}
    packages = {name for name in top if not name.endswith(".dist-info")}
    assert packages == {"patchkit", "patchkit_adapters", "patchkit_manifests"}


def test_the_wheel_carries_manifests_reviews_and_profiles(wheels: dict[str, set[str]]) -> None:
    names = wheels["patchkit"]
    assert "patchkit/py.typed" in names
    assert "patchkit_manifests/vllm/0.32.0.json" in names
    assert "patchkit/kit/templates/adapter.py.tmpl" in names
    assert "patchkit/providers/fast/admissions.json" in names
    for adapter in ("qwen3_moe", "qwen3", "glm4_moe"):
        assert f"patchkit_adapters/{adapter}/__init__.py" in names
        assert f"patchkit_adapters/{adapter}/reviewed.json" in names
        assert f"patchkit_adapters/{adapter}/profiles/cpu_tree.toml" in names
    modules = subprocess.run(
        ["git", "ls-files", "patchkit/*.py"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    assert modules
    assert not set(modules) - names


def test_every_adapter_that_is_registered_is_in_the_wheel(wheels: dict[str, set[str]]) -> None:
    from patchkit.engine import adapter_names, find_adapter

    built_in = {
        name
        for name in adapter_names()
        if f"patchkit_adapters/{name}/" in "\n".join(wheels["patchkit"])
    }
    assert {"qwen3_moe", "qwen3", "glm4_moe"} <= built_in
    for name in built_in:
        assert find_adapter(name).name == name


def test_the_plugin_is_one_module_in_a_distribution_of_its_own(
    wheels: dict[str, set[str]],
) -> None:
    modules = {n for n in wheels["patchkit_vllm_plugin"] if ".dist-info/" not in n}
    assert modules == {"patchkit_vllm_plugin.py"}
    assert "patchkit_vllm_plugin.py" not in wheels["patchkit"]
