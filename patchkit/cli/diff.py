"""``patchkit diff``: how symbols fare from one version to another."""

from __future__ import annotations

import json
import sys
import time
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchkit.cli._refusal import refuse
from patchkit.errors import ConfigurationError, PatchkitError

if TYPE_CHECKING:
    from patchkit.engine import Adapter
    from patchkit.symbols.drift import Drift, Requirement, Verdict, View

app = typer.Typer(add_completion=False)


class Format(str, Enum):
    """How the answer is written."""

    table = "table"
    json = "json"
    markdown = "markdown"
    sarif = "sarif"
    github = "github"


@app.command()
def diff(
    old: Annotated[str, typer.Argument(help="vllm@0.26.0, a manifest, a wheel or a folder.")],
    new: Annotated[str, typer.Argument(help="The same, for the version asked about.")],
    adapter: Annotated[
        str | None, typer.Option("--adapter", "-a", help="Only what this adapter needs.")
    ] = None,
    symbol: Annotated[
        list[str] | None, typer.Option("--symbol", "-s", help="Only this symbol; repeatable.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every symbol.")] = False,
    package: Annotated[
        str | None, typer.Option(help="The import package, where a wheel or folder has several.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Only what this profile of the adapter needs.")
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(help="SYMBOL=DIGEST: let one drifted symbol pass, unreviewed; repeatable."),
    ] = None,
    body: Annotated[bool, typer.Option("--body", help="Show what changed in the code.")] = False,
    output: Annotated[Format, typer.Option("--format", "-f", help="How it is written.")] = (
        Format.table
    ),
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    show_unchanged: Annotated[
        bool, typer.Option("--unchanged", help="List unchanged symbols in the table, too.")
    ] = False,
) -> None:
    """Compare two versions: what is gone, moved, renamed or changed.

    Exit 0: nothing to do. Exit 1: something is. Exit 2: the question was wrong.
    """
    started = time.perf_counter()
    output = Format.json if as_json else output
    try:
        code = _run(
            old, new, adapter, symbol or [], everything, package, profile, accept or [], body,
            output, show_unchanged, started,
        )  # fmt: skip
    except PatchkitError as error:
        refuse(error, output is Format.json)
    raise typer.Exit(code)


def _run(
    old_text: str,
    new_text: str,
    adapter_name: str | None,
    symbols: list[str],
    everything: bool,
    package: str | None,
    profile: str | None,
    accept: list[str],
    body: bool,
    output: Format,
    show_unchanged: bool,
    started: float,
) -> int:
    from patchkit.symbols import Symbol

    if sum(map(bool, (adapter_name, symbols, everything))) != 1:
        raise ConfigurationError("say what to compare: one of --adapter, --symbol and --all")
    if profile is not None and adapter_name is None:
        raise ConfigurationError("--profile goes with --adapter")
    for symbol in symbols:
        Symbol.parse(symbol)
    named = package
    adapter, needed = _needs(adapter_name, profile)
    package = package or _package(old_text, new_text, symbols, needed)
    extra = adapter.manifests if adapter is not None else ()
    old, new = _open_both(old_text, new_text, package, extra, everything)
    if old.package != new.package:
        raise ConfigurationError(f"{old.label} is {old.package}, {new.label} is {new.package}")
    if named is not None and named != old.package:
        raise ConfigurationError(f"--package is {named}, and {old.label} is {old.package}")
    needed = [r for r in needed if r.package == old.package]
    wanted: list[str] | None = symbols or [r.symbol for r in needed]
    if everything:
        wanted = None
    elif not wanted:
        raise ConfigurationError(f"adapter {adapter_name!r} needs nothing of {old.package}")
    drift = _compare(old, new, wanted, extra, output)
    if symbols and drift.unknown:
        listing = "; ".join(f"{s}: {why}" for s, why in drift.unknown.items())
        raise ConfigurationError(
            f"{listing}. Name a wheel or a folder to look further than the stored symbols"
        )
    verdicts = _verdicts(adapter, needed, drift, old, new, accept)
    seconds = round(time.perf_counter() - started, 3)
    _print(drift, verdicts, adapter, output, show_unchanged, seconds)
    if body:
        # Beside the table only: the other forms are for a reader that takes nothing else.
        _print_bodies(drift, old, new, sys.stdout if output is Format.table else sys.stderr)
    return _code(drift, verdicts)


