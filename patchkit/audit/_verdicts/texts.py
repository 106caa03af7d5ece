"""Rewritten source: whether each anchor still stands where the patch looks for it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from patchkit.audit._findings import Verdict, VerdictKind
from patchkit.audit._values import Edit, FilePath
from patchkit.audit._verdicts.case import Case
from patchkit.audit._verdicts.whereabouts import Whereabouts


def rewriting(case: Case, whereabouts: Whereabouts) -> Iterator[Verdict]:
    """The verdict on edits of a file's text, or of a definition's."""
    target, place = case.target, case.sighting.target
    if target.source is None:
        yield Verdict(
            version=case.label, kind=VerdictKind.UNKNOWN,
            text="anchors are checked against source text, and a manifest has none",
        )  # fmt: skip
        return
    if isinstance(place, FilePath):
        file = target.file(place)
        if file is None:
            yield _file_gone(case, place)
            return
        text = target.text(file) or ""
    else:
        facts = case.facts()
        if facts is None:
            yield from whereabouts.missing(case, case.fate())
            return
        file = facts.file
        node = target.definition(facts)
        whole = target.text(file) or ""
        text = ast.get_source_segment(whole, node) or "" if node is not None else whole
    yield from _edits(case, file, text)


def _edits(case: Case, file: str, text: str) -> Iterator[Verdict]:
    """The edits in their order: each finds the text as those before it have left it."""
    for edit in case.sighting.edits:
        if _applies(edit, text):
            if edit.replacement is not None and not edit.regex:
                text = text.replace(edit.anchor, edit.replacement)
            continue
        if edit.replacement and not edit.regex and edit.replacement.strip() in text:
            yield Verdict(
                version=case.label,
                kind=VerdictKind.ABSORBED,
                text=f"{file} has the replacement's text already",
                confidence=0.95,
            )
            continue
        others = [] if edit.regex else case.target.files_with(edit.anchor)
        hint = f"; it stands in {', '.join(others[:3])}" if others else ""
        yield Verdict(
            version=case.label,
            kind=VerdictKind.ANCHOR,
            text=f"{file} does not contain {_short(edit.anchor)}{hint}",
            new_symbol=others[0] if others else None,
        )
        return


def _file_gone(case: Case, place: FilePath) -> Verdict:
    """Where most of the anchors stand now that their file is not there."""
    edits = case.sighting.edits
    found: list[str] = []
    for edit in edits:
        if not edit.regex:
            found += case.target.files_with(edit.anchor)
    if found:
        home = max(set(found), key=found.count)
        return Verdict(
            version=case.label,
            kind=VerdictKind.MOVED,
            text=f"there is no {place.relative}; the anchor stands in {home}",
            new_symbol=home,
            confidence=round(found.count(home) / len(edits), 2),
        )
    return Verdict(
        version=case.label, kind=VerdictKind.GONE, text=f"there is no {place.relative}"
    )  # fmt: skip


def _applies(edit: Edit, text: str) -> bool:
    if not edit.regex:
        return edit.anchor in text
    try:
        return re.search(edit.anchor, text, re.MULTILINE) is not None
    except re.error:
        return False


def _short(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 80 else line[:79] + "…")
