"""Arrays beside an artifact, in one file named by its own digest.

The format is safetensors, written and read here in a few lines of the standard
library: whoever verifies an artifact needs neither torch nor numpy.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from patchkit.errors import PatchkitError
from patchkit.files import write_atomically

__all__ = ["SidecarError", "floats", "integers", "read_sidecar", "write_sidecar"]

_CODES = {"F32": "f", "I64": "q"}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


class SidecarError(PatchkitError):
    """A sidecar that is missing, altered or not of the expected form."""


def floats(values: Any, what: str) -> array[float]:
    """float32 values of a tensor (which must be float32) or of Python floats."""
    if hasattr(values, "detach"):
        if str(values.dtype) != "torch.float32":
            raise SidecarError(f"{what}: expected torch.float32 values, found {values.dtype}")
        made = array("f")
        made.frombytes(values.detach().cpu().contiguous().numpy().tobytes())
        return made
    return array("f", values)


def integers(values: Any) -> array[int]:
    """int64 values of a tensor or of Python integers."""
    return array("q", values.tolist() if hasattr(values, "tolist") else values)


def write_sidecar(folder: Path, stem: str, arrays: Mapping[str, array[Any]]) -> dict[str, Any]:
    """Write the arrays; returns what an artifact says about the file."""
    header: dict[str, Any] = {}
    offset = 0
    for name in sorted(arrays):
        size = len(arrays[name]) * arrays[name].itemsize
        header[name] = {
            "dtype": _DTYPES[arrays[name].typecode],
            "shape": [len(arrays[name])],
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join(_little(arrays[name]).tobytes() for name in sorted(arrays))
    data = struct.pack("<Q", len(text)) + text + body
    digest = hashlib.sha256(data).hexdigest()
    path = write_atomically(folder / f"{stem}-{digest[:16]}.safetensors", data)
    return {"file": path.name, "sha256": digest, "bytes": len(data)}


def read_sidecar(folder: Path, described: Mapping[str, Any]) -> dict[str, array[Any]]:
    """Read it again, refusing anything but exactly what was described."""
    name = str(described["file"])
    path = folder / name
    if Path(name).name != name:
        raise SidecarError(f"sidecar {name!r}: expected a file name without a folder")
    try:
        data = path.read_bytes()
    except OSError as e:
        raise SidecarError(f"sidecar {path}: cannot be read ({e.strerror})") from e
    found = hashlib.sha256(data).hexdigest()
    if found != described["sha256"]:
        raise SidecarError(
            f"sidecar {path}: altered; expected sha256 {described['sha256']}, found {found}"
        )
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    arrays = {}
    for key, entry in header.items():
        start, end = entry["data_offsets"]
        made = array(_CODES[entry["dtype"]])
        made.frombytes(data[8 + length + start : 8 + length + end])
        arrays[key] = _little(made)
    return arrays


def _little(values: array[Any]) -> array[Any]:
    if sys.byteorder == "little":
        return values
    swapped = array(values.typecode, values)
    swapped.byteswap()
    return swapped
