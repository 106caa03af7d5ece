"""``patchkit adapt``: record what was reviewed, and propose where moved symbols went."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchkit.cli._refusal import refuse
from patchkit.errors import ConfigurationError, PatchkitError
from patchkit.files import write_atomically, writing

if TYPE_CHECKING:
    from patchkit.engine import Adapter
    from patchkit.symbols.drift import Finding, Requirement, View

app = typer.Typer(add_completion=False)


@app.command()
def adapt(
    adapter: Annotated[str, typer.Argument(help="The adapter.")],
    against: Annotated[
        list[str] | None,
        typer.Option(
            "--against", help="The version reviewed: vllm@0.32.0, a manifest, wheel or folder."
        ),
    ] = None,
    since: Annotated[
        list[str] | None,
        typer.Option(help="The version it worked with before, to find where symbols went."),
    ] = None,
    symbol: Annotated[
        list[str] | None, typer.Option("--symbol", "-s", help="Only this one; repeatable.")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="I have read the changes: write reviewed.json.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Show what is not reviewed yet, and with --yes record that it now is.

    Moves are never applied: the change to the declaration is written beside it, as
    moves.patch, for a person to look at. Exit 0: everything is reviewed (or was recorded
    now) and nothing moved; exit 1: something waits for a person.
    """
    try:
        result = _adapt(adapter, against or [], since or [], set(symbol or []), yes)
    except PatchkitError as error:
        refuse(error, as_json)
    if as_json:
        print(json.dumps(result))
    else:
        _show(result)
    waiting = result["moves"] or result["gone"] or (result["new_digests"] and not yes)
    raise typer.Exit(1 if waiting else 0)


def _adapt(
    name: str, against: list[str], since: list[str], only: set[str], yes: bool
) -> dict[str, Any]:
    from patchkit.cli._requirements import requirements, reviewed_of
    from patchkit.engine import find_adapter

    adapter = find_adapter(name)
    needed = requirements(adapter)
    if only and (unknown := sorted(only - {r.symbol for r in needed})):
        raise ConfigurationError(f"adapter {name!r} needs nothing called {', '.join(unknown)}")
    packages = sorted({r.package for r in needed})
    views = [_open(text, packages, adapter) for text in against or _installed(packages)]
    befores = {v.package: v for v in (_open(text, packages, adapter) for text in since)}
    reviewed = reviewed_of(adapter)
    result: dict[str, Any] = {
        "adapter": name,
        "versions": {v.package: v.version for v in views},
        "new_digests": [],
        "confirmed": [],
        "gone": [],
        "moves": [],
        "written": [],
    }
    for view in views:
        mine = [
            r
            for r in needed
            if r.package == view.package
            and r.applies(view.version)
            and (not only or r.symbol in only)
        ]
        _judge(adapter, view, mine, befores.get(view.package), reviewed, result)
    if yes and (result["new_digests"] or result["confirmed"]):
        result["written"].append(str(_record(adapter, result)))
    if result["moves"]:
        written = _propose(adapter, result["moves"])
        result["written"] += [str(p) for p in written]
    return result


def _installed(packages: Sequence[str]) -> list[str]:
    """Everything installed of what the adapter needs."""
    from patchkit.symbols import installed_version
    from patchkit.symbols.errors import PackageNotInstalledError

    found = []
    for package in packages:
        try:
            installed_version(package)
        except PackageNotInstalledError:
            continue
        found.append(f"{package}@installed")
    if not found:
        raise ConfigurationError(
            f"none of {', '.join(packages)} is installed; say --against vllm@0.32.0"
        )
    return found


def _open(text: str, packages: Sequence[str], adapter: Adapter) -> View:
    from patchkit.symbols.drift import open_view

    package = next((p for p in packages if Path(text).name.startswith(p)), None)
    view = open_view(text, package=package, extra=adapter.manifests)
    if view.package not in packages:
        raise ConfigurationError(f"adapter {adapter.name!r} needs nothing of {view.package}")
    return view


