"""Run as a program: what vLLM's plugins change in a process that did not opt in.

Reads ``{"modules": […], "packages": […]}`` from its first argument and writes what it
saw to its second. It imports nothing of patchkit: whether the plugin does is the question.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

from _snapshot import changed, snapshot  # type: ignore[import-not-found]

# Only for the line above: a folder of ours must not stand first on the path.
sys.path.pop(0)


def main(question: str, answer: str) -> None:
    asked = json.loads(question)
    packages = frozenset(asked["packages"])
    installed = {point.name for point in entry_points(group="vllm.general_plugins")}
    for module in asked["modules"]:
        import_module(module)
    modules, environment = set(sys.modules), dict(os.environ)
    before = snapshot(packages)

    from vllm.plugins import load_general_plugins

    load_general_plugins()
    ours = tuple(asked["ours"])
    told = {
        "installed": sorted(installed),
        "compared": len(before),
        "changed": changed(before, snapshot(packages)),
        "imported": sorted(
            name for name in set(sys.modules) - modules if name.partition(".")[0] in ours
        ),
        "environment": sorted(
            name
            for name in set(environment) | set(os.environ)
            if environment.get(name) != os.environ.get(name)
        ),
    }
    Path(answer).write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
