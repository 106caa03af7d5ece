"""The document of an artifact: one JSON object under a digest of its content."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from patchkit.errors import ConfigurationError, Violation, ViolationsError
from patchkit.files import write_atomically
from patchkit.runtime.canonical import digest_of

SCHEMA = 1
KIND = "patchkit-verification"
MERGED = "patchkit-verification-merged"


class ArtifactError(ViolationsError):
    """An artifact that does not hold what it says."""


def load_artifact(path: str | Path) -> dict[str, Any]:
    """Read the document; refuses what is no artifact or was altered."""
    path = Path(path)
    try:
        document = json.loads(path.read_text())
    except OSError as e:
        raise ConfigurationError(f"artifact {path}: cannot be read ({e.strerror})") from e
    except (ValueError, RecursionError) as e:
        raise ArtifactError(
            f"artifact {path} is refused",
            [broken("document", "torn or altered: no JSON", "a whole document", str(e))],
        ) from e
    if not isinstance(document, dict) or document.get("kind") not in (KIND, MERGED):
        raise ConfigurationError(f"artifact {path}: not a verification artifact of patchkit")
    if document.get("schema") != SCHEMA:
        raise ConfigurationError(
            f"artifact {path}: schema {document.get('schema')}, this patchkit reads {SCHEMA}"
        )
    body = {k: v for k, v in document.items() if k != "digest"}
    if digest_of(body) != document.get("digest"):
        raise ArtifactError(
            f"artifact {path} is refused",
            [
                broken(
                    "document",
                    "altered: its digest is not that of its content",
                    str(document.get("digest")),
                    digest_of(body),
                )
            ],
        )
    return document


def write_document(path: Path, document: dict[str, Any]) -> None:
    sealed = {**document, "digest": digest_of(document)}
    write_atomically(path, json.dumps(sealed, indent=1, sort_keys=True, allow_nan=False).encode())


@contextmanager
def complete(path: Path) -> Iterator[None]:
    """Read parts of a document whose digest is right, and whose parts may still be any.

    Raises:
        ArtifactError: One is missing, or has another form.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, struct.error) as e:
        problem, found = "a part is missing, or another thing", f"{type(e).__name__} {e}"
        raise ArtifactError(
            f"artifact {path} is refused",
            [broken("document", problem, "all parts of a run", found)],
        ) from e


def refuse_to_overwrite(target: str | Path, evidence: Iterable[str | Path]) -> None:
    """Whatever is written must not replace an artifact that it is made of, nor its arrays.

    Raises:
        ConfigurationError: It would.
    """
    place = Path(target).resolve()
    for file in map(Path, evidence):
        document = load_artifact(file)
        if document["kind"] == MERGED:
            refuse_to_overwrite(target, [file.parent / run["file"] for run in document["runs"]])
            read = [file]
        else:
            read = [file, file.parent / document["sidecar"]["file"]]
        if place in [f.resolve() for f in read]:
            raise ConfigurationError(
                f"{target}: is part of the evidence in artifact {file}, which would be lost; "
                "name another file with --output"
            )


def accepted(contract: Mapping[str, Any]) -> set[str]:
    """What the contract accepted without a review, an admission or a compared run."""
    return (
        {*contract.get("unreviewed", {})}
        | {f"provider {module}" for module in contract.get("unadmitted", {})}
        | {f"all-to-all backend {name}" for name in contract.get("uncompared", {})}
    )


def told(run: Mapping[str, Any]) -> dict[str, Any]:
    """What a merged artifact says of a run."""
    return {
        "digest": run["digest"],
        "verdict": run["verdict"],
        "created": run["provenance"]["created"],
    }


def broken(subject: str, problem: str, expected: str, found: str) -> Violation:
    return Violation(
        subject=subject,
        problem=problem,
        expected=expected,
        found=found,
        remedy="trust nothing of it: get the file again from its origin, or run again",
    )
