"""Selected-token log-probabilities of a run, from whatever file it left.

Three forms are read, told by the file's name:

* ``*.json``: a verification artifact; a column of it is chosen behind a colon, as in
  ``artifact.json:recompute`` (``rollout``, ``recompute``, ``first_forward``, ``stock``,
  ``stock_rollout``; ``rollout`` if none is named). Its versions come along.
* ``*.jsonl``: one JSON object per token, or per sequence with lists in it.
* ``*.npz``: arrays of equal length.

Fields of the last two: ``logprob`` (needed), ``sequence`` and ``position`` (needed to
align), ``token``, ``version`` (of the policy that drew the token, in a rollout; of the
trainer, in a replay), ``entropy`` (of the whole distribution), ``step``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from patchkit.errors import ConfigurationError

__all__ = ["COLUMNS", "Run", "read_run", "refuse_to_overwrite"]

COLUMNS = ("rollout", "recompute", "first_forward", "stock", "stock_rollout")
_INTEGERS = ("sequence", "position", "token", "version", "step")
_FLOATS = ("logprob", "entropy")
_OTHER_NAMES = {
    "logprobs": "logprob",
    "sequences": "sequence",
    "positions": "position",
    "tokens": "token",
    "token_id": "token",
    "token_ids": "token",
    "versions": "version",
    "entropies": "entropy",
    "steps": "step",
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run's tokens.

    Attributes:
        name: What it is called in tables.
        columns: Arrays of one length; those of ``logprob``, ``sequence`` and ``position``
            are always there.
    """

    name: str
    columns: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.columns["logprob"])

    def get(self, name: str) -> np.ndarray | None:
        return self.columns.get(name)


def read_run(source: str | Path) -> Run:
    """Read a run from ``FILE`` or ``FILE:COLUMN``.

    Raises:
        ConfigurationError: The file is of none of the forms, or lacks a field.
    """
    path, column = _named(source)
    if not os.path.isfile(path):
        raise ConfigurationError(
            f"run {str(source)!r}: no such file; expected an artifact (*.json), *.jsonl or *.npz"
        )
    try:
        if path.suffix == ".json":
            return _artifact(path, column or "rollout")
        if path.suffix == ".jsonl":
            columns = _lines(path)
        elif path.suffix == ".npz":
            with np.load(path) as arrays:
                columns = {k: arrays[k] for k in arrays.files}
        else:
            raise ConfigurationError(
                f"run {path}: expected a name that ends in .json, .jsonl or .npz"
            )
    except (ValueError, OSError, TypeError, EOFError, BadZipFile, RecursionError) as error:
        raise ConfigurationError(f"run {path}: cannot be read ({error})") from error
    if column:
        if column not in columns:
            raise ConfigurationError(
                f"run {path}: has no {column!r}; it has {', '.join(sorted(columns))}"
            )
        columns = {**columns, "logprob": columns[column]}
    return made(column or path.name, columns, source=str(path))


def refuse_to_overwrite(target: Path, sources: Iterable[str | Path]) -> None:
    """A page must not replace a run that it is made of.

    Raises:
        ConfigurationError: It would.
    """
    from patchkit.runtime.artifact import refuse_to_overwrite as refuse

    for path in (_named(source)[0] for source in sources):
        if path.suffix == ".json":
            refuse(target, [path])
        elif target.resolve() == path.resolve():
            raise ConfigurationError(f"{target}: is one of the runs; name another file")


def _named(source: str | Path) -> tuple[Path, str]:
    """``FILE`` or ``FILE:COLUMN`` as a path and a column, empty where none is named."""
    name = str(source)
    file, _, column = name.rpartition(":") if not os.path.exists(name) else (name, "", "")
    return Path(file or name), column


def made(name: str, columns: Mapping[str, Any], *, source: str = "") -> Run:
    """A run of arrays, checked.

    Args:
        name: What it is called in tables.
        columns: Any of the fields; further ones are left out.
        source: For messages; the name if empty.
    """
    where = source or name
    named = {_OTHER_NAMES.get(key, key): value for key, value in columns.items()}
    missing = [key for key in ("logprob", "sequence", "position") if key not in named]
    if missing:
        there = ", ".join(sorted(named)) or "nothing"
        raise ConfigurationError(
            f"run {where}: lacks {', '.join(missing)} (it has {there}); every token "
            "needs its log-probability, its sequence's number and its position"
        )
    try:
        kept = {key: np.asarray(named[key], np.int64) for key in _INTEGERS if key in named}
        kept |= {key: np.asarray(named[key], np.float64) for key in _FLOATS if key in named}
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigurationError(f"run {where}: a field is no list of numbers ({error})") from error
    lengths = {key: value.shape for key, value in kept.items()}
    if len(set(lengths.values())) != 1 or kept["logprob"].ndim != 1:
        raise ConfigurationError(f"run {where}: no plain fields of equal length: {lengths}")
    bad = ~np.isfinite(kept["logprob"]) | (kept["logprob"] > 1e-4)
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        raise ConfigurationError(
            f"run {where}: {int(bad.sum())} values are no log-probabilities; the first is "
            f"{kept['logprob'][at]} at entry {at}"
        )
    return Run(name=name, columns=kept)


