"""These tests need a CUDA GPU and vLLM's CUDA build; `docs/gpu.md` says how to run them."""

from __future__ import annotations

import os

import pytest

# "cpu" is for a dry run in Triton's interpreter, with stand-ins for vLLM's kernels.
DEVICE = os.environ.get("PATCHKIT_GPU_TEST_DEVICE", "cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = os.path.dirname(__file__)
    reason = _unusable()
    for item in items:
        if str(item.path).startswith(here) and item.get_closest_marker("anywhere") is None:
            item.add_marker(pytest.mark.stack)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "anywhere: a test of tests/gpu that needs no GPU")


def _unusable() -> str:
    if DEVICE != "cuda":
        return ""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else "no CUDA GPU"


@pytest.fixture
def device() -> str:
    return DEVICE
