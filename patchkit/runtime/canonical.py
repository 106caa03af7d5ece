"""One way to write JSON, so that equal content has equal digests."""

from __future__ import annotations

import hashlib
import json
from typing import Any

__all__ = ["canonical_json", "digest_of"]


def canonical_json(value: Any) -> bytes:
    """Sorted keys, no spaces, no NaN; floats as Python's shortest exact form."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False
    ).encode()


def digest_of(value: Any) -> str:
    """SHA-256 of the canonical form."""
    return hashlib.sha256(canonical_json(value)).hexdigest()
