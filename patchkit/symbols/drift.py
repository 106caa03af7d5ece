"""Comparing two versions of a package: kinds, moves, verdicts and reports.

Apart from ``patchkit.symbols`` because reading one symbol needs none of it.
"""

from __future__ import annotations

from patchkit.symbols._build import build_manifest, build_whole, trace
from patchkit.symbols._compare import Change, Kind, compare, gravest
from patchkit.symbols._drift import Drift, Finding, definition, diff
from patchkit.symbols._match import Match
from patchkit.symbols._reports import as_github, as_json, as_markdown, as_sarif, one_line
from patchkit.symbols._sources import InstalledSource, Source, TreeSource, WheelSource
from patchkit.symbols._spec import installed_source, open_tree, open_view, versions_between
from patchkit.symbols._store import shipped_directory, stored_versions
from patchkit.symbols._verdict import (
    Requirement,
    State,
    Verdict,
    judge_requirement,
    overall,
)
from patchkit.symbols._views import ManifestView, SourceView, View

__all__ = [
    "Change",
    "Drift",
    "Finding",
    "InstalledSource",
    "Kind",
    "ManifestView",
    "Match",
    "Requirement",
    "Source",
    "SourceView",
    "State",
    "TreeSource",
    "Verdict",
    "View",
    "WheelSource",
    "as_github",
    "as_json",
    "as_markdown",
    "as_sarif",
    "build_manifest",
    "build_whole",
    "compare",
    "definition",
    "diff",
    "gravest",
    "installed_source",
    "judge_requirement",
    "one_line",
    "open_tree",
    "open_view",
    "overall",
    "shipped_directory",
    "stored_versions",
    "trace",
    "versions_between",
]
