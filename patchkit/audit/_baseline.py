"""What is known already: so that a check fails on new findings only."""

from __future__ import annotations

import json
from pathlib import Path

from patchkit.audit._findings import Report
from patchkit.errors import ConfigurationError
from patchkit.files import write_atomically, writing

BASELINE_SCHEMA = 1


def read_baseline(path: Path) -> frozenset[str]:
    """The marks in a baseline file.

    Raises:
        ConfigurationError: The file is none.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(
            f"{path}: there is no such baseline; write one with --write-baseline {path}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is no readable baseline: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != BASELINE_SCHEMA:
        raise ConfigurationError(
            f"{path} is no baseline of schema {BASELINE_SCHEMA}; "
            f"write it again with --write-baseline {path}"
        )
    known = data.get("known")
    if not isinstance(known, dict) or not all(isinstance(v, str) for v in known.values()):
        raise ConfigurationError(f"{path}: 'known' has to map marks to what they stand for")
    return frozenset(known)


def write_baseline(report: Report, path: Path) -> int:
    """Write what this report found; how many marks that are.

    Raises:
        ConfigurationError: It cannot be written there.
    """
    known = {}
    for finding in report.findings:
        for verdict in finding.verdicts:
            if (verdict.level or verdict.kind.level) != "note":
                mark = f"{finding.fingerprint}:{verdict.kind}"
                known[mark] = f"{finding.identity} ({finding.place.file}): {verdict.kind.sentence}"
    data = {"schema": BASELINE_SCHEMA, "known": dict(sorted(known.items(), key=lambda i: i[1]))}
    text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    with writing(path):
        write_atomically(path, text.encode())
    return len(known)
