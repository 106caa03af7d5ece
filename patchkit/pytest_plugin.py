"""A pytest plugin: one test item per patch of the adapters that a project names.

In ``pyproject.toml``::

    [tool.pytest.ini_options]
    patchkit_adapters = ["qwen3_moe"]

or ``pytest --patchkit-adapter qwen3_moe``. Each item reads the installed package, does
not import it, and fails where a patched symbol is gone, moved or not as reviewed. What
is not installed is skipped. Nothing depends on the working directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from patchkit.symbols.drift import Requirement, Verdict

_OPTION = "patchkit_adapters"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option and its counterpart in the configuration file."""
    parser.addini(_OPTION, "adapters whose patches are checked, one item each", type="args")
    parser.getgroup("patchkit").addoption(
        "--patchkit-adapter",
        action="append",
        default=[],
        metavar="NAME",
        help="check the patches of this adapter; repeatable",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add the items; before others look at the list, so that ``-k`` and ``-m`` hold."""
    names = dict.fromkeys([*config.getini(_OPTION), *config.getoption("--patchkit-adapter")])
    for name in names:
        items += _items(session, name)


def _items(session: pytest.Session, name: str) -> Iterator[pytest.Item]:
    from patchkit.cli._requirements import requirements, reviewed_of
    from patchkit.engine import find_adapter
    from patchkit.errors import PatchkitError

    try:
        adapter = find_adapter(name)
        reviewed = reviewed_of(adapter)
        needed = requirements(adapter)
    except PatchkitError as error:
        raise pytest.UsageError(str(error)) from error
    seen: set[str] = set()
    for requirement in needed:
        # The same symbol may be patched differently for several versions.
        label = f"{name}::{requirement.role}::{requirement.symbol}"
        if requirement.versions and label in seen:
            label += f"[{requirement.versions}]"
        seen.add(label)
        yield PatchItem.from_parent(
            session,
            name=f"patchkit::{label}",
            adapter=name,
            requirement=requirement,
            reviewed=reviewed,
        )


class DriftError(Exception):
    """A patch that is not ready for what is installed."""


class PatchItem(pytest.Item):
    """One patched symbol, checked against what is installed."""

    def __init__(
        self,
        *,
        adapter: str,
        requirement: Requirement,
        reviewed: dict[str, dict[str, list[str]]],
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.adapter = adapter
        self.requirement = requirement
        self.reviewed = reviewed

    def runtest(self) -> None:
        """Read the symbol where it is installed, and judge it."""
        from patchkit.symbols import find_facts, installed_version
        from patchkit.symbols.drift import State, judge_requirement
        from patchkit.symbols.errors import PackageNotInstalledError

        package = self.requirement.package
        try:
            version = installed_version(package)
        except PackageNotInstalledError:
            pytest.skip(f"{package} is not installed")
        verdict = judge_requirement(
            self.requirement,
            version,
            find_facts(self.requirement.symbol),
            None,
            self.reviewed,
            {},
            self.adapter,
        )
        if verdict.state is State.SKIPPED:
            pytest.skip(f"{package} {version}: {verdict.reason}")
        if verdict.state is not State.READY:
            raise DriftError(_message(verdict, version))

    def repr_failure(self, excinfo: Any, style: Any = None) -> str:
        """The message alone: a traceback through this plugin helps nobody."""
        if isinstance(excinfo.value, DriftError):
            return str(excinfo.value)
        return str(super().repr_failure(excinfo, style))

    def reportinfo(self) -> tuple[str, int | None, str]:
        """Where the item stands in reports."""
        return "patchkit", None, self.name


def _message(verdict: Verdict, version: str) -> str:
    requirement = verdict.requirement
    lines = [
        f"{requirement.symbol}: {verdict.state} in {requirement.package} {version}",
        f"    {verdict.reason}",
    ]
    if verdict.digest:
        lines.append(f"    digest found: {verdict.digest}")
    return "\n".join(lines)