def _needs(name: str | None, profile: str | None) -> tuple[Adapter | None, list[Requirement]]:
    if name is None:
        return None, []
    from patchkit.cli._requirements import requirements
    from patchkit.engine import find_adapter

    adapter = find_adapter(name)
    chosen = adapter.profile(profile) if profile else None
    return adapter, requirements(adapter, chosen)


def _package(old: str, new: str, symbols: list[str], needed: list[Requirement]) -> str | None:
    """The package that is meant, as far as the question says it."""
    from patchkit.symbols import Symbol

    if symbols:
        packages = {Symbol.parse(s).package for s in symbols}
        if len(packages) > 1:
            raise ConfigurationError(
                f"the symbols are of several packages ({', '.join(sorted(packages))}); "
                "compare one at a time"
            )
        return packages.pop()
    for text in (old, new):
        name, at, _ = text.partition("@")
        if at and name.isidentifier():
            return name
    for package in sorted({r.package for r in needed}):
        for text in (old, new):
            path = Path(text)
            if path.name.partition("-")[0].startswith(package) or (path / package).is_dir():
                return package
    return None


def _open_both(
    old: str, new: str, package: str | None, extra: Any, everything: bool
) -> tuple[View, View]:
    from patchkit.symbols.drift import open_view

    return (
        open_view(old, package=package, extra=extra, whole=everything),
        open_view(new, package=package, extra=extra, whole=everything),
    )


def _compare(old: View, new: View, wanted: list[str] | None, extra: Any, output: Format) -> Drift:
    from patchkit.symbols import Manifest
    from patchkit.symbols.drift import diff as compare_views
    from patchkit.symbols.drift import versions_between

    between: list[Manifest] = []
    if old.kind == new.kind == "manifest":
        between = versions_between(old.package, old, new, extra=extra)
    bar = None
    if output is Format.table and sys.stderr.isatty() and "manifest" not in (old.kind, new.kind):
        from patchkit.cli._progress import Bar

        bar = Bar("reading sources")
    try:
        return compare_views(old, new, wanted, between=between, progress=bar)
    finally:
        if bar is not None:
            bar.close()


def _verdicts(
    adapter: Adapter | None,
    needed: list[Requirement],
    drift: Drift,
    old: View,
    new: View,
    accept: list[str],
) -> list[Verdict]:
    from patchkit.cli._requirements import accepted, reviewed_of
    from patchkit.symbols.drift import judge_requirement

    allowed = accepted(accept)
    if adapter is None:
        if allowed:
            raise ConfigurationError("--accept goes with --adapter")
        return []
    findings = {f.symbol: f for f in drift.findings}
    reviewed = reviewed_of(adapter)
    verdicts = [
        judge_requirement(
            r, new.version, new.facts(r.symbol),
            # Where another patch was meant for OLD, its shape says nothing about this one.
            findings.get(r.symbol) if r.applies(old.version) else None,
            reviewed, allowed, adapter.name,
        )
        for r in needed
    ]  # fmt: skip
    used = {v.requirement.symbol for v in verdicts if v.unreviewed}
    if stale := sorted(set(allowed) - used):
        raise ConfigurationError(
            "--accept names what needs no exception, or another digest than the one found: "
            + ", ".join(stale)
        )
    return verdicts


def _code(drift: Drift, verdicts: list[Verdict]) -> int:
    from patchkit.symbols.drift import Kind, State

    if verdicts:
        fine = (State.READY, State.SKIPPED)
        return int(any(v.state not in fine for v in verdicts))
    return int(any(f.kind is not Kind.UNCHANGED for f in drift.findings))


def _print(
    drift: Drift,
    verdicts: list[Verdict],
    adapter: Adapter | None,
    output: Format,
    show_unchanged: bool,
    seconds: float,
) -> None:
    from patchkit.symbols import drift as reports

    name = adapter.name if adapter is not None else None
    if output is Format.json:
        print(json.dumps(reports.as_json(drift, verdicts, adapter=name, seconds=seconds)))
    elif output is Format.markdown:
        print(reports.as_markdown(drift, verdicts, adapter=name))
    elif output is Format.sarif:
        print(json.dumps(reports.as_sarif(drift, verdicts), indent=1))
    elif output is Format.github:
        print("\n".join(reports.as_github(drift, verdicts)))
    else:
        from patchkit.cli._tables import show_drift

        show_drift(drift, verdicts, adapter=name, show_unchanged=show_unchanged, seconds=seconds)


def _print_bodies(drift: Drift, old: View, new: View, stream: Any) -> None:
    from patchkit.cli._bodies import body_diffs

    for text in body_diffs(drift, old, new):
        print(text, file=stream)
