"""The verification artifact: what was compared, and everything needed to check it.

One JSON document and one sidecar with the tokens and log-probabilities of both
sides. Nothing in it has to be believed: the metrics are computed from the arrays,
the receipts are there piece by piece, and :func:`verify_artifact` does it all again.
"""

from __future__ import annotations

from patchkit.runtime.artifact.collecting import Artifact
from patchkit.runtime.artifact.document import (
    MERGED,
    ArtifactError,
    complete,
    load_artifact,
    refuse_to_overwrite,
)
from patchkit.runtime.artifact.figures import BASELINE, BASELINE_ROLLOUT, PHASES, REQUIRED
from patchkit.runtime.artifact.merging import merge_artifacts
from patchkit.runtime.artifact.verification import Verified, verify_artifact

__all__ = [
    "BASELINE",
    "BASELINE_ROLLOUT",
    "MERGED",
    "PHASES",
    "REQUIRED",
    "Artifact",
    "ArtifactError",
    "Verified",
    "complete",
    "load_artifact",
    "merge_artifacts",
    "refuse_to_overwrite",
    "verify_artifact",
]
