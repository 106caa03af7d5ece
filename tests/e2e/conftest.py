from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, made in another process: this one stays free of torch."""
    folder = tmp_path_factory.mktemp("model") / "qwen3_moe"
    code = "import sys; from pathlib import Path; from patchkit_adapters.qwen3_moe.tiny import "
    code += "make_tiny_model; make_tiny_model(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, capture_output=True)
    return folder
