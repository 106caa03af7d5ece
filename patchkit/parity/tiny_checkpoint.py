"""An adapter's tiny random checkpoint, made in a process of its own.

The caller's process imports neither torch nor transformers for it: the preflight that
follows has to see a process in which no library has read its variables yet.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from patchkit.engine import Adapter
from patchkit.errors import PatchkitError

_MAKE = """
import json, sys
from pathlib import Path
from patchkit.engine import resolve_reference
reference, folder, seed, changes = sys.argv[1:]
resolve_reference(reference)(Path(folder), seed=int(seed), **json.loads(changes))
"""


def make_tiny_checkpoint(
    adapter: Adapter, folder: Path, *, seed: int, changes: Mapping[str, Any]
) -> None:
    """Call ``adapter.tiny_model(folder, seed=seed, **changes)`` in a new process.

    Raises:
        PatchkitError: It failed; with the end of what the process said.
    """
    assert adapter.tiny_model is not None  # callers have refused an adapter without one
    command = [sys.executable, "-c", _MAKE, adapter.tiny_model, str(folder), str(seed)]
    made = subprocess.run(
        [*command, json.dumps(dict(changes))], capture_output=True, text=True, check=False
    )
    if made.returncode:
        raise PatchkitError(f"the tiny model could not be made\n{made.stderr[-2000:]}")
