"""Entry point of the processes in which stages run: ``python -m patchkit.kit._child``."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

from patchkit.kit._result import Outcome, told
from patchkit.kit._stages import SuiteSettings

# task -> module in patchkit.kit and function in it; imported only by the task's process.
_TASKS = {
    "undo": ("_undo", "undone"),
    "plugin": ("_plugin", "plugin_is_inert"),
    "rows": ("_rows", "row_invariant"),
    "job": ("_job", "exact_end_to_end"),
    "ablation": ("_ablation", "needed"),
    "exercise": ("_exercise", "reached_by_exercise"),
    "exercise_ablation": ("_exercise", "needed_by_exercise"),
}


def main(task: str, settings_json: str, answer: str) -> None:
    """Run one task and write its outcome."""
    data = json.loads(settings_json)
    settings = SuiteSettings(**{**data, "tensor_parallel": tuple(data["tensor_parallel"])})
    module, function = _TASKS[task]
    try:
        outcome = getattr(import_module(f"patchkit.kit.{module}"), function)(settings)
    except Exception as error:  # everything that goes wrong in here is the stage's finding
        outcome = Outcome(violations=tuple(told(error)))
    text = json.dumps(
        {
            "violations": [v.as_dict() for v in outcome.violations],
            "figures": dict(outcome.figures),
            "not_applicable": outcome.not_applicable,
        }
    )
    Path(answer).write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
