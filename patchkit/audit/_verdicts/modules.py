"""Patches of whole modules: entries of ``sys.modules``."""

from __future__ import annotations

from collections.abc import Iterator

from patchkit.audit._findings import Verdict, VerdictKind
from patchkit.audit._verdicts.case import Case

# So many of a lost module's definitions are looked for.
_SAMPLE = 8


def module(case: Case) -> Iterator[Verdict]:
    """The verdict on a module that is replaced."""
    name, target, base = case.symbol, case.target, case.base
    there = target.is_module(name)
    if there is None:
        return
    before = base.is_module(name) if base is not None else None
    if there:
        if base is None or not before or target.source is None or base.source is None:
            return
        raw, was = target.source.source.raw(name), base.source.source.raw(name)
        if raw is None or was is None or _digests(raw) == _digests(was):
            return
        yield Verdict(
            version=case.label,
            kind=VerdictKind.BODY,
            text=f"the module changed since {base.label}",
        )
        return
    if before is False:
        return  # a module that never was there: the project adds it
    if before:
        moved = _moved(case)
        if moved is not None:
            yield moved
            return
    yield Verdict(
        version=case.label, kind=VerdictKind.GONE, text=f"there is no module {name}",
        confidence=1.0 if before else 0.7,
    )  # fmt: skip


def _moved(case: Case) -> Verdict | None:
    """Where most of a lost module's definitions are now."""
    name, base = case.symbol, case.base
    raw = base.source.source.raw(name) if base is not None and base.source is not None else None
    if raw is None:
        return None
    tops = [n for n, r in raw.records.items() if "." not in n and r["kind"] != "attribute"]
    looked_for = tops[:_SAMPLE]
    homes: dict[str, list[float]] = {}
    for top in looked_for:
        fate = case.fate(f"{name}:{top}")
        if fate is not None and fate.new_symbol is not None:
            homes.setdefault(fate.new_symbol.partition(":")[0], []).append(fate.confidence)
    if not homes:
        return None
    home, sure = max(homes.items(), key=lambda item: (len(item[1]), sum(item[1])))
    kept = home.rpartition(".")[2] == name.rpartition(".")[2]
    return Verdict(
        version=case.label,
        kind=VerdictKind.MOVED if kept else VerdictKind.RENAMED,
        text=f"{len(sure)} of its {len(looked_for)} first definitions are in {home} there",
        new_symbol=home,
        confidence=round(sum(sure) / len(looked_for), 2),
    )


def _digests(raw: object) -> dict[str, str]:
    return {n: r["digest"] for n, r in raw.records.items()}  # type: ignore[attr-defined]
