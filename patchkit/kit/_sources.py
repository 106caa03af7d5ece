"""The text of installed modules, read without importing them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from patchkit.kit.errors import UnknownModelError


def module_source(module: str) -> str:
    """The source of an installed module.

    Raises:
        UnknownModelError: Its package is not installed, or has no such module.
    """
    file = module_file(module)
    if file is None:
        package = module.partition(".")[0]
        raise UnknownModelError(
            module,
            expected=f"a module of the installed {package}",
            found="no such file",
            remedy=f"install {package} here, at a version that has the model",
        )
    return file.read_text(encoding="utf-8")


def module_file(module: str) -> Path | None:
    """Where a module lies; its parents are not imported."""
    top, *inner = module.split(".")
    spec = find_spec(top)  # a top-level name has no parents to import
    for location in (spec.submodule_search_locations if spec else None) or ():
        base = Path(location).joinpath(*inner)
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return file
    return None
