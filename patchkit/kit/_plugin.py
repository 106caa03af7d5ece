"""The rollout plugin in a process that did not opt in."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchkit.engine import Adapter, find_adapter, inspect_plan
from patchkit.errors import Violation
from patchkit.kit._process import clean_environment
from patchkit.kit._result import Outcome
from patchkit.symbols import Symbol

if TYPE_CHECKING:
    from patchkit.kit._stages import SuiteSettings

_PLUGIN = "patchkit"
_PROBE = Path(__file__).with_name("_plugin_probe.py")


def plugin_is_inert(settings: SuiteSettings) -> Outcome:
    """Load vLLM's plugins with every variable of ours set but the one that opts in."""
    adapter = find_adapter(settings.adapter)
    packages = {Symbol.parse(p.symbol).package for p in adapter.rollout}
    if "vllm" not in packages:
        return Outcome(not_applicable="the adapter patches nothing in a vLLM process")
    planned = inspect_plan(adapter, "rollout", profile=settings.profile)
    question = {
        "modules": sorted({Symbol.parse(p.patch.symbol).module for p in planned.patches}),
        "packages": sorted(packages),
        "ours": sorted({"patchkit", *_own_packages(adapter)}),
    }
    with tempfile.TemporaryDirectory(prefix="patchkit-plugin-") as folder:
        answer = Path(folder) / "answer.json"
        run = subprocess.run(
            [sys.executable, str(_PROBE), json.dumps(question), str(answer)],
            cwd=folder,
            env={
                **clean_environment(),
                "PATCHKIT_ADAPTER": adapter.name,
                "PATCHKIT_PROFILE": adapter.profile(settings.profile),
                "PATCHKIT_RUN_DIR": folder,
            },
            capture_output=True,
            text=True,
            check=False,
        )
        if not answer.is_file():
            return Outcome(violations=(_died(run),))
        told = json.loads(answer.read_text())
    violations = tuple(_violations(told))
    return Outcome(violations=violations, figures={"compared": told["compared"]})


def _own_packages(adapter: Adapter) -> set[str]:
    """Top-level packages in which the adapter's replacements live."""
    references = [
        p.replacement for p in (*adapter.rollout, *adapter.trainer) if type(p.replacement) is str
    ]
    return {reference.partition(":")[0].partition(".")[0] for reference in references}


def _violations(told: dict[str, Any]) -> Iterator[Violation]:
    if _PLUGIN not in told["installed"]:
        yield Violation(
            subject="entry points vllm.general_plugins",
            problem="the rollout plugin is not installed",
            expected=_PLUGIN,
            found=", ".join(told["installed"]) or "none",
            remedy="install patchkit-vllm-plugin: without it no worker is ever patched",
        )
    for key, problem, remedy in (
        ("changed", "changed although nobody opted in", "patch in the adapter's declaration only"),
        ("imported", "was imported although nobody opted in", "import inside of what is called"),
        ("environment", "was set although nobody opted in", "leave the environment alone"),
    ):
        for name in told[key]:
            yield Violation(
                subject=name,
                problem=problem,
                expected="a plugin that does nothing without PATCHKIT_ENABLE=1",
                found="vLLM's load_general_plugins() did this; installed plugins: "
                + ", ".join(told["installed"]),
                remedy=remedy + ", or uninstall the plugin that does it",
            )


def _died(run: subprocess.CompletedProcess[str]) -> Violation:
    return Violation(
        subject="a process that only loads vLLM's plugins",
        problem="ended without an answer",
        expected="exit status 0",
        found=f"status {run.returncode}\n" + "\n".join(run.stderr.splitlines()[-15:]),
        remedy="see the end of its output above",
    )
