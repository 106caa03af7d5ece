"""For workers of a stock engine: the weight-transfer backend, and nothing else of patchkit.

vLLM imports the module of its worker extension before it builds the worker.
"""

from __future__ import annotations

from patchkit.runtime.sync import register_backend

register_backend()


class StockWorker:
    """Adds nothing to vLLM's worker."""
