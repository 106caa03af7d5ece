"""Manifest files: facts about the symbols of one package at one version."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from patchkit.symbols._facts import PARAMETER_KINDS, SYMBOL_KINDS, Record, SymbolFacts, facts_of
from patchkit.symbols._match import Match
from patchkit.symbols._symbol import Symbol
from patchkit.symbols.errors import MalformedSymbolError, ManifestError, ManifestSchemaError

SCHEMA = 1
MAX_MANIFEST_BYTES = 512 << 20


class LazyFacts(Mapping[str, SymbolFacts]):
    """Facts made from records when they are asked for: a manifest may hold 60,000."""

    __slots__ = ("_made", "_path", "_records")

    def __init__(self, records: dict[str, Record], path: str) -> None:
        self._records = records
        self._path = path
        self._made: dict[str, SymbolFacts] = {}

    def __getitem__(self, symbol: str) -> SymbolFacts:
        facts = self._made.get(symbol)
        if facts is None:
            record = self._records[symbol]
            try:
                facts = facts_of(symbol, record)
                _check(facts)
            except (TypeError, ValueError, AttributeError) as error:
                raise ManifestError(
                    self._path, f"the entry of {symbol} is malformed: {error}"
                ) from error
            self._made[symbol] = facts
        return facts

    def __contains__(self, symbol: object) -> bool:
        return symbol in self._records

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def records(self) -> dict[str, Record]:
        """The records themselves, for those who read many."""
        return self._records


def _check(facts: SymbolFacts) -> None:
    """What a hand may have damaged, and a comparison would trip over or, worse, believe."""
    if facts.kind not in SYMBOL_KINDS:
        raise ValueError(f"unknown kind {facts.kind!r}")
    for name in ("body_digest", "digest"):
        value = getattr(facts, name)
        if not isinstance(value, str) or not value or not set(value) <= _HEX:
            raise ValueError(f"{name} {value!r} is no digest")
    for parameter in facts.parameters:
        if parameter.kind not in PARAMETER_KINDS or not isinstance(parameter.name, str):
            raise ValueError(f"parameter {parameter.name!r} of unknown kind {parameter.kind!r}")
    if not isinstance(facts.line, int) or not isinstance(facts.file, str):
        raise ValueError("file or line is of the wrong type")
    texts = (*facts.decorators, *facts.bases, *facts.aliases)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a decorator, base or alias is no text")
    if not isinstance(facts.selectors, dict):
        raise ValueError("selectors is no object")


_HEX = set("0123456789abcdef")


class Manifest:
    """Facts about symbols of one import package at one version.

    Attributes:
        package: The import package.
        version: Its version; without a local label where that says only how it was built.
        schema: The schema of the file it came from.
        built_from: How it was built: kind, name, and how much of it was read.
        symbols: Symbol -> facts, made when asked for.
        references: Symbol -> symbol, for names that a module only imports (whole-package
            manifests only; elsewhere facts say it with `reexport_of`).
        lineage: Symbol of the version before -> where it is in this one, as found by
            comparing the whole packages; `lineage_from` names that version.
        absent: Symbols looked for and not found at this version.
        unreadable: File -> why it could not be read.
        whole: Whether every symbol of the package is in it.
    """

    def __init__(
        self,
        package: str,
        version: str,
        symbols: Mapping[str, SymbolFacts] | Iterable[SymbolFacts] = (),
        *,
        built_from: Mapping[str, Any] | None = None,
        schema: int = SCHEMA,
        references: Mapping[str, str] | None = None,
        lineage: Mapping[str, Match] | None = None,
        lineage_from: str = "",
        absent: Iterable[str] = (),
        unreadable: Mapping[str, str] | None = None,
        whole: bool = False,
        path: str = "",
    ) -> None:
        self.package = package
        self.version = version
        self.schema = schema
        self.built_from = dict(built_from or {})
        if not isinstance(symbols, Mapping):
            symbols = {f.symbol: f for f in symbols}
        self.symbols: Mapping[str, SymbolFacts] = symbols
        self.references = dict(references or {})
        self.lineage = dict(lineage or {})
        self.lineage_from = lineage_from
        self.absent = tuple(sorted(absent))
        self.unreadable = dict(unreadable or {})
        self.whole = whole
        self.path = path

    def __repr__(self) -> str:
        return f"<Manifest {self.package} {self.version}: {len(self.symbols)} symbols>"

    @property
    def records(self) -> dict[str, Record]:
        """Symbol -> record, whichever way this manifest came about."""
        if isinstance(self.symbols, LazyFacts):
            return self.symbols.records
        return {name: facts.as_record() for name, facts in self.symbols.items()}

    def get(self, symbol: Symbol | str) -> SymbolFacts | None:
        """The facts under a name, None where the manifest has none."""
        return self.symbols.get(str(symbol))

    # ---- files -------------------------------------------------------------------

    @classmethod
    def load(cls, path: Path | str) -> Manifest:
        """Read a manifest file; anything wrong with it is a ManifestError."""
        path = Path(path)
        try:
            if path.stat().st_size > MAX_MANIFEST_BYTES:
                raise ManifestError(path, "it is larger than any manifest")
            data = _parse(path.read_bytes())
        except OSError as error:
            raise ManifestError(path, error.strerror or str(error)) from error
        except ValueError as error:
            raise ManifestError(path, f"it is no JSON: {error}") from error
        return cls.from_json(data, str(path))

    @classmethod
    def from_json(cls, data: Any, path: str = "<data>") -> Manifest:
        """The manifest that a parsed JSON object describes."""
        if not isinstance(data, dict) or "schema" not in data:
            raise ManifestError(path, "it is no manifest: there is no schema in it")
        schema = data["schema"]
        if not isinstance(schema, int) or schema > SCHEMA or schema < 1:
            raise ManifestSchemaError(
                path,
                f"it has schema {schema!r}; this patchkit knows schemas up to {SCHEMA}",
                "update patchkit, or build the manifest again with this one",
            )
        for key, kind in (("package", str), ("version", str), ("symbols", dict)):
            if not isinstance(data.get(key), kind):
                raise ManifestError(path, f"{key!r} is missing or no {kind.__name__}")
        symbols = data["symbols"]
        for name, record in symbols.items():
            if not isinstance(record, dict):
                raise ManifestError(path, f"the entry of {name} is no object")
            if not name.startswith((data["package"] + ":", data["package"] + ".")):
                raise ManifestError(path, f"{name} is no symbol of {data['package']}")
        if len(symbols) < 10_000:  # whole-package ones are checked as they are used
            for name in symbols:
                try:
                    Symbol.parse(name)
                except MalformedSymbolError as error:
                    raise ManifestError(path, str(error)) from error
        try:
            return cls._from_parts(data, symbols, schema, path)
        except (TypeError, ValueError, AttributeError) as error:
            raise ManifestError(path, f"it is malformed beside its symbols: {error}") from error

    @classmethod
    def _from_parts(
        cls, data: dict[str, Any], symbols: dict[str, Record], schema: int, path: str
    ) -> Manifest:
        return cls(
            data["package"],
            data["version"],
            LazyFacts(symbols, path),
            built_from=data.get("built_from"),
            schema=schema,
            references=data.get("references"),
            lineage={
                old: Match(symbol=new, confidence=confidence, evidence=evidence)
                for old, (new, confidence, evidence) in data.get("lineage", {}).items()
            },
            lineage_from=data.get("lineage_from", ""),
            absent=data.get("absent", ()),
            unreadable=data.get("unreadable"),
            whole=bool(data.get("whole", False)),
            path=path,
        )

    def as_text(self) -> str:
        """The file's text: sorted, one symbol per line, so that diffs read well."""
        head: dict[str, Any] = {
            "schema": self.schema,
            "package": self.package,
            "version": self.version,
            "built_from": self.built_from,
        }
        if self.whole:
            head["whole"] = True
        lines = [f"{_json(key)}: {_json(value)}" for key, value in head.items()]
        if self.absent:
            lines.append(_block("absent", [_json(s) for s in self.absent], "[]"))
        if self.lineage_from:
            lines.append(f'"lineage_from": {_json(self.lineage_from)}')
        if self.lineage:
            moves = {k: [m.symbol, m.confidence, m.evidence] for k, m in self.lineage.items()}
            lines.append(_block("lineage", _pairs(moves), "{}"))
        if self.unreadable:
            lines.append(_block("unreadable", _pairs(self.unreadable), "{}"))
        if self.references:
            lines.append(_block("references", _pairs(self.references), "{}"))
        lines.append(_block("symbols", _pairs(self.records), "{}"))
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def dump(self, path: Path | str) -> None:
        """Write the file, whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            part.write_text(self.as_text(), encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def _parse(data: bytes) -> Any:
    try:
        import orjson
    except ImportError:  # the pure-Python parts work without it
        return json.loads(data)
    return orjson.loads(data)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=False)


def _pairs(mapping: Mapping[str, Any]) -> list[str]:
    return [f"{_json(key)}: {_json(mapping[key])}" for key in sorted(mapping)]


def _block(name: str, lines: list[str], brackets: str) -> str:
    if not lines:
        return f"{_json(name)}: {brackets}"
    body = ",\n".join(f" {line}" for line in lines)
    return f"{_json(name)}: {brackets[0]}\n{body}\n{brackets[1]}"
