"""Static facts about the symbols of a package: reading, digests, manifests, drift.

Nothing here imports what it reads.
"""

from __future__ import annotations

from patchkit.symbols._facts import ModuleFacts, Parameter, SymbolFacts
from patchkit.symbols._installed import find_facts, installed_version
from patchkit.symbols._manifest import Manifest
from patchkit.symbols._module import read_module
from patchkit.symbols._store import stored_manifest, stored_versions
from patchkit.symbols._symbol import Symbol

__all__ = [
    "Manifest",
    "ModuleFacts",
    "Parameter",
    "Symbol",
    "SymbolFacts",
    "find_facts",
    "installed_version",
    "read_module",
    "stored_manifest",
    "stored_versions",
]