def _lines(path: Path) -> dict[str, Any]:
    columns: dict[str, list[Any]] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        entry = json.loads(line)
        if not isinstance(entry, dict):
            raise ConfigurationError(f"run {path}, line {number}: expected a JSON object")
        size = max((len(v) for v in entry.values() if isinstance(v, list)), default=1)
        for key, value in entry.items():
            if isinstance(value, str):
                continue
            values = value if isinstance(value, list) else [value] * size
            if len(values) != size:
                raise ConfigurationError(
                    f"run {path}, line {number}: {key} has {len(values)} entries, others {size}"
                )
            columns.setdefault(key, []).extend(values)
    return dict(columns)


def _artifact(path: Path, column: str) -> Run:
    """A column of an artifact, with the versions of rollout or trainer."""
    from patchkit.runtime.artifact import load_artifact
    from patchkit.runtime.sidecar import read_sidecar

    if column not in COLUMNS:
        raise ConfigurationError(
            f"run {path}: an artifact has no column {column!r}; it may have {', '.join(COLUMNS)}"
        )
    document = load_artifact(path)
    if "sidecar" not in document:
        raise ConfigurationError(
            f"run {path}: a merged artifact has no tokens of its own; name one of its runs"
        )
    arrays = read_sidecar(path.parent, document["sidecar"])
    parts: dict[str, list[np.ndarray]] = {}
    offset = 0
    for phase in document["phases"].values():
        for entry in phase["rounds"]:
            prefix = entry["arrays"]
            sequences = np.asarray(arrays[f"{prefix}/sequences"], np.int64)
            # Counted in every round, so that two columns number sequences alike.
            first, offset = offset, offset + int(sequences.max(initial=-1)) + 1
            if f"{prefix}/{column}" not in arrays:
                continue
            versions = np.full(len(sequences), int(entry["version"]), np.int64)
            if column in ("rollout", "stock_rollout"):
                # The version that a sequence began with drew its tokens, where it says so.
                starts = np.asarray(entry["start_versions"], np.int64)
                numbers, which = np.unique(sequences, return_inverse=True)
                if len(numbers) == len(starts):
                    versions = starts[which]
            for key, value in (
                ("logprob", arrays[f"{prefix}/{column}"]),
                ("sequence", sequences + first),
                ("position", arrays[f"{prefix}/positions"]),
                ("token", arrays[f"{prefix}/token_ids"]),
                ("version", versions),
                ("step", np.full(len(sequences), int(entry["version"]))),
            ):
                parts.setdefault(key, []).append(np.asarray(value))
    if not parts:
        raise ConfigurationError(f"run {path}: no round of this artifact has {column!r}")
    return made(
        column, {key: np.concatenate(values) for key, values in parts.items()}, source=str(path)
    )


def aligned(a: Run, b: Run) -> tuple[Run, Run, int]:
    """The tokens that both have, in one order, and how many only one has.

    Raises:
        ConfigurationError: They have none in common, or other tokens at one place.
    """
    names = []
    for run in (a, b):
        sequence, position = run.columns["sequence"], run.columns["position"]
        name = (sequence << 32) | position
        if len(np.unique(name)) != len(name):
            raise ConfigurationError(
                f"run {run.name!r}: some (sequence, position) occur twice; number sequences "
                "through all steps"
            )
        names.append(name)
    _, at_a, at_b = np.intersect1d(names[0], names[1], assume_unique=True, return_indices=True)
    if not len(at_a):
        raise ConfigurationError(
            f"runs {a.name!r} and {b.name!r} have no (sequence, position) in common"
        )
    left = len(a) + len(b) - 2 * len(at_a)
    made_a = Run(name=a.name, columns={k: v[at_a] for k, v in a.columns.items()})
    made_b = Run(name=b.name, columns={k: v[at_b] for k, v in b.columns.items()})
    tokens = made_a.get("token"), made_b.get("token")
    if tokens[0] is not None and tokens[1] is not None and (tokens[0] != tokens[1]).any():
        at = int(np.flatnonzero(tokens[0] != tokens[1])[0])
        raise ConfigurationError(
            f"runs {a.name!r} and {b.name!r} have other tokens at sequence "
            f"{made_a.columns['sequence'][at]}, position {made_a.columns['position'][at]}: "
            f"{tokens[0][at]} and {tokens[1][at]}; log-probabilities of other tokens cannot be "
            "compared"
        )
    return made_a, made_b, left


def lags(a: Run, b: Run) -> np.ndarray | None:
    """By how many versions the policy that drew each token is older than the trainer's."""
    mine, theirs = a.get("version"), b.get("version")
    if mine is None or theirs is None:
        return None
    lag: np.ndarray = theirs - mine
    if (lag < 0).any():
        raise ConfigurationError(
            f"run {a.name!r} was drawn by versions newer than those of {b.name!r}; give the "
            "rollout first and the trainer second"
        )
    return lag
