"""Everything that stands behind the certificate; needs vLLM, torch and transformers."""

from __future__ import annotations

from patchkit.kit import adapter_suite

TestConformance = adapter_suite("llama")
