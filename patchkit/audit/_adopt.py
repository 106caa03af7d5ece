"""From findings to a skeleton adapter that declares the same patches."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from keyword import iskeyword
from pathlib import Path

from patchkit.audit._findings import A_NEW_NAME, Finding, Report, VerdictKind
from patchkit.errors import ConfigurationError
from patchkit.files import writing

_TODO = "TODO"
# Wrappers that get (wrapped, instance, args, kwargs), or the original before their arguments.
_WRAPPER_FORMS = frozenset({
    "wrapt", "ddtrace", "opentelemetry", "mpat", "newrelic", "elasticapm", "sentry_sdk",
    "openinference", "aws_xray_sdk", "logfire", "langfuse", "traceloop", "instana", "scout_apm",
})  # fmt: skip


# The skeleton is a distribution of its own, so that the adapter is found by its name.
_PYPROJECT = """\
[build-system]
requires = ["setuptools>=61"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}-adapter"
version = "0"
dependencies = ["patchkit"]

[project.entry-points."patchkit.adapters"]
{name} = "{name}_adapter:adapter"

[tool.setuptools]
packages = ["{name}_adapter"]
package-dir = {{ {name}_adapter = "." }}

[tool.setuptools.package-data]
{name}_adapter = ["reviewed.json"]
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unexpressed:
    """A patch, or a part of one, that the skeleton does not say.

    Attributes:
        finding: The patch.
        reason: Why not.
        remedy: What to do about it.
        declared: Whether the patch itself is in the skeleton all the same.
    """

    finding: Finding
    reason: str
    remedy: str
    declared: bool

    def __str__(self) -> str:
        return f"{self.finding.place} {self.finding.identity}: {self.reason}; {self.remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """What ``patchkit adopt`` writes.

    Attributes:
        name: The adapter's name.
        declared: The findings that became patches.
        unexpressed: What could not be said.
        files: Relative path -> text.
    """

    name: str
    declared: tuple[Finding, ...]
    unexpressed: tuple[Unexpressed, ...]
    files: dict[str, str]


def adopt(report: Report, name: str, *, side: str = "rollout") -> Skeleton:
    """A skeleton adapter for what an audit found.

    Args:
        report: The audit's answer.
        name: The name of the adapter.
        side: ``rollout`` or ``trainer``: where patches of the trainer's packages go
            is decided per package, everything else goes here.
    """
    if not name.isidentifier() or iskeyword(name):
        raise ConfigurationError(f"the name {name!r} is no identifier")
    if side not in ("rollout", "trainer"):
        raise ConfigurationError(f"--side is rollout or trainer, not {side!r}")
    declared: list[tuple[Finding, str]] = []
    left: list[Unexpressed] = []
    seen: dict[tuple[str, str], Finding] = {}
    for finding in report.findings:
        obstacle = _obstacle(finding)
        if obstacle is not None:
            left.append(
                Unexpressed(finding=finding, reason=obstacle[0], remedy=obstacle[1], declared=False)
            )
            continue
        key = (finding.identity, finding.versions)
        earlier = seen.get(key)
        if earlier is not None:
            left.append(
                Unexpressed(
                    finding=finding,
                    reason=f"{earlier.place} patches it already, under the same versions",
                    remedy="join the two, or give them version ranges that exclude each other",
                    declared=False,
                )
            )
            continue
        seen[key] = finding
        declared.append((finding, _side(finding, side)))
        left += _remarks(finding)
    findings = tuple(f for f, _ in declared)
    files = {
        "__init__.py": _module(name, declared),
        "pyproject.toml": _PYPROJECT.format(name=name),
        "reviewed.json": json.dumps({"schema": 1, "symbols": {}}, indent=1) + "\n",
        "README.md": _readme(name, findings, left, report),
    }
    return Skeleton(name=name, declared=findings, unexpressed=tuple(left), files=files)


def write_skeleton(skeleton: Skeleton, folder: Path) -> None:
    """Write the files; nothing that exists is overwritten.

    Raises:
        ConfigurationError: One of the files exists, or cannot be written.
    """
    taken = [str(folder / file) for file in skeleton.files if (folder / file).exists()]
    if taken:
        raise ConfigurationError(
            f"{', '.join(taken)}: nothing is overwritten; name another folder with --output"
        )
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in skeleton.files.items():
            (folder / file).write_text(text, "utf-8")


def _obstacle(finding: Finding) -> tuple[str, str] | None:
    """Why a finding cannot be declared at all, and what to do."""
    if finding.action == "rewrite":
        return (
            "it rewrites source text by anchors",
            "write the changed function out and declare it as a replacement",
        )
    if finding.action == "module":
        return (
            "it replaces a whole module",
            "declare the functions and classes of the module that are used",
        )
    if finding.action in ("class-swap", "delete"):
        return (
            f"there is no declaration for a {finding.action}",
            "replace the methods of the class, or the value, instead",
        )
    if ":" not in finding.target:
        return ("its target is no symbol", "name the symbol that is meant")
    if finding.verdicts and all(v.text == A_NEW_NAME for v in finding.verdicts):
        return (
            "it adds a name, and a declaration changes what is there",
            "keep the addition where it is, or declare a replacement of what looks for the name",
        )
    if finding.action == "value":
        return None
    if finding.form in _WRAPPER_FORMS:
        return (
            f"its wrapper has the signature that {finding.form} wants",
            "make it a factory(original) that returns a function with the original's "
            'signature, and declare it with action="wrap"',
        )
    if finding.replacement_kind in ("unknown", "object", "") or not finding.replacement:
        return (
            "what it writes is made at run time",
            "give the replacement a name in a module",
        )
    if not finding.importable or not re.fullmatch(r"[\w.]+:[\w.]+|[\w.]+", finding.replacement):
        return (
            f"its replacement {finding.replacement} is defined inside a function",
            "move it to the top of a module, so that it can be named",
        )
    return None


def _remarks(finding: Finding) -> Iterator[Unexpressed]:
    """Parts of a declared finding that its declaration does not say."""
    if finding.unexpressed:
        yield Unexpressed(
            finding=finding,
            reason="its condition is no version range: " + " and ".join(finding.unexpressed),
            remedy="decide it in a profile, or split the adapter",
            declared=True,
        )
    if finding.action == "wrap":
        yield Unexpressed(
            finding=finding,
            reason="the replacement keeps the original itself, as it was when its module was "
            "imported",
            remedy='make it a factory(original) and declare it with action="wrap"',
            declared=True,
        )


def _side(finding: Finding, side: str) -> str:
    return (
        "rollout"
        if finding.package == "vllm"
        else ("trainer" if finding.package in ("transformers", "torch", "accelerate") else side)
    )


def _module(name: str, declared: list[tuple[Finding, str]]) -> str:
    lines = [
        f'"""The patches that were found in the project, declared for the adapter {name}.',
        "",
        "A skeleton: every TODO is a question to a person, and nothing here is reviewed.",
        '"""',
        "",
        "from __future__ import annotations",
        "",
        "from pathlib import Path",
        "",
    ]
    needs_value = any(f.action == "value" and isinstance(f.value, str) for f, _ in declared)
    lines.append("from patchkit.engine import Adapter, Patch" + (", Value" if needs_value else ""))
    for side in ("rollout", "trainer"):
        chosen = [f for f, s in declared if s == side]
        lines += ["", f"{side.upper()} = ("]
        for finding in chosen:
            lines += [f"    {line}" for line in _patch(finding)]
        lines.append(")")
    lines += [
        "",
        "adapter = Adapter(",
        f'    name="{name}",',
        "    rollout=ROLLOUT,",
        "    trainer=TRAINER,",
        '    reviewed=Path(__file__).parent / "reviewed.json",',
        ")",
        "",
    ]
    return "\n".join(lines)


