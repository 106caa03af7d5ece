"""For authors of adapters: the conformance suite, a look at a model, a skeleton to start from.

One line in a test module runs everything that stands behind a certificate::

    from patchkit.kit import adapter_suite

    TestConformance = adapter_suite("my_adapter")

``patchkit conformance my_adapter`` runs the same stages and writes the certificate.
Importing this package imports neither torch nor vLLM: what needs them runs in
processes of its own.
"""

from __future__ import annotations

from patchkit.kit._look import Look, Row, look_at
from patchkit.kit._result import StageResult
from patchkit.kit._skeleton import check_place, steps, write_skeleton
from patchkit.kit._stages import STAGES, SuiteSettings, run_stage, run_suite
from patchkit.kit._suite import adapter_suite
from patchkit.kit.errors import (
    ConformanceFailedError,
    SkeletonRefusedError,
    UnknownModelError,
)

__all__ = [
    "STAGES",
    "ConformanceFailedError",
    "Look",
    "Row",
    "SkeletonRefusedError",
    "StageResult",
    "SuiteSettings",
    "UnknownModelError",
    "adapter_suite",
    "check_place",
    "look_at",
    "run_stage",
    "run_suite",
    "steps",
    "write_skeleton",
]
