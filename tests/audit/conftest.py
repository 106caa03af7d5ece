"""A small foreign package that the sources of the tests patch."""

from __future__ import annotations

from pathlib import Path

import pytest
from audit_trees import LIB_1, write_tree

# A project with patches and trees of facts: read by the tests, never run.
collect_ignore = ["sample", "facts"]


@pytest.fixture(scope="session")
def lib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that contains the package `lib`."""
    return write_tree(tmp_path_factory.mktemp("foreign"), LIB_1)
