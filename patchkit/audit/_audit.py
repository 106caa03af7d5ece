"""The audit itself: survey a project, judge what it patches, report."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from patchkit.audit._findings import Finding, Report, VerdictKind
from patchkit.audit._guards import Ways, describe, specifiers, spoken
from patchkit.audit._hints import hints
from patchkit.audit._known import is_plain
from patchkit.audit._markers import OwnNames, Stashes, is_stash
from patchkit.audit._project import Project
from patchkit.audit._replacements import Replacement, describe_replacement
from patchkit.audit._sightings import BlindSpot, Sighting
from patchkit.audit._survey import Survey, collector_paused
from patchkit.audit._values import FilePath, Item, Ref
from patchkit.audit._verdicts import Judge, Subject
from patchkit.audit._versions import Target, Versions, open_installed, open_target
from patchkit.audit._workers import Workers
from patchkit.errors import ConfigurationError
from patchkit.symbols import SymbolFacts

_GREAT = frozenset({"torch", "transformers", "vllm", "numpy"})


def audit(
    path: Path | str,
    *,
    packages: Sequence[str] = (),
    installed: bool = False,
    against: Sequence[str] = (),
    old: str | None = None,
    new: str | None = None,
    include_tests: bool = False,
    manifests: Sequence[Path] = (),
    baseline: Iterable[str] = (),
    workers: int = 2,
) -> Report:
    """Find what a project patches and judge it; nothing is imported.

    Args:
        path: The project's folder, or one file.
        packages: Only patches of these import packages.
        installed: Judge against the installed copies beside the versions named; without
            any, that is what happens anyway.
        against: Versions to judge against: ``vllm@0.33.0``, wheels, folders, manifests.
        old: The version that the patches were written for.
        new: The version that is asked about, beside `old`.
        include_tests: Look at test files, too.
        manifests: Further folders of stored manifests.
        baseline: Marks of what is known already.
        workers: How many processes may look at files.

    Raises:
        ConfigurationError: A path or a version names nothing.
    """
    started = time.perf_counter()
    versions = _versions(packages, installed, against, old, new, manifests)
    project = Project(Path(path), frozenset(packages), include_tests)
    with collector_paused():
        survey = Survey(project, workers=workers).run()
        found = survey.found
        findings = list(_findings(survey, versions, frozenset(packages)))
        report = Report(
            root=str(path),
            findings=tuple(_ordered(_with_others(findings))),
            blind_spots=tuple(
                sorted(found.blind_spots, key=lambda b: (b.place.file, b.place.line))
            ),
            doors=tuple(found.doors),
            versions={p: tuple(t.label for t in ts) for p, ts in versions.asked.items() if ts},
            files=len(project.files),
            skipped_tests=project.skipped_tests,
            unreadable={u.file: u.problem for u in project.unreadable},
            baseline=frozenset(baseline),
            hints=hints(findings, versions),
        )
        survey.close()
    return replace(report, seconds=round(time.perf_counter() - started, 3))


def _versions(
    packages: Sequence[str],
    installed: bool,
    against: Sequence[str],
    old: str | None,
    new: str | None,
    manifests: Sequence[Path],
) -> Versions:
    if (old is None) != (new is None):
        raise ConfigurationError("--from and --to belong together: name both, or neither")
    if missing := [str(folder) for folder in manifests if not folder.is_dir()]:
        raise ConfigurationError(f"--manifests {', '.join(missing)}: there is no such folder")
    package = packages[0] if len(packages) == 1 else None
    versions = Versions(also_installed=installed)
    if old is not None and new is not None:
        base, target = (
            open_target(old, package, manifests), open_target(new, package, manifests)
        )  # fmt: skip
        if base.package != target.package:
            raise ConfigurationError(
                f"{old} is {base.package}, {new} is {target.package}: name one package twice"
            )
        versions.base[base.package] = base
        versions.ask(base)
        versions.ask(target)
    for text in against:
        versions.ask(open_target(text, package, manifests))
    if installed:
        for name in packages:
            versions.ask(open_installed(name))
    return versions


def _findings(survey: Survey, versions: Versions, packages: frozenset[str]) -> Iterable[Finding]:
    ways = Ways(survey.found.edges)
    workers = Workers(survey)
    own = OwnNames(survey.project.own_roots)
    judge = Judge(
        versions, ways, survey.found.settings, survey.found.sightings, survey.uses, own.mentions
    )  # fmt: skip
    stashes = Stashes(survey.found.sightings)
    for sighting in survey.found.sightings:
        if stashes.concerns(sighting) or _of_ones_own(sighting, own):
            continue
        sighting = _at_home(sighting, versions)
        package = _package(sighting)
        if packages and package not in packages:
            continue
        symbol = symbol_of(sighting, versions, survey.known_modules)
        if symbol is None or _only_configures(sighting, symbol, versions):
            continue
        replacement = _replacement(sighting, survey)
        if sighting.of_subclass and not _is_its_own(symbol, versions, package):
            _note_subclass(sighting, symbol, survey)
            continue
        subject = Subject(sighting, symbol, replacement)
        verdicts = judge.verdicts(subject, package)
        if _adds_a_marker(sighting, symbol, versions, package):
            continue
        action = sighting.action
        if action == "replace" and replacement.keeps_original and replacement.kind == "function":
            action = "wrap"
        where = (
            *spoken(sighting.guards, sighting.before_call),
            *_of_calls(ways, sighting),
        )
        ranges, rest = specifiers(where, package)
        yield Finding(
            target=symbol,
            package=package,
            action=action,
            form=sighting.form,
            key=sighting.key,
            place=sighting.place,
            through=sighting.through,
            function=sighting.function.qualname if sighting.function is not None else "",
            conditions=tuple(describe(where)),
            replacement=replacement.reference,
            replacement_kind=replacement.kind,
            signature=replacement.signature,
            keeps_original=replacement.keeps_original,
            importable=replacement.importable,
            descriptor=replacement.descriptor,
            value=replacement.value,
            versions=ranges,
            unexpressed=tuple(rest),
            workers=workers.of(sighting),
            anchors=tuple(e.anchor for e in sighting.edits),
            source=_line(sighting),
            verdicts=verdicts,
        )


def _of_calls(ways: Ways, sighting: Sighting) -> tuple:  # type: ignore[type-arg]
    """The tests of the call, where a function is called in one place only."""
    conditions = ways.conditions(sighting.function)
    return conditions[0] if len(conditions) == 1 else ()


def _package(sighting: Sighting) -> str:
    target = sighting.target
    if isinstance(target, FilePath):
        return target.package
    return target.owner.root if isinstance(target, Item) else target.root


def symbol_of(sighting: Sighting, versions: Versions, known_modules: set[str]) -> str | None:
    """``module:qualname`` of a target; a module's name; the path of a file."""
    target = sighting.target
    if isinstance(target, FilePath):
        return target.relative
    if isinstance(target, Item):
        target = target.owner
    if sighting.action == "module":
        return target.dotted
    if sighting.action == "dispatch":
        parts = target.dotted.split(".")
        return f"torch.ops.{parts[2]}:{parts[3]}"
    for version in _candidates(versions, target.root):
        found = version.split(target)
        if found is not None:
            module, name = found
            if not name:
                return module
            if _leads_somewhere(version, module, name):
                return f"{module}:{name}"
    return _guessed(target, known_modules)


