"""Implementations put on operators: whether the operator is declared."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from patchkit.audit._findings import Verdict, VerdictKind
from patchkit.audit._values import Ref
from patchkit.audit._verdicts.case import Case
from patchkit.audit._versions import Versions


class Operators:
    """The operators that the versions at hand declare."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions

    def undeclared(self, case: Case) -> Iterator[Verdict]:
        """The verdict on an operator that nothing at hand declares."""
        place = case.sighting.target
        assert isinstance(place, Ref)
        _, _, namespace, name = place.dotted.split(".")[:4]
        found = self._exists(namespace, name)
        if found is False:
            yield Verdict(
                version=case.label,
                kind=VerdictKind.GONE,
                text=f"no operator {namespace}::{name} is declared",
                confidence=0.9,
            )
        elif found is None:
            yield Verdict(
                version=case.label,
                kind=VerdictKind.UNKNOWN,
                text=f"the declaration of {namespace}::{name} is not in any source at hand",
            )

    def _exists(self, namespace: str, name: str) -> bool | None:
        package = "torch" if namespace in ("aten", "prims", "c10d") else "vllm"
        targets = self._versions.asked.get(package) or (
            [t] if (t := self._versions.installed(package)) is not None else []
        )
        for target in targets[-1:]:
            if namespace == "aten" and target.source is not None and self._aten:
                return name in self._aten
            for pattern in (
                f"{namespace}.{name}", f'op_name="{name}"', f'"{namespace}::{name}"',
                f"'{name}'", f'"{name}"',
            ):  # fmt: skip
                if target.files_with(pattern):
                    return True
            return None if namespace == "aten" else False
        return None

    @cached_property
    def _aten(self) -> frozenset[str]:
        """Operators in the declaration file that torch ships beside itself."""
        names: set[str] = set()
        spec = find_spec("torchgen")
        for location in (spec.submodule_search_locations or ()) if spec else ():
            file = Path(location, "packaged", "ATen", "native", "native_functions.yaml")
            if file.is_file():
                text = file.read_text("utf-8", "replace")
                names.update(re.findall(r"^- func: (\w+)[.(]", text, re.MULTILINE))
        return frozenset(names)