def _patch(finding: Finding) -> Iterator[str]:
    worst = finding.worst()
    yield f"# {finding.place}: {finding.source or finding.form}"[:99]
    if worst is not None and worst.kind is not VerdictKind.FINE:
        yield f"# {worst.version}: {worst.kind.sentence}: {worst.text}"[:99]
    yield "Patch("
    yield f"    symbol={finding.target!r},"
    # A wrapper that keeps the original by itself is, to the engine, a replacement.
    action = "replace" if finding.action == "wrap" else finding.action
    yield f"    action={action!r},"
    yield f"    replacement={_replacement(finding)},"
    if finding.key is not None and action in ("register", "dispatch"):
        yield f"    key={finding.key!r},"
    if finding.versions:
        yield f"    versions={finding.versions!r},"
    for field in ("reason", "consequence", "until"):
        yield f'    {field}="{_TODO}",'
    yield "),"


def _replacement(finding: Finding) -> str:
    if finding.action == "value":
        return (
            f"Value({finding.value!r})" if isinstance(finding.value, str) else repr(finding.value)
        )
    reference = finding.replacement
    if ":" not in reference:
        module, _, name = reference.rpartition(".")
        reference = f"{module}:{name}"
    return repr(reference)


def _readme(
    name: str, declared: tuple[Finding, ...], left: list[Unexpressed], report: Report
) -> str:
    lines = [
        f"# {name}",
        "",
        f"Skeleton of an adapter, made from what `patchkit audit` found in `{report.root}`: "
        f"{len(declared)} of {len(report.findings)} patches are declared in `__init__.py`.",
        "",
        "1. `pip install -e .` here, so that the adapter is found by its name (or move the folder "
        "into a package of yours, declare the entry point there, and delete `pyproject.toml`).",
        f"2. `patchkit check {name} --static`: what stands against each patch, from the sources "
        "alone; without `--static` the replacements are imported, with all that they import.",
        "3. Answer each TODO: reason, consequence of leaving it out, when it can go.",
        "4. Turn wrappers into factories, `factory(original)`.",
        f"5. `patchkit adapt {name}` records what was reviewed.",
        "6. Delete each patch from the project as the adapter takes it over.",
        "",
        "## What the skeleton does not say",
        "",
    ]
    if not left and not report.blind_spots:
        lines.append("Nothing: everything that was found is declared.")
    for entry in left:
        state = "declared, but" if entry.declared else "not declared:"
        lines.append(
            f"- {entry.finding.place} `{entry.finding.identity}`: {state} {entry.reason}. "
            f"To do: {entry.remedy}."
        )
    for spot in report.blind_spots:
        lines.append(f"- {spot.place}: not seen: {spot.reason}.")
    return "\n".join(lines) + "\n"