def _of_ones_own(sighting: Sighting, own: OwnNames) -> bool:
    """Whether what is written to has the project's own name: a note, or something it added."""
    target = sighting.target.owner if isinstance(sighting.target, Item) else sighting.target
    return isinstance(target, Ref) and own.in_path(target)


def _at_home(sighting: Sighting, versions: Versions) -> Sighting:
    """With the target where it lives: ``trainer.nn.Linear.forward`` is one of torch.

    What is reached *through* a name that a module imports from another package is that
    package's. The name itself, rebound, is the module's.
    """
    target = sighting.target
    if not isinstance(target, Ref):
        return sighting
    for _ in range(4):
        moved = _through_an_import(target, versions)
        if moved is None:
            break
        target = moved
    return sighting if target is sighting.target else replace(sighting, target=target)


def _through_an_import(target: Ref, versions: Versions) -> Ref | None:
    candidates = _candidates(versions, target.root)
    for version in candidates:
        found = version.split(target)
        if found is None:
            continue
        module, name = found
        head, dot, rest = name.partition(".")
        if not dot or version.facts(f"{module}:{head}") is not None:
            return None
        origin = version.imported(module, head)
        if origin is None:
            return None
        home, _, first = origin.partition(":")
        return Ref(home, (*((first,) if first else ()), *rest.split(".")))
    if not candidates:
        # Without source: a package is not called like one of the great ones in passing.
        for index, name in enumerate(target.attrs[:-1]):
            if name in _GREAT and name != target.root:
                return Ref(name, target.attrs[index + 1 :])
    return None


def _is_its_own(symbol: str, versions: Versions, package: str) -> bool:
    """Whether a class has a member of its own at one of the versions at hand."""
    found = [v.facts(symbol) for v in _candidates(versions, package)]
    return any(f is not None and not f.inherited_from for f in found)