def _judge(
    adapter: Adapter,
    view: View,
    needed: Sequence[Requirement],
    before: View | None,
    reviewed: dict[str, dict[str, list[str]]],
    result: dict[str, Any],
) -> None:
    from patchkit.symbols.drift import diff, versions_between

    findings: dict[str, Finding] = {}
    if before is not None:
        between = versions_between(view.package, before, view, extra=adapter.manifests)
        for finding in diff(before, view, [r.symbol for r in needed], between=between).findings:
            findings[finding.symbol] = finding
    public = view.version.partition("+")[0]
    for requirement in needed:
        symbol = requirement.symbol
        facts = view.facts(symbol)
        drifted = findings.get(symbol)
        if drifted is not None and drifted.new_symbol is not None:
            result["moves"].append(
                {
                    "symbol": symbol,
                    "new_symbol": drifted.new_symbol,
                    "confidence": drifted.confidence,
                    "evidence": drifted.evidence,
                    "versions": requirement.versions,
                    "version": public,
                }
            )
        if facts is None:
            if drifted is None or drifted.new_symbol is None:
                result["gone"].append({"symbol": symbol, "version": public})
            continue
        entry: dict[str, Any] = {"symbol": symbol, "digest": facts.digest, "version": public}
        known = reviewed.get(symbol, {})
        if facts.digest not in known:
            entry["where"] = f"{facts.file}:{facts.line}"
            entry["known"] = sorted({v for versions in known.values() for v in versions})
            if entry not in result["new_digests"]:
                result["new_digests"].append(entry)
        elif public not in known[facts.digest] and entry not in result["confirmed"]:
            result["confirmed"].append(entry)


def _record(adapter: Adapter, result: dict[str, Any]) -> Path:
    """Write the digests into reviewed.json, the whole file or nothing of it."""
    from packaging.version import Version

    path = adapter.reviewed
    if not isinstance(path, Path):
        raise ConfigurationError(
            f"adapter {adapter.name!r} keeps its reviewed digests in no file; "
            "declare reviewed=Path(...)"
        )
    data: dict[str, Any] = {"schema": 1, "symbols": {}}
    if path.is_file():
        data = json.loads(path.read_text(encoding="utf-8"))
    for entry in (*result["new_digests"], *result["confirmed"]):
        digests = data["symbols"].setdefault(entry["symbol"], {})
        versions = {v.partition("+")[0] for v in digests.get(entry["digest"], [])}
        digests[entry["digest"]] = sorted(versions | {entry["version"]}, key=Version)
    symbols = {
        symbol: dict(sorted(digests.items(), key=lambda d: [Version(v) for v in d[1]]))
        for symbol, digests in sorted(data["symbols"].items())
    }
    text = json.dumps({"schema": 1, "symbols": symbols}, indent=1) + "\n"
    with writing(path):
        return write_atomically(path, text.encode())


def _propose(adapter: Adapter, moves: list[dict[str, Any]]) -> list[Path]:
    """Write the change to the declarations as a patch file beside them."""
    from patchkit.cli._proposal import declaration_files, proposal

    files = declaration_files(adapter)
    if not files:
        raise ConfigurationError(
            f"the files that declare adapter {adapter.name!r} were not found; "
            "the moves listed have to be entered by hand"
        )
    text = proposal(files, moves)
    target = files[0].parent / "moves.patch"
    with writing(target):
        return [write_atomically(target, text.encode())]


def _show(result: dict[str, Any]) -> None:
    for entry in result["new_digests"]:
        known = f"reviewed at {', '.join(entry['known'])}" if entry["known"] else "never reviewed"
        print(f"{entry['symbol']} {entry['version']}: {entry['digest']} is new ({known})")
        print(f"    read {entry['where']}")
    for entry in result["gone"]:
        print(f"{entry['symbol']} {entry['version']}: gone")
    for move in result["moves"]:
        print(
            f"{move['symbol']} → {move['new_symbol']} in {move['version']} "
            f"(confidence {move['confidence']:.2f}: {move['evidence']})"
        )
    for file in result["written"]:
        print(f"written: {file}")
    if result["moves"]:
        print("moves are proposals: read moves.patch, apply it with `git apply`, delete it")
    if result["new_digests"] and not result["written"]:
        print(
            "nothing was written: read these functions, or what changed in them "
            "(`patchkit diff OLD NEW --body`), then say --yes"
        )
    if not any(result[k] for k in ("new_digests", "gone", "moves")):
        print("everything that the adapter needs is reviewed")