def _note_subclass(sighting: Sighting, symbol: str, survey: Survey) -> None:
    owner = symbol.rpartition(".")[0]
    why = f"the class that is written to is some subclass of {owner}, known at run time only"
    spot = BlindSpot("class of an object", sighting.place, _line(sighting), why)
    survey.found.blind_spots.append(spot)


def _candidates(versions: Versions, package: str) -> list[Target]:
    found = list(versions.of(package))
    base = versions.base.get(package)
    if base is not None and base not in found:
        found.insert(0, base)
    installed = versions.installed(package)
    if installed is not None and all(t.version != installed.version for t in found):
        found.append(installed)
    return found


def _leads_somewhere(version: Target, module: str, name: str) -> bool:
    """Whether the first name, at least, exists: then the split is the right one."""
    if "." not in name:
        return True
    head = name.partition(".")[0]
    return version.facts(f"{module}:{head}") is not None


def _guessed(target: Ref, known_modules: set[str]) -> str:
    """Where no version at hand has the module: by the imports, then by spelling."""
    parts = target.dotted.split(".")
    length = len(target.module.split("."))
    for count in range(len(parts) - 1, length, -1):
        if ".".join(parts[:count]) in known_modules:
            length = count
            break
    while length < len(parts) - 1 and not parts[length].lstrip("_")[:1].isupper():
        length += 1
    if length >= len(parts):
        return ".".join(parts)
    return f"{'.'.join(parts[:length])}:{'.'.join(parts[length:])}"


def _facts(symbol: str, versions: Versions, package: str) -> SymbolFacts | None:
    for version in _candidates(versions, package):
        facts = version.facts(symbol) if ":" in symbol else None
        if facts is not None:
            return facts
    return None


def _only_configures(sighting: Sighting, symbol: str, versions: Versions) -> bool:
    """A plain value on an object that lives in a foreign module: a setting of that object."""
    if sighting.action != "value" or not isinstance(sighting.target, Ref) or ":" not in symbol:
        return False
    if not is_plain(sighting.replacement):
        return False
    module, _, name = symbol.partition(":")
    owner = name.rpartition(".")[0]
    if not owner:
        return False
    facts = _facts(f"{module}:{owner}", versions, sighting.target.root)
    if facts is None:
        return not owner.rpartition(".")[2].lstrip("_")[:1].isupper()
    return facts.kind != "class"


def _adds_a_marker(sighting: Sighting, symbol: str, versions: Versions, package: str) -> bool:
    """A note of the project's own under a name that nothing has: no patch.

    A plain value (``Engine._patched = True``), or the original kept beside its place
    (``Engine._original_run = Engine.run``).
    """
    if sighting.must_exist or ":" not in symbol:
        return False
    stashes = is_stash(sighting)
    if sighting.action != "value" and not stashes:
        return False
    module, _, name = symbol.partition(":")
    owner, _, last = name.rpartition(".")
    if not stashes and not last.startswith("_") and "patched" not in last.lower():
        return False  # a public name is there to be read by others
    candidates = _candidates(versions, package)
    if not candidates:
        return stashes or last.startswith("_")
    for version in candidates:
        if version.source is None or version.facts(symbol) is not None:
            return False
        raw = version.source.source.raw(module)
        if raw is not None and raw.dynamic and not owner and not last.startswith("_"):
            return False
        there = version.facts(f"{module}:{owner}") if owner else version.is_module(module)
        if not there and not stashes:
            return False
    return True


def _replacement(sighting: Sighting, survey: Survey) -> Replacement:
    target = sighting.target if not isinstance(sighting.target, FilePath) else Ref("")
    found = describe_replacement(sighting.replacement, target, survey.interpreter)
    if found.kind == "unknown" and sighting.action in ("rewrite", "delete"):
        return replace(found, reference="", kind="")
    return found


def _line(sighting: Sighting) -> str:
    lines = sighting.module.source.splitlines()
    if sighting.place.file != sighting.module.file:
        return ""
    line = sighting.place.line
    return lines[line - 1].strip()[:200] if 0 < line <= len(lines) else ""


def _with_others(findings: list[Finding]) -> Iterable[Finding]:
    """Each finding with the other places that patch the same."""
    places: dict[str, list[Finding]] = {}
    for finding in findings:
        places.setdefault(finding.identity, []).append(finding)
    for finding in findings:
        others = sorted(
            {str(f.place) for f in places[finding.identity] if f is not finding}
            - {str(finding.place)}
        )
        yield replace(finding, also_patched=tuple(others)) if others else finding


def _ordered(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(
        findings,
        key=lambda f: (f.package, f.target.partition(":")[0], f.target, f.place.file, f.place.line),
    )


__all__ = ["VerdictKind", "audit"]
